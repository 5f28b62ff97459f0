"""The environment side of an episode, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession

Busy = Callable[[str], AbstractContextManager[object]]
"""Context manager by lane (`generation`, `env`), entered while the episode waits for that lane."""


class EpisodeFailed(Exception):
    """An ordinary outcome: the sample is tried again, then its group is failed with this reason."""

    def __init__(self, ending: Ending, error: str) -> None:
        self.ending, self.error = ending, error
        self.opened_at = 0.0
        """Unix seconds when the environment had opened the episode; 0: it has not."""
        super().__init__(f"{ending}: {error}")


class Sessions(Protocol):
    """The environment side of an episode; `shared.env_client.EnvClient` is the real one."""

    async def open(
        self, request: OpenSession, importing: Callable[[], AbstractContextManager[object]]
    ) -> SessionReply: ...

    async def step(self, worker: str, request: StepSession) -> SessionReply: ...

    async def close(self, *, worker: str, session: str) -> None: ...
