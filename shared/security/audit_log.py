"""The audit log: who did what to which object, one JSON object per line, numbered without gaps.

    DATA_DIR/audit/SCHEDULER.jsonl          the current file
    DATA_DIR/audit/SCHEDULER.NUMBER.jsonl   older ones, by the number of their first line

A line holds its number `seq` and what was done. Lines of older releases also hold `prev` and `hash`.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.durable_files import make_directories, sync_directory
from opentinker.shared.types.errors import OpenTinkerError

FILE_BYTES = 64 << 20


class AuditBroken(OpenTinkerError):
    """`str(error)`: which line of which file, and what is wrong there."""


@dataclass(frozen=True)
class Verified:
    lines: int
    first: int
    last: int


def folder(data_dir: Path) -> Path:
    return data_dir / "audit"


class AuditFile:
    """The log of one writer. Blocking; other processes may write the same log."""

    def __init__(self, directory: Path, writer: str, file_bytes: int = FILE_BYTES) -> None:
        self._path = directory / f"{re.sub(r'[^A-Za-z0-9_-]', '-', writer)}.jsonl"
        self._max_bytes = file_bytes
        self._size, self._seq = -1, 0
        make_directories(directory, 0o700)

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Append an entry, which is on the disk on return. Raises OSError."""
        with (self._path.parent / f".{self._path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._path.exists() or self._path.stat().st_size != self._size:
                entries = [*self._resume(), *entries]
            if self._size >= self._max_bytes:
                self._rotate()
            self._write(entries)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        lines = [orjson.dumps({"seq": seq, **entry}, default=str) for seq, entry in enumerate(entries, self._seq + 1)]
        fresh = not self._path.exists()
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            self._size = -1  # after a failed write the size is unknown
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            self._size, self._seq = file.tell(), self._seq + len(entries)
        if fresh:
            sync_directory(self._path.parent)

    def _resume(self) -> list[dict[str, Any]]:
        """Find the last whole line. A torn line behind it was never acknowledged: it is cut off, and the returned
        entry records that."""
        self._size, self._seq = 0, 0
        torn = 0
        for path in reversed(files_of(self._path)):
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if path == self._path:
                if b"\0" in data[_last_line(data, whole) : whole]:  # its other half never reached the disk
                    whole = _last_line(data, whole)
                torn = len(data) - whole
                if torn:
                    os.truncate(path, whole)
                self._size = whole
            if whole:
                self._seq = int(orjson.loads(data[_last_line(data, whole) : whole])["seq"])
                break
        return [{"event": "cut", "bytes": torn}] if torn else []

    def _rotate(self) -> None:
        with self._path.open("rb") as file:
            first = orjson.loads(file.readline())["seq"]
        self._path.rename(self._path.with_name(f"{self._path.stem}.{first}.jsonl"))
        sync_directory(self._path.parent)
        self._size = 0


def _last_line(data: bytes, end: int) -> int:
    """Return the offset at which the line that ends at `end` begins."""
    return data.rfind(b"\n", 0, max(0, end - 1)) + 1


def writers(directory: Path) -> list[Path]:
    """Return the current file of every log in the directory, whether it exists or not."""
    stems = {re.sub(r"\.\d+$", "", path.stem) for path in directory.glob("*.jsonl")}
    return [directory / f"{stem}.jsonl" for stem in sorted(stems)]


def files_of(current: Path) -> list[Path]:
    """Return the files of a log, oldest first."""
    older = {
        int(match[1]): path
        for path in current.parent.glob(f"{current.stem}.*.jsonl")
        if (match := re.fullmatch(rf"{re.escape(current.stem)}\.(\d+)\.jsonl", path.name))
    }
    return [*(path for _, path in sorted(older.items())), *([current] if current.exists() else [])]


def verify(current: Path, first: int = 1) -> Verified:
    """Check that every line of a log can be read and none is missing, doubled or moved. Raises AuditBroken.

    `first`: lines before this number were removed on purpose.
    """
    expected = first
    for path in files_of(current):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    seq = orjson.loads(line)["seq"]
                except (orjson.JSONDecodeError, KeyError, TypeError):
                    raise AuditBroken(f"{path.name}:{number}: not a line of an audit log") from None
                if isinstance(seq, int) and seq < first:
                    continue
                if seq != expected:
                    raise AuditBroken(
                        f"{path.name}:{number}: line {seq} where {expected} is expected: lines are missing or moved"
                    )
                expected += 1
    return Verified(expected - first, first, expected - 1)
