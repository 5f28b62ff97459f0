"""metrics.jsonl of a job: one line per optimizer step, with the groups it trained on. The truth for reports and audits.

A disk that refuses a line does not end the job: lines are kept in memory, in order, and written with the next one.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import structlog

from opentinker.shared.durable_files import make_directories, sync_directory, sync_file
from opentinker.shared.types.core import part_id, split_part
from opentinker.shared.types.telemetry import MetricPoint

log = structlog.get_logger()

CHUNK = 1 << 16
TRAINER_SOURCE = "trainer"
"""Source of the metrics of steps."""


UNNAMED = "metrics.jsonl"
"""Incarnation of points whose lines do not name them."""


def trainer_source(policy: str) -> str:
    """Return the source of the metrics of a policy's steps; a job with one policy has it under the empty name."""
    return part_id(TRAINER_SOURCE, policy)


def metric_prefix(policy: str) -> str:
    """Return what the names of a policy's metrics begin with in the job's history: its own files have none."""
    return f"{policy}/" if policy else ""


def point_of(part: str, line: Mapping[str, Any], number: int) -> MetricPoint:
    """Return the metric point of a line. `part`: the job, or JOB~POLICY. Lines of versions that did not write `point`
    are named by their `number`."""
    incarnation, seq = line.get("point") or (UNNAMED, number)
    job, policy = split_part(part)
    prefix = metric_prefix(policy)
    return MetricPoint(
        job=job,
        source=trainer_source(policy),
        incarnation=incarnation,
        seq=seq,
        time=line["time"],
        step=line["step"],
        values={prefix + name: value for name, value in line.items() if isinstance(value, float) and name != "time"},
    )


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line of the file; None if it is torn or not one of a step."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("time"), float) or not isinstance(line.get("step"), int):
        return None
    return line


def lineage(path: Path, resumed: Mapping[int, int], step: int) -> list[dict[str, Any]]:
    """The lines of the steps that led to `step`, in order. `resumed`: epoch -> step at which it began (Manifest)."""
    return list(read_lineage(path, resumed, step))


def read_lineage(path: Path, resumed: Mapping[int, int], step: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of `lineage`, with one of them in memory at a time."""
    places: dict[int, int] = {}
    """Where the line of each step begins: its last one, if there are several."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        end = 0
        for raw in file:
            begin, end = end, end + len(raw)
            with contextlib.suppress(orjson.JSONDecodeError):  # half a line, of a process that was killed
                line = orjson.loads(raw)
                if isinstance(line, dict) and _leads_to(line, resumed, step):
                    places[line["step"]] = begin
        for number in sorted(places):
            file.seek(places[number])
            yield orjson.loads(file.readline())


def _leads_to(line: Mapping[str, Any], resumed: Mapping[int, int], step: int) -> bool:
    """Return whether a line is of a step that led to `step` and was not rolled back."""
    if not {"epoch", "step"} <= line.keys() or line["epoch"] not in resumed:
        return False
    return bool(line["step"] <= min([step, *(began for epoch, began in resumed.items() if epoch > line["epoch"])]))


class StepLog:
    """One writer of the file. What a power cut or a kill left of its last line is cut off before the first new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[bytes] = []
        """Lines that are not in the file yet."""
        self._mended = False

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, after those kept from before. Raises OSError as `flush` does."""
        self._kept.append(orjson.dumps(line) + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what was kept. Raises OSError when it cannot: then the file is as before and nothing is lost."""
        if not self._kept:
            return
        make_directories(self._path.parent)
        with self._path.open("a+b", buffering=0) as file:
            if not self._mended:
                _cut_torn_line(file, self._path)
                self._mended = True
            end = file.seek(0, os.SEEK_END)
            left = memoryview(b"".join(self._kept))
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)  # no half lines
                raise
        self._kept.clear()

    def sync(self) -> None:
        """`flush`, and all lines to the disk itself. Raises OSError as `flush` does."""
        self.flush()
        with contextlib.suppress(FileNotFoundError):  # no step yet, no file
            sync_file(self._path)
            sync_directory(self._path.parent)


def _cut_torn_line(file: io.FileIO, path: Path) -> None:
    """A power cut leaves half a line, or zero bytes, at the end of what was not synced."""
    end = left = file.seek(0, os.SEEK_END)
    whole = 0
    while left and not whole:
        first = max(0, left - CHUNK)
        file.seek(first)
        whole = file.read(left - first).rfind(b"\n") + 1
        whole, left = first + whole if whole else 0, first
    if whole < end:
        file.truncate(whole)
        log.warning("torn_line_removed", file=str(path), bytes=end - whole)
