"""A disk that loses whatever nobody waited for: fsyncs of this process are noted, and a copy is made of what they held.

WITHOUT_CONTENT   all names are there, and files have what was synced of them, maybe nothing: a journal that commits
                  names before anybody writes the data back
WITHOUT_NAMES     a directory has the names that it had when it was synced, and no others
"""

from __future__ import annotations

import os
import stat
from enum import Enum
from pathlib import Path

import pytest


class Cut(Enum):
    WITHOUT_CONTENT = "without content"
    WITHOUT_NAMES = "without names"


class UnsyncedDisk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fsync = os.fsync
        self._contents: dict[int, bytes] = {}
        """By inode."""
        self._names: dict[int, dict[str, int]] = {}
        self._open: list[int] = []
        """A descriptor of everything that was synced: so no inode is given to another file."""
        monkeypatch.setattr(os, "fsync", self._noted)

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def _noted(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        self._open.append(os.dup(descriptor))
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(descriptor)}
        else:
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self._contents[status.st_ino] = file.read()

    def cut(self, root: Path, into: Path, how: Cut) -> None:
        """Return what is left of `root`, which itself existed before."""
        into.mkdir(mode=root.stat().st_mode & 0o777)
        synced = self._names.get(root.stat().st_ino, {})
        for path in root.iterdir():
            status = path.lstat()
            if how is Cut.WITHOUT_NAMES and synced.get(path.name) != status.st_ino:
                continue
            if stat.S_ISDIR(status.st_mode):
                self.cut(path, into / path.name, how)
            elif stat.S_ISREG(status.st_mode):
                (into / path.name).write_bytes(self._contents.get(status.st_ino, b""))
                (into / path.name).chmod(status.st_mode & 0o777)
