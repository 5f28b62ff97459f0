"""Cleans up after episodes in the process that plays them (child.py): processes, threads, a changed working directory.

Calls of several episodes alternate in that process. A process belongs to the episode in whose call it was started: an
executed one inherits EPISODE_VARIABLE, a merely forked one the episode's name. A process with neither mark,
started without the variable or while a module was imported, is shared by the episodes and ends with the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import thread as pools
from pathlib import Path

from opentinker.envs.base import EPISODE_VARIABLE
from opentinker.shared.runtime.reexec import TIDIES, below

PR_SET_NAME, PR_GET_NAME = 15, 16
NAME_BYTES = 16
"""Size of a thread's name, including the final zero."""
DEAD_S = 0.5
"""A killed process ends within this time, or hangs in the kernel and is left to it."""
POLL_S = 0.002


class Leftovers:
    def __init__(self) -> None:
        self.threads = False
        """Whether an episode has left a thread that nothing can end: the process should be replaced."""
        self._playing = ""
        self._start = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        self._directories: dict[str, str] = {}
        """Working directory by episode, if changed."""
        self._threads: defaultdict[str, set[threading.Thread]] = defaultdict(set)
        """Threads started by each episode."""
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._usual = ctypes.create_string_buffer(NAME_BYTES)
            os.register_at_fork(before=self._name, after_in_parent=self._unname)

    @contextlib.contextmanager
    def of(self, session: str) -> Iterator[None]:
        """Run one call of this episode in the block."""
        self._go_to(self._directories.get(session))
        here, before = self._directory(), set(threading.enumerate())
        self._playing = os.environ[EPISODE_VARIABLE] = session
        try:
            yield
        finally:
            self._playing = ""
            os.environ.pop(EPISODE_VARIABLE, None)
            self._threads[session] |= set(threading.enumerate()) - before
            if (there := self._directory()) != here:
                self._directories[session] = there
            self._go_to(None)

    def end(self, session: str) -> None:
        """Kill its processes. Threads cannot be killed: those of pools wait for work, daemons end with the child."""
        self._directories.pop(session, None)
        _kill(session)
        for thread in self._threads.pop(session, ()):
            if thread.is_alive() and not thread.daemon and thread not in pools._threads_queues:
                self.threads = True

    def _go_to(self, place: str | None) -> None:
        if place is not None:
            with contextlib.suppress(OSError):  # it has been removed
                os.chdir(place)
                return
        os.fchdir(self._start)

    def _directory(self) -> str:
        try:
            return os.getcwd()
        except FileNotFoundError:
            return ""

    def _name(self) -> None:
        """Name the thread that forks, whose name the forked process inherits: it may be killed before it first runs."""
        if self._playing:
            self._libc.prctl(PR_GET_NAME, self._usual)
            self._libc.prctl(PR_SET_NAME, _name_of(self._playing))

    def _unname(self) -> None:
        if self._playing:
            self._libc.prctl(PR_SET_NAME, self._usual)


def _kill(session: str) -> None:
    """Kill all processes of the episode, including those forked in the meantime, and wait until they are gone. Our
    children are reaped here, because no other process does it and each counts."""
    until = time.monotonic() + DEAD_S
    left: set[int] = set()
    while True:
        found = {pid for pid in below(os.getppid()) if pid != os.getpid() and _is_of(pid, session)}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        left |= found
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # adopted by our parent
                os.waitpid(pid, os.WNOHANG)
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        if not (found or left) or time.monotonic() > until:
            return
        time.sleep(POLL_S)


def _name_of(session: str) -> bytes:
    """Return a process name of at most 15 bytes, the kernel's limit."""
    return b"ep-" + hashlib.sha1(session.encode(), usedforsecurity=False).hexdigest()[:12].encode()


def _is_of(pid: int, session: str) -> bool:
    process = Path("/proc", str(pid))
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
        named = (process / "comm").read_bytes().rstrip() == _name_of(session)
        ours = named or f"{EPISODE_VARIABLE}={session}".encode() in variables
        return ours and TIDIES not in (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False
