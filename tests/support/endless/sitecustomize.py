"""A disk that does not answer: with this folder in PYTHONPATH a process waits for ever at one place.

ENDLESS_EVENT and ENDLESS_PATH: the audit event, and how its first argument begins; ENDLESS_MARK: a file that is made
when somebody has come there; ENDLESS_CHILD: children of multiprocessing alone.
"""

import multiprocessing.process
import os
import sys
import threading
from pathlib import Path


def _wait_for_ever(event: str, arguments: tuple[object, ...]) -> None:
    if event != os.environ["ENDLESS_EVENT"] or not str(arguments[0]).startswith(os.environ["ENDLESS_PATH"]):
        return
    if os.environ.get("ENDLESS_CHILD") and multiprocessing.process.current_process().name == "MainProcess":
        return
    Path(os.environ["ENDLESS_MARK"]).touch()
    threading.Event().wait()


if "ENDLESS_EVENT" in os.environ:
    sys.addaudithook(_wait_for_ever)
