"""A process of a cluster of tests, through all its lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from opentinker.shared.runtime.parent_death import hold_command
from tests.support.service_forks import Fork, ForkServer

RESTART_S = 0.2
GetForkServer = Callable[[], ForkServer]


class Process:
    """One slot: the same name, arguments and ports through all its lives."""

    def __init__(
        self, name: str, argv: list[str], env: dict[str, str], log: Path, server: GetForkServer | None
    ) -> None:
        self.name, self.argv, self.env, self.log = name, argv, env, log
        self.server = server
        """Gives the fork server of which a fork runs the module `argv[-1]`, in place of `argv`."""
        self.wanted = True
        self.popen: subprocess.Popen[bytes] | Fork | None = None
        self.dead_since: float | None = None
        self.starts = 0
        self.exits: list[int] = []
        """Return codes, oldest first; negative: by that signal."""

    def start(self) -> None:
        folder = self.log.parent
        if self.server is not None:
            self.popen = self.server().start(self.argv[-1], self.env, folder, self.log)
        else:
            with self.log.open("ab") as log:
                argv = hold_command(self.argv)
                self.popen = subprocess.Popen(
                    argv, env=self.env, stdout=log, stderr=log, start_new_session=True, cwd=folder
                )
        self.starts += 1
        self.dead_since = None

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def signal(self, number: int) -> None:
        if self.popen is not None and self.popen.poll() is None:
            os.kill(self.pid, number)

    def look(self) -> None:
        """Notice an end, clear away what the process has started itself, and start it again when it is due."""
        if self.popen is not None and (code := self.popen.poll()) is not None:
            self.exits.append(code)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen, self.dead_since = None, time.monotonic()
        due = self.dead_since is None or time.monotonic() - self.dead_since >= RESTART_S
        if self.popen is None and self.wanted and due:
            self.start()

    @property
    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""
