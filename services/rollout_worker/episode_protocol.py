"""The environment side of an episode, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from opentinker.shared.time_limit import TimeLimit
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession

PAUSES_S = 12 * 3600.0
"""Longest that the engine may sleep, for steps of the trainer, in one episode."""

Busy = Callable[[str], AbstractContextManager[object]]
"""Context manager by lane (`generation`, `env`), entered while the episode waits for that lane."""


def described_wait(state: str, worker: str | None, turn: int) -> str:
    """Return what an episode waits for in a state, and what makes such waits shorter. `worker`: that it plays on."""
    if state == "GENERATING":
        return f"it waited for the engine in turn {turn}; see rollout.max_tokens and rollout.max_concurrent_groups"
    if worker is None:
        return "it waited for the environment to open; see the time of its open(), and add env workers if all are full"
    return f"it waited for turn {turn} of the environment on {worker}"


class EpisodeFailed(Exception):
    """An ordinary outcome: the sample is tried again, then its group is failed with this reason."""

    def __init__(self, ending: Ending, error: str) -> None:
        self.ending, self.error = ending, error
        self.opened_at = 0.0
        """Unix seconds when the environment had opened the episode; 0: it has not."""
        super().__init__(f"{ending}: {error}")


def lateness(limit: TimeLimit, state: str, worker: str | None, turn: int) -> str:
    """Return what an episode waits for whose time is over."""
    text = f"no end within rollout.episode_timeout_s = {limit.limit_s:g}: {described_wait(state, worker, turn)}"
    if limit.stopped_s:
        text += f"; the {limit.stopped_s:.0f} s in which the engine slept for steps of the trainer do not count"
    return text


class Sessions(Protocol):
    """The environment side of an episode; `shared.env_client.EnvClient` is the real one."""

    async def open(
        self, request: OpenSession, importing: Callable[[], AbstractContextManager[object]]
    ) -> SessionReply: ...

    async def step(self, worker: str, request: StepSession) -> SessionReply: ...

    async def close(self, *, worker: str, session: str) -> None: ...
