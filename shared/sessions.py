"""The nouns of the env plane, between rollout workers (and the scheduler, which asks about configs) and env workers."""

from __future__ import annotations

from typing import Any

import msgspec

from opentinker.shared.types import Ending, Message, StopReason

OPEN = -1


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout worker -> any env worker that serves the environment: start one episode."""

    job: str
    session: str
    """Episode id, chosen by the rollout worker; opening the same id twice answers with the same observation."""
    environment: str
    config: dict[str, Any]
    row: int
    seed: int
    deadline_s: float
    """Seconds the whole episode may take, from now."""
    answer_within_s: float
    """If the environment takes longer to open, the worker answers `opening`, and is asked for the turn OPEN."""


class StepSession(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout worker -> the env worker that holds the session."""

    session: str
    turn: int
    """0, 1, 2...: a repeated turn is answered from memory, never played twice. OPEN: what the open came to."""
    text: str
    stop: StopReason


class CloseSession(msgspec.Struct, frozen=True, kw_only=True):
    session: str


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    """Env worker -> rollout worker, for open and step."""

    worker: str
    """Where the following steps go."""
    messages: list[Message] = []
    """What the policy sees next."""
    reward: float = 0.0
    components: dict[str, float] = {}
    done: bool = False
    metrics: dict[str, float] = {}
    failure: Ending | None = None
    error: str = ""
    busy: bool = False
    """The worker is full: try another."""
    opening: bool = False
    """The worker has the session, and its environment takes its time to open."""


class EnvCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler -> any env worker: would episodes of this environment start with this config?"""

    name: str
    config: dict[str, Any]


class EnvCheckReply(msgspec.Struct, frozen=True, kw_only=True):
    errors: list[dict[str, Any]] = []
    """One {field, value, problem} per mistake, fields as in the job spec (`environment.config.digits`)."""
