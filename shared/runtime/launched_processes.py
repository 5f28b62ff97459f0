"""Processes that the scheduler starts on its machine and that outlive it: a file each, in DATA_DIR/run/launched/HOST.

    NAME.json   {"pid", "ticks", "pool", "since", "gpus"}: made before the process starts, still empty then

The scheduler writes them (`services/scheduler/autoscaler/process.py`); `opentinker up` ends remaining processes when it
stops. A process is identified by its pid and start time, so a later process with the same pid is never mistaken for it.
It leads a process group, which ends with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

POLL_S = 0.05


class Process(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    ticks: int
    """When it was started, in the kernel's ticks since the machine was."""
    pool: str
    since: float
    """The same as Unix time."""
    gpus: str = ""
    """Those that it sees, as CUDA_VISIBLE_DEVICES names them."""

    @property
    def alive(self) -> bool:
        return ticks_of(self.pid) == self.ticks

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL to its group, even if the process itself has ended."""
        with suppress(ProcessLookupError):
            if number != signal.SIGKILL:
                if self.alive:
                    os.kill(self.pid, number)
            elif ticks_of(self.pid) in (None, self.ticks):  # else the number is another's, and the group is gone
                os.killpg(self.pid, number)


def folder(data_dir: Path) -> Path:
    return data_dir.resolve() / "run" / "launched" / socket.gethostname()


def prefix() -> str:
    """Return the prefix of worker names started on this machine; other machines use other prefixes, so slots never
    collide."""
    return f"launched-{re.sub('[^a-z0-9]+', '-', socket.gethostname().lower()).strip('-')}"


def ticks_of(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read(path: Path) -> Process | None:
    """Return the process; None while it is being started, or if its start was never completed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Process)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write(path: Path, process: Process) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(process))
    temporary.replace(path)


def end_all(data_dir: Path, grace_s: float) -> list[str]:
    """Blocking: ends what was started here, and forgets it. Gives the names of those that ran."""
    files = sorted(folder(data_dir).glob("*.json"))
    found = {path.stem: process for path in files if (process := read(path)) is not None}
    ran = [name for name, process in found.items() if process.alive]
    for process in found.values():
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(process.alive for process in found.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in found.values():
        process.signal(signal.SIGKILL)
    for path in files:
        path.unlink(missing_ok=True)
    return ran
