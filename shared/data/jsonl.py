"""Rows of a .jsonl file, plain or compressed: line by line, so that a mistake has a line number.

The scheduler looks at the first row when a job is submitted; the trainer reads all of them.
"""

from __future__ import annotations

import gzip
import itertools
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from opentinker.shared.durable_files import local_path
from opentinker.shared.spec.data import JSON, JSONL, PARQUET

MAX_ROW_BYTES = 64 << 20
MAX_BLANK = 1_000_000
"""Lines one after another: a small compressed file may hold any number of them."""


class RowError(ValueError):
    """A bad row, with file and line."""


def rows_path(name: str) -> Path | None:
    """The file or directory of rows that `name` means; None if it is the id of a data set on a hub."""
    return local_path(name, (*JSONL, JSON, PARQUET))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and text of each line that is not blank. Raises RowError if the file cannot be read."""
    try:
        with _open(path) as file:
            blank = 0
            for number in itertools.count(1):
                line = file.readline(MAX_ROW_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_ROW_BYTES:
                    raise RowError(f"{path}, line {number}: has more than {MAX_ROW_BYTES >> 20} MiB")
                blank = 0 if line.strip() else blank + 1
                if not blank:
                    yield number, line
                elif blank > MAX_BLANK:
                    raise RowError(f"{path}, line {number}: follows {MAX_BLANK} blank ones")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise RowError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def row_of(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Raises RowError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RowError(f"{path}, line {number}: is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(
            f"{path}, line {number}: is not an object with named fields: {line[:100].decode('utf8', 'replace')}"
        )
    return row


def first_row(path: Path) -> dict[str, Any]:
    """Return the first row. Raises RowError, also for an empty file."""
    for number, line in lines(path):
        return row_of(path, number, line)
    raise RowError(f"{path} has no rows")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
