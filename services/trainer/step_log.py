"""metrics.jsonl of a job: one line per optimizer step, with the groups it trained on. The truth for reports and audits.

A disk that refuses a line does not end the job: lines are kept in memory, in order, and written with the next one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import orjson


class StepLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[bytes] = []
        """Lines that are not in the file yet."""

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, after those kept from before. Raises OSError as `flush` does."""
        self._kept.append(orjson.dumps(line) + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what was kept. Raises OSError when it cannot: then the file is as before and nothing is lost."""
        if not self._kept:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
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
        with contextlib.suppress(FileNotFoundError), self._path.open("ab") as file:  # no step yet, no file
            os.fsync(file.fileno())
