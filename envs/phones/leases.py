"""Leases of phones: a phone plays one episode at a time, among all processes of this machine.

A lease is a lock on a file named after the phone. The kernel releases it when its process dies, so nothing is left to
clean up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from opentinker.shared.settings_sources import load_settings

HOME = "phones"


class PhoneLease:
    """The phone `url`, until `release`."""

    def __init__(self, url: str, file: int) -> None:
        self.url = url
        self._file = file

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def home() -> Path:
    """Return the directory of the locks: processes that share a data directory share phones."""
    return load_settings().data_dir.resolve() / HOME


def take(url: str, place: Path) -> PhoneLease | None:
    """Return a lease, or None if the phone is taken. `place`: the directory of the locks. Raise OSError."""
    place.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
    file = os.open(place / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except BaseException:
        os.close(file)
        raise
    return PhoneLease(url, file)
