"""Checks an environment before it is played."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from opentinker.envs.base import Environment
from opentinker.envs.examples import example_of
from opentinker.envs.runtime.env_runner import guard_user_code
from opentinker.shared.messaging.reply_validation import known_seats
from opentinker.shared.types.env_protocol import ABOUT_BYTES, EnvAbout, EnvCheck, EnvCheckReply, SessionReply
from opentinker.shared.types.errors import SpecError

Check = Callable[[str, dict[str, Any] | None, Mapping[str, str], bool], Awaitable[tuple[str, ...]]]
"""Check a name and a config, or only the name, the bots of seats, and whether it can fork if it must. Return the seats,
if they are known. Raise SpecError or any exception of user code."""


Find = Callable[[str], Awaitable[type[Environment]]]
"""Return the class of a name. Raise SpecError or any exception of user code."""


async def check_request(check: Check, find: Find, request: EnvCheck) -> EnvCheckReply:
    """Answer with every mistake in name and config. A module that cannot be imported is a mistake in the name."""
    about: EnvAbout | None = None
    mistakes: list[dict[str, Any]] = []
    seats: list[str] = []

    async def run() -> SessionReply:
        try:
            seats.extend(known_seats(await check(request.name, request.config, request.bots, request.forks)))
            if request.describe:
                nonlocal about
                about = describe(await find(request.name), example_of(request.name))
        except SpecError as error:
            mistakes.extend(error.mistakes)
        return SessionReply(worker="")

    reply = await guard_user_code("", run())
    if reply.failure is not None:
        mistakes.append({"field": "environment.name", "value": request.name, "problem": reply.error})
    return EnvCheckReply(errors=mistakes, seats=seats, about=about)


def describe(found: type[Environment], example: str = "") -> EnvAbout:
    return EnvAbout(
        doc=inspect.cleandoc(found.__doc__ or ""),
        settings=found.Config.model_json_schema(),
        bots=sorted(found.bots or ()),
        seats=known_seats(found.seats),
        can_fork=found.can_fork,
        example=example,
    ).within(ABOUT_BYTES)
