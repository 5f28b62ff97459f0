"""Runs file system checks on paths from users: in separate threads, and with a time limit.

A network file system that hangs holds up its threads, and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from opentinker.shared.runtime.service import Context
from opentinker.shared.types.errors import OpenTinkerError

P = ParamSpec("P")
T = TypeVar("T")


class ReferencesAway(OpenTinkerError):
    """A file system, or another thing that a spec refers to, did not answer in time."""


async def on_disk(ctx: Context, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of the blocking `call`. Raises ReferencesAway, and its exceptions."""
    running = ctx.disk.submit(call, *args, **options)
    try:
        async with asyncio.timeout(ctx.disk_s):
            return await asyncio.wrap_future(running)
    except TimeoutError:
        raise ReferencesAway(
            f"a file system that the spec names did not answer within {ctx.disk_s:g} s; retry"
        ) from None
