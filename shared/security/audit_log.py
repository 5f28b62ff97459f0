"""The audit log: who did what to which object, one line each, every line bound to the one before it.

    DATA_DIR/audit/SCHEDULER.jsonl          the present file
    DATA_DIR/audit/SCHEDULER.NUMBER.jsonl   older ones, by the number of their first line

A line is a JSON object with its number `seq`, what was done, `prev` (the hash of the line before) and `hash`: SHA-256
of the line without it. Whoever changes, takes out, adds or moves a line breaks the chain behind it. Whoever can write
all the files may make a new chain, or cut off its end: against that, note a hash elsewhere, and ask `verify` for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from opentinker.shared.durable_files import make_directories, sync_directory
from opentinker.shared.types.errors import OpenTinkerError

FILE_BYTES = 64 << 20
NOTHING = "0" * 64
"""`prev` of the first line."""


class AuditBroken(OpenTinkerError):
    """`str(error)`: which line of which file, and what is wrong there."""


@dataclass(frozen=True)
class Verified:
    lines: int
    first: int
    last: int
    hash: str
    """Hash of the last line."""


def folder(data_dir: Path) -> Path:
    return data_dir / "audit"


class AuditFile:
    """One writer's chain. Blocking; other processes may write the same chain."""

    def __init__(self, directory: Path, writer: str, file_bytes: int = FILE_BYTES) -> None:
        self._path = directory / f"{re.sub(r'[^A-Za-z0-9_-]', '-', writer)}.jsonl"
        self._most = file_bytes
        self._size, self._seq, self._hash = -1, 0, NOTHING
        make_directories(directory, 0o700)

    def append(self, entries: list[dict[str, Any]]) -> None:
        """On the disk when it returns. Raises OSError."""
        with (self._path.parent / f".{self._path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._path.exists() or self._path.stat().st_size != self._size:
                entries = [*self._resume(), *entries]
            if self._size >= self._most:
                self._rotate()
            self._write(entries)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        seq, before, lines = self._seq, self._hash, []
        for entry in entries:
            seq += 1
            line = _line({"seq": seq, **entry, "prev": before})
            before = _hash_of(line)
            lines.append(line[:-1] + b',"hash":"' + before.encode() + b'"}\n')
        fresh = not self._path.exists()
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            self._size = -1  # after a failed write the size is unknown
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
            self._size, self._seq, self._hash = file.tell(), seq, before
        if fresh:
            sync_directory(self._path.parent)

    def _resume(self) -> list[dict[str, Any]]:
        """Go on behind the last whole line. What is behind that was never confirmed to anybody: it is cut off, and the
        chain says so."""
        self._size, self._seq, self._hash = 0, 0, NOTHING
        torn = 0
        for path in reversed(files_of(self._path)):
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if path == self._path:
                if b"\0" in data[_last_line(data, whole) : whole]:  # its other half never came to the disk
                    whole = _last_line(data, whole)
                torn = len(data) - whole
                if torn:
                    os.truncate(path, whole)
                self._size = whole
            if whole:
                last = orjson.loads(data[_last_line(data, whole) : whole])
                self._seq, self._hash = int(last["seq"]), str(last["hash"])
                break
        return [{"event": "cut", "bytes": torn}] if torn else []

    def _rotate(self) -> None:
        with self._path.open("rb") as file:
            first = orjson.loads(file.readline())["seq"]
        self._path.rename(self._path.with_name(f"{self._path.stem}.{first}.jsonl"))
        sync_directory(self._path.parent)
        self._size = 0


def _last_line(data: bytes, end: int) -> int:
    """Where the line begins that ends there."""
    return data.rfind(b"\n", 0, max(0, end - 1)) + 1


def writers(directory: Path) -> list[Path]:
    """The present file of every chain in the directory, there or not."""
    stems = {re.sub(r"\.\d+$", "", path.stem) for path in directory.glob("*.jsonl")}
    return [directory / f"{stem}.jsonl" for stem in sorted(stems)]


def files_of(present: Path) -> list[Path]:
    """A chain's files, oldest first."""
    older = {
        int(match[1]): path
        for path in present.parent.glob(f"{present.stem}.*.jsonl")
        if (match := re.fullmatch(rf"{re.escape(present.stem)}\.(\d+)\.jsonl", path.name))
    }
    return [*(path for _, path in sorted(older.items())), *([present] if present.exists() else [])]


def verify(present: Path, first: int = 1, expected: str = "") -> Verified:
    """Raises AuditBroken. `first`: lines before this number were taken away on purpose. `expected`: a hash noted
    earlier, which must be in the chain."""
    count, seq, before, begin, met = 0, 0, NOTHING, 0, not expected
    for place, raw in _lines(files_of(present)):
        entry = _parsed(place, raw)
        if entry["seq"] < first:
            continue
        if not count:
            begin = seq = first
            before = NOTHING if first == 1 else entry["prev"]
        else:
            seq += 1
        if entry["seq"] != seq:
            raise AuditBroken(
                f"{place}: line number {entry['seq']} stands where {seq} should: lines are missing, or moved"
            )
        if entry["prev"] != before:
            raise AuditBroken(
                f"{place}: line {seq} does not follow the line before it: one of them was changed or moved"
            )
        before, count = entry["hash"], count + 1
        met = met or before == expected
    if not met:
        raise AuditBroken(f"{present}: no line has the hash {expected}: the chain was cut off, or made anew")
    return Verified(count, begin, seq, before)


def _lines(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield f"{path.name}:{number}", raw


def _parsed(place: str, raw: bytes) -> dict[str, Any]:
    """A line whose own hash holds. Raises AuditBroken."""
    try:
        entry = orjson.loads(raw)
        seq, before, said = entry["seq"], entry["prev"], entry["hash"]
        content = {name: value for name, value in entry.items() if name != "hash"}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise AuditBroken(f"{place}: is no line of an audit log") from None
    line = _line(content)
    same = raw == line[:-1] + b',"hash":"' + str(said).encode() + b'"}\n'
    if not same or _hash_of(line) != said or not isinstance(seq, int) or not isinstance(before, str):
        raise AuditBroken(f"{place}: line {seq} was changed: its hash is not that of what it says")
    return {"seq": seq, "prev": before, "hash": said}


def _line(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content, default=str)


def _hash_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
