"""Logs how often each row of a job's data set was played and solved, step by step.

{data_dir}/jobs/{job}/rows.jsonl    one line per optimizer step, with the rows of the groups that it trained on, and of
                                    those discarded since the step before; also of steps rolled back later

A trainer writes it, and the scheduler reads it. At MAX_BYTES neighbouring lines are merged, and if that is not enough
the oldest are left out, so that a job of any length has a file of bounded size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from opentinker.shared.durable_files import replace_durably

NAME = "rows.jsonl"
MAX_BYTES = 16 << 20
"""Limit of the file; about a million groups."""


class RowPlays(msgspec.Struct, frozen=True, array_like=True):
    """Episodes of one row."""

    row: int
    played: int
    solved: int
    reward: float
    """Sum over the episodes."""
    kept: bool = False
    """Whether people can read one of them."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The step of a line, or several that were merged."""

    epoch: int
    step: int
    """The last of them."""
    first: int = 0
    """The first of several; 0: one step."""
    cut: bool = False
    """Whether steps before this line were left out."""


class RowStep(StepLine, frozen=True, kw_only=True, omit_defaults=True):
    """A line."""

    rows: list[RowPlays]


class FlatStep(StepLine, frozen=True, kw_only=True, omit_defaults=True):
    """A line, for those who read hundreds of thousands of rows."""

    rows: list[tuple[int, int, int, float, bool]]
    """Fields of RowPlays."""


L = TypeVar("L", bound=StepLine)


class RowLog:
    """Writes the file. Blocking."""

    def __init__(self, home: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = home / NAME, max_bytes

    def add(self, step: RowStep) -> None:
        """Append a line. Raises OSError."""
        if not step.rows:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if file.tell() and not self._ends_whole():
                file.write(b"\n")  # after half a line of a process that was killed
            file.write(msgspec.json.encode(step) + b"\n")
            size = file.tell()
        if size > self._max_bytes:
            lines = shortened(read(self._path.parent, RowStep), self._max_bytes // 2)
            replace_durably(self._path, b"".join(lines))

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def read(home: Path, kind: type[L]) -> list[L]:
    """Return the steps of the lineage, oldest first: a line replaces earlier ones from its step on. Blocking."""
    found: list[L] = []
    decoder = msgspec.json.Decoder(kind)
    with contextlib.suppress(FileNotFoundError), (home / NAME).open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # half a line, of a process that was killed
                step = decoder.decode(line)
                while found and found[-1].step >= (step.first or step.step):
                    found.pop()
                found.append(step)
    return found


def shortened(steps: Sequence[RowStep], max_bytes: int) -> list[bytes]:
    """Return the lines of these steps, with neighbours merged; the oldest are left out if they have more bytes."""
    pairs = [steps[at : at + 2] for at in range(0, len(steps), 2)]
    lines = [msgspec.json.encode(merged(pair)) + b"\n" for pair in pairs]
    left, kept = max_bytes, 0
    for line in reversed(lines):
        left -= len(line)
        if left < 0:
            break
        kept += 1
    if kept < len(lines):
        oldest = merged(pairs[len(lines) - kept]) if kept else None
        lines = lines[len(lines) - kept :]
        if oldest is not None:
            lines[0] = msgspec.json.encode(msgspec.structs.replace(oldest, cut=True)) + b"\n"
    return lines


def merged(steps: Sequence[RowStep]) -> RowStep:
    """Return several steps as one line."""
    if len(steps) == 1:
        return steps[0]
    first, last = steps[0], steps[-1]
    rows = list(by_row(play for step in steps for play in step.rows).values())
    return RowStep(epoch=last.epoch, step=last.step, first=first.first or first.step, cut=first.cut, rows=rows)


def by_row(plays: Iterable[RowPlays]) -> dict[int, RowPlays]:
    """Return the sums by row."""
    found: dict[int, RowPlays] = {}
    for one in plays:
        had = found.get(one.row)
        found[one.row] = one if had is None else added(had, one)
    return found


def added(one: RowPlays, other: RowPlays) -> RowPlays:
    return RowPlays(
        one.row,
        one.played + other.played,
        one.solved + other.solved,
        one.reward + other.reward,
        one.kept or other.kept,
    )


class Point(NamedTuple):
    """The plays of a row in some steps."""

    step: int
    """The last of them."""
    played: int
    solved: int


def series(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points, oldest first: neighbours are merged, as equally many as possible."""
    size = -(-len(points) // most) if points else 1
    parts = [list(islice(points, at, at + size)) for at in range(0, len(points), size)]
    return [Point(part[-1].step, sum(p.played for p in part), sum(p.solved for p in part)) for part in parts]
