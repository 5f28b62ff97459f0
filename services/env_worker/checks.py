"""What is asked before an environment is played, and what is believed of a process that nobody trusts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from opentinker.envs.base import BadReply
from opentinker.services.env_worker.player import (
    ERROR_CHARACTERS,
    NAME_CHARACTERS,
    checked_messages,
    checked_number,
    checked_numbers,
    contain,
    failure,
)
from opentinker.shared.errors import SpecError
from opentinker.shared.sessions import EnvCheck, SessionReply
from opentinker.shared.types import Ending

MOST_MISTAKES = 50
Check = Callable[[str, dict[str, Any] | None], Awaitable[None]]
"""Of a name and a config; without a config of the name alone. Raises SpecError, or whatever user code raises."""


async def mistakes_of(check: Check, request: EnvCheck) -> list[dict[str, Any]]:
    """Every mistake in the name and the config. A module that cannot even be imported is a mistake in the name."""
    mistakes: list[dict[str, Any]] = []

    async def run() -> SessionReply:
        try:
            await check(request.name, request.config)
        except SpecError as error:
            mistakes.extend(error.mistakes)
        return SessionReply(worker="")

    reply = await contain("", run())
    if reply.failure is not None:
        mistakes.append({"field": "environment.name", "value": request.name, "problem": reply.error})
    return mistakes


def sound_mistakes(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `sound`, of the answer to a check."""
    return [
        {
            "field": str(error.get("field"))[:NAME_CHARACTERS],
            "value": None if len(repr(error.get("value"))) > NAME_CHARACTERS else error.get("value"),
            "problem": str(error.get("problem"))[:ERROR_CHARACTERS],
        }
        for error in errors[:MOST_MISTAKES]
    ]


def sound(reply: SessionReply) -> SessionReply:
    """The reply as a process may give it that could write whatever it liked; else a failure that says what is wrong.

    Its types are right, or it could not have been read.
    """
    try:
        if reply.failure is not None:
            ending = reply.failure if reply.failure in (Ending.ENV_ERROR, Ending.ENV_BAD_REPLY) else Ending.ENV_ERROR
            return failure("", ending, reply.error)
        if any(len(name) > NAME_CHARACTERS for name in (reply.seat, reply.stream, *reply.rewards)):
            raise BadReply(f"seats and streams have names of at most {NAME_CHARACTERS} characters")
        if reply.max_tokens is not None and reply.max_tokens < 1:
            raise BadReply(f"max_tokens must be positive, not {reply.max_tokens}")
        checked_messages(reply.messages, "its process")
        checked_number("reward", reply.reward)
        for field, values in (("components", reply.components), ("metrics", reply.metrics), *reply.rewards.items()):
            checked_numbers(field, values)
    except BadReply as error:
        return failure("", Ending.ENV_BAD_REPLY, str(error))
    return msgspec.structs.replace(reply, busy=False, opening=False, error="")
