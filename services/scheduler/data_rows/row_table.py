"""Counts, filters and sorts the rows of a job's data set by how they were played. Reads files of the job, which blocks;
no other I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from opentinker.shared.data.row_log import FlatStep, Point, RowPlays, read, series
from opentinker.shared.types.core import Ending, WeightVersion
from opentinker.shared.types.manifest import name_of

FIELDS = len(RowPlays.__struct_fields__)
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ORDERS = ("row", "solved", "played", "reward")
MAX_POINTS = 32
"""Points of a row's series."""
MAX_KEPT = 20
"""Steps with kept episodes that are named with a row, the newest."""


class PlayedRows:
    """The plays of rows. Entry E is a row in a step; row R is one of `rows`, which are in ascending order."""

    def __init__(self, steps_E: Sequence[int] | Ints, table: Floats, first_step: int = 0) -> None:
        """`table`: the fields of RowPlays of each entry. `first_step`: earlier steps were left out of the file; 0: none
        were."""
        rows_E, self._played_E, self._solved_E, rewards_E, self._kept_E = table.T
        self._steps_E, self.first_step = np.asarray(steps_E), first_step
        self.rows, self._place_E = np.unique(rows_E.astype(np.int64), return_inverse=True)
        total = partial(np.bincount, self._place_E, minlength=len(self.rows))
        self.played_R, solved_R, reward_R = total(self._played_E), total(self._solved_E), total(rewards_E)
        self.solved_R, self.reward_R = solved_R / self.played_R, reward_R / self.played_R

    def shown(self, row: int) -> dict[str, Any]:
        """Return the counts of a row, as the API has them."""
        place = int(np.searchsorted(self.rows, row))
        if place == len(self.rows) or self.rows[place] != row:
            return {"played": 0, "reward": None, "solved": None, "series": [], "kept": []}
        own_E = np.flatnonzero(self._place_E == place)
        columns = (self._steps_E[own_E], self._played_E[own_E], self._solved_E[own_E])
        points = series([Point(int(s), int(p), int(w)) for s, p, w in zip(*columns, strict=True)], MAX_POINTS)
        return {
            "played": int(self.played_R[place]),
            "reward": float(self.reward_R[place]),
            "solved": float(self.solved_R[place]),
            "series": [{"step": one.step, "played": one.played, "solved": one.solved / one.played} for one in points],
            "kept": [int(step) for step in self._steps_E[own_E[self._kept_E[own_E] > 0]][-MAX_KEPT:]],
        }


def of_training(home: Path) -> PlayedRows:
    """Return the counts of a job that trains, or of one of its policies."""
    steps, files = read(home, FlatStep), set[str]()
    with contextlib.suppress(FileNotFoundError):
        files = {path.stem for path in (home / "rollouts").iterdir()}
    sizes = [len(step.rows) for step in steps]
    table = np.array([row for step in steps for row in step.rows], dtype=np.float64).reshape(-1, FIELDS)
    is_there = [not step.first and name_of(step.step) in files for step in steps]
    table[:, -1] *= np.repeat(is_there, sizes)
    numbers_E = np.repeat([step.step for step in steps], sizes)
    return PlayedRows(numbers_E, table, (steps[0].first or steps[0].step) if steps and steps[0].cut else 0)


class EvaluatedRow(msgspec.Struct):
    """The fields of an EvalResult that count here."""

    version: WeightVersion
    index: int
    ending: Ending
    reward: float = 0.0
    row: int | None = None


def of_evaluation(results: Path, solved_at: float, kept: int) -> PlayedRows:
    """Return the counts of an eval job. `kept`: number of episodes, from the first, that can be read."""
    seen = set[int]()
    totals: dict[int, list[EvaluatedRow]] = {}
    with contextlib.suppress(FileNotFoundError), results.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # half a line, of a process that was killed
                one = msgspec.json.decode(line, type=EvaluatedRow)
                if one.row is not None and not one.ending.failed and one.index not in seen:
                    seen.add(one.index)
                    totals.setdefault(one.row, []).append(one)
    steps = [episodes[0].version.step for episodes in totals.values()]
    entries = [
        (
            row,
            len(episodes),
            sum(one.reward >= solved_at for one in episodes),
            sum(one.reward for one in episodes),
            any(one.index < kept for one in episodes),
        )
        for row, episodes in totals.items()
    ]
    return PlayedRows(steps, np.array(entries, dtype=np.float64).reshape(-1, FIELDS))


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the solved share. With one, rows that were not played are not wanted."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __bool__(self) -> bool:
        return any(bound is not None for bound in (self.least, self.most, self.above, self.below))

    def passed(self, share_R: Floats) -> npt.NDArray[np.bool_]:
        found = np.ones(len(share_R), dtype=np.bool_)
        if self.least is not None:
            found &= share_R >= self.least
        if self.most is not None:
            found &= share_R <= self.most
        if self.above is not None:
            found &= share_R > self.above
        if self.below is not None:
            found &= share_R < self.below
        return found


class RowChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Filter and order of a list of rows."""

    order: str
    solved: Bounds = Bounds()


def page_of(
    rows: Sequence[int], played: PlayedRows, choice: RowChoice, offset: int, limit: int
) -> tuple[int, list[int]]:
    """Return the number of wanted rows, and a page of them. `rows`: all, as a range from 0, or some in order. Rows that
    were not played are last in every order but that of rows. Takes no longer for a longer range."""
    name, falls = choice.order.removeprefix("-"), choice.order.startswith("-")
    among = played.rows < len(rows) if isinstance(rows, range) else np.isin(played.rows, np.array(rows, dtype=np.int64))
    known = np.flatnonzero(among)
    if choice.solved:
        known = known[choice.solved.passed(played.solved_R[known])]
    if name == "row":
        wanted: Sequence[int] = played.rows[known].tolist() if choice.solved else rows
        ordered = wanted[::-1] if falls else wanted
        return len(wanted), list(ordered[offset : offset + limit])
    values = {"solved": played.solved_R, "played": played.played_R, "reward": played.reward_R}[name][known]
    first: list[int] = played.rows[known[np.argsort(-values if falls else values, kind="stable")]].tolist()
    page = first[offset : offset + limit]
    if choice.solved:
        return len(first), page
    skipped = max(0, offset - len(first))
    others = _unplayed(rows, sorted(first), skipped) if skipped < len(rows) - len(first) else iter(())
    return len(rows), [*page, *islice(others, limit - len(page))]


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
