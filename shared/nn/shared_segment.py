"""A piece of memory that processes of one machine share: a file in /dev/shm, with a name only until everyone has it.

The process that makes a segment holds a lock on the file. It removes the name as soon as all members have opened the
file, so the memory ends with the processes. Where it was killed before, the lock is free, and the next one that makes a
segment removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import torch

DIRECTORY = Path("/dev/shm")
PREFIX = "opentinker-weights-"
NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")


class Segment:
    """Bytes in `tensor`, flat uint8."""

    def __init__(self, name: str, file: int, size: int) -> None:
        self.name = name
        self.size = size
        self._file: int | None = file
        self._pinned = False
        self._memory = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def make(cls, size: int) -> Segment:
        """Raises OSError without shared memory, or without room for it."""
        remove_orphans()
        name = PREFIX + secrets.token_hex(16)
        file = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file, 0, size)  # else the first write beyond what is free would kill the process
            return cls(name, file, size)
        except OSError:
            os.unlink(DIRECTORY / name)
            os.close(file)
            raise

    @classmethod
    def open(cls, name: str, size: int) -> Segment:
        """Open one that another process has made. Raises OSError, ValueError for anything else."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a segment")
        file = os.open(DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise ValueError(f"{name} is not a file of {size} bytes")
            return cls(name, file, size)
        finally:
            os.close(file)

    def pin(self) -> None:
        """Let a GPU copy from and to it without an intermediate copy; slower without, where CUDA refuses."""
        if not self._pinned:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0)) == 0

    def unlink(self) -> None:
        """Its maker: remove the name, once those who need it have opened it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(DIRECTORY / self.name)
            os.close(file)

    def close(self) -> None:
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)  # the mapping ends with the last view of it


def remove_orphans() -> None:
    """Remove segments whose makers were killed before they removed the names."""
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed since
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(file)
