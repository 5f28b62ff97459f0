"""How the rows of a job's data set were played: counts by row, filters and orders. Without I/O, except for reading the
files of the job, which blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from opentinker.shared.data.row_log import Point, read, series
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.manifest import name_of

ORDERS = ("row", "solved", "played", "reward")
MAX_POINTS = 32
"""Points of a row's series."""
MAX_KEPT = 20
"""Steps with kept episodes that are named with a row, the newest."""


@dataclass
class RowCounts:
    """Of one row."""

    played: int = 0
    solved: int = 0
    reward: float = 0.0
    """Sum over its episodes."""
    points: list[Point] = field(default_factory=list)
    """By step, oldest first."""
    kept: list[int] = field(default_factory=list)
    """Steps with episodes of it that can be read."""

    @property
    def share(self) -> float:
        return self.solved / self.played

    def add(self, point: Point, reward: float, kept: bool) -> None:
        self.played += point.played
        self.solved += point.solved
        self.reward += reward
        self.points.append(point)
        if kept:
            self.kept.append(point.step)

    def shown(self) -> dict[str, Any]:
        return {
            "played": self.played,
            "reward": self.reward / self.played if self.played else None,
            "solved": self.share if self.played else None,
            "series": [
                {"step": one.step, "played": one.played, "solved": one.solved / one.played}
                for one in series(self.points, MAX_POINTS)
            ],
            "kept": self.kept[-MAX_KEPT:],
        }


@dataclass
class PlayedRows:
    rows: dict[int, RowCounts] = field(default_factory=dict)
    first_step: int = 0
    """Earlier steps were left out of the job's file; 0: none were."""


def of_training(home: Path) -> PlayedRows:
    """Return the counts of a job that trains, or of one of its policies."""
    found = PlayedRows()
    steps, files = read(home), set[str]()
    with contextlib.suppress(FileNotFoundError):
        files = {path.stem for path in (home / "rollouts").iterdir()}
    if steps and steps[0].cut:
        found.first_step = steps[0].first or steps[0].step
    for step in steps:
        for one in step.rows:
            kept = one.kept and not step.first and name_of(step.step) in files
            point = Point(step.step, one.played, one.solved)
            found.rows.setdefault(one.row, RowCounts()).add(point, one.reward, kept)
    return found


class EvaluatedRow(msgspec.Struct):
    """The fields of an EvalResult that count here."""

    version: WeightVersion
    index: int
    ending: Ending
    reward: float = 0.0
    row: int | None = None


def of_evaluation(results: Path, solved_at: float, kept: int) -> PlayedRows:
    """Return the counts of an eval job. `kept`: number of episodes, from the first, that can be read."""
    found, seen = PlayedRows(), set[int]()
    totals: dict[int, list[EvaluatedRow]] = {}
    with contextlib.suppress(FileNotFoundError), results.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # half a line, of a process that was killed
                one = msgspec.json.decode(line, type=EvaluatedRow)
                if one.row is not None and not one.ending.failed and one.index not in seen:
                    seen.add(one.index)
                    totals.setdefault(one.row, []).append(one)
    for row, episodes in totals.items():
        solved = sum(one.reward >= solved_at for one in episodes)
        point = Point(episodes[0].version.step, len(episodes), solved)
        is_kept = any(one.index < kept for one in episodes)
        found.rows.setdefault(row, RowCounts()).add(point, sum(one.reward for one in episodes), is_kept)
    return found


class RowChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are wanted, and in which order."""

    order: str
    low: float | None = None
    """Smallest solved share."""
    high: float | None = None
    """Largest solved share. With a bound, rows that were not played are not wanted."""

    def passes(self, one: RowCounts) -> bool:
        return (self.low is None or one.share >= self.low) and (self.high is None or one.share <= self.high)


def page_of(
    rows: Sequence[int], played: dict[int, RowCounts], choice: RowChoice, offset: int, limit: int
) -> tuple[int, list[int]]:
    """Return the number of wanted rows, and a page of them. `rows`: all, as a range from 0, or some in order. Rows that
    were not played are last in every order but that of rows. Takes no longer for a longer range."""
    name, falls = choice.order.removeprefix("-"), choice.order.startswith("-")
    among = rows if isinstance(rows, range) else set(rows)
    known = sorted(row for row in played if row in among)
    is_bounded = choice.low is not None or choice.high is not None
    wanted = [row for row in known if choice.passes(played[row])] if is_bounded else rows
    if name == "row":
        ordered = wanted[::-1] if falls else wanted
        return len(wanted), list(ordered[offset : offset + limit])
    first = _sorted(wanted if is_bounded else known, played, name, falls=falls)
    page = first[offset : offset + limit]
    skipped = max(0, offset - len(first))
    if is_bounded or len(page) == limit or skipped >= len(rows) - len(known):
        return len(wanted), page
    return len(wanted), [*page, *islice(_unplayed(rows, known, skipped), limit - len(page))]


def _unplayed(rows: Sequence[int], known: Sequence[int], skipped: int) -> Iterator[int]:
    """Yield the rows that are not among `known`, after the first `skipped` of them."""
    others = set(known)
    if not isinstance(rows, range):
        yield from islice((row for row in rows if row not in others), skipped, None)
        return
    first = skipped
    for row in known:  # each one up to there moves it by one
        first += row <= first
    yield from (row for row in range(first, len(rows)) if row not in others)


def _sorted(rows: Iterable[int], played: dict[int, RowCounts], name: str, *, falls: bool) -> list[int]:
    def key(row: int) -> float:
        one = played[row]
        return {"solved": one.share, "played": float(one.played), "reward": one.reward / one.played}[name]

    return sorted(rows, key=key, reverse=falls)
