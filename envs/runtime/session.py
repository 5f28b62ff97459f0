"""One session of an env worker: what is known of it between its requests."""

from __future__ import annotations

import asyncio

from opentinker.envs.runtime.env_runner import EnvRunner
from opentinker.shared.types.env_protocol import OPEN, OpenSession, SessionReply


class Session:
    __slots__ = ("answer", "cost", "ended", "imported", "importing", "opened", "request", "runner", "task", "timer",
                 "turn")  # fmt: skip

    def __init__(self, request: OpenSession, opened: asyncio.Future[SessionReply]) -> None:
        self.request = request
        self.opened = opened
        self.imported: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.importing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done while an import runs that began after the episode's clock started."""
        self.cost = 1.0
        """Share of the worker's limit; the environment's `cost` once it is known."""
        self.answer = opened
        """Answer to the newest request."""
        self.turn = OPEN
        self.runner: EnvRunner | None = None
        self.task: asyncio.Task[SessionReply] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.ended = ""
        """Reason: `done`, `closed`, or the value of an Ending."""

    @property
    def title(self) -> str:
        """Name of its tasks, for the watchdog."""
        return f"{self.request.environment} in episode {self.request.session} of job {self.request.job}"
