"""Checks an environment before it is played."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from opentinker.envs.runtime.player import guard_user_code
from opentinker.shared.types.env_protocol import EnvCheck, SessionReply
from opentinker.shared.types.errors import SpecError

Check = Callable[[str, dict[str, Any] | None], Awaitable[None]]
"""Checks a name and a config; without a config only the name. Raises SpecError or any exception of user code."""


async def mistakes_of(check: Check, request: EnvCheck) -> list[dict[str, Any]]:
    """Every mistake in the name and the config. A module that cannot even be imported is a mistake in the name."""
    mistakes: list[dict[str, Any]] = []

    async def run() -> SessionReply:
        try:
            await check(request.name, request.config)
        except SpecError as error:
            mistakes.extend(error.mistakes)
        return SessionReply(worker="")

    reply = await guard_user_code("", run())
    if reply.failure is not None:
        mistakes.append({"field": "environment.name", "value": request.name, "problem": reply.error})
    return mistakes
