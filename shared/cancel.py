"""Cancellation that arrives. `asyncio.wait_for` of Python 3.11 forgets one that comes when its call is just done; the
NATS and Redis clients use it at every call, so a task cancelled at the wrong microsecond would go on for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_S = 0.5


async def heed(call: Awaitable[T]) -> T:
    """Await the call; raise a cancellation that it swallowed."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await call
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def put_down(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise; ask again while one goes on."""
    running = {task for task in tasks if task is not None and not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=AGAIN_S)
    for ended in tasks:
        if ended is not None and not ended.cancelled():
            ended.exception()  # seen
