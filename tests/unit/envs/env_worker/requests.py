"""Requests and environments of these tests."""

from __future__ import annotations

from typing import Any

from opentinker.shared.types.env_protocol import (
    OpenSession,
)
from tests.samples import env_samples
from tests.support import playing

COUNTING, MISBEHAVING, BLOCKING = (
    f"tests.samples.env_samples:{name}" for name in ("Counting", "Misbehaving", "Blocking")
)


def opening(session: str = "s", environment: str = COUNTING, deadline_s: float = 30.0, **config: Any) -> OpenSession:
    return playing.opening(environment, session, row=3, seed=4, deadline_s=deadline_s, **config)


def called(tag: str = "") -> list[str]:
    return [call.removeprefix(tag).strip() for call in env_samples.Counting.calls if call.split(" ")[0] == tag]
