"""Ends the suite where a check hangs: nothing in Python stops a thread that waits for a GPU or for another process."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opentinker.shared.runtime.reexec import end_children


@contextmanager
def limited(limit_s: float, place: Path, report: Callable[[], None]) -> Iterator[None]:
    """End this process with status 1 if the body takes longer: what it has started first, then the directory `place`,
    and after `report`."""
    ending = threading.Event()

    def end() -> None:
        ending.set()
        try:
            end_children(os.getpid())
            shutil.rmtree(place, ignore_errors=True)
            report()
            end_children(os.getpid())  # the body may have gone on without those that were killed
        finally:
            os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if ending.is_set():
            threading.Event().wait()  # until the process ends
