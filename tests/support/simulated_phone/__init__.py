"""A phone without an emulator: in this folder is a package `android_world` with as much of the library's interface as
programs use that play on a phone, a few screens and four tasks. Who runs with this folder on sys.path has it.

    PYTHONPATH=tests/support/simulated_phone python envs/phones/android_server.py --port 5001
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from opentinker.envs.phones import android_server
from tests.conftest import free_port, wait_port

LIBRARY = Path(__file__).parent
EVENTS = "SIMULATED_PHONE_EVENTS"
"""Variable with the file to which a phone writes what happens to it."""


@contextmanager
def served_phone(events: Path | None = None) -> Iterator[str]:
    """A phone's server in a process of its own. Gives its URL."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY)} | ({EVENTS: str(events)} if events else {})
    program = [sys.executable, android_server.__file__, "--port", str(port), "--console-port", str(port)]
    process = subprocess.Popen(program, env=environment)
    try:
        wait_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def served_phones(count: int, events: Path) -> Iterator[list[str]]:
    """Some phones, each with a file `0`, `1`... of its events in a directory."""
    with ExitStack() as stack:
        yield [stack.enter_context(served_phone(events / str(number))) for number in range(count)]
