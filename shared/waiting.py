"""Waiting in loops that can be cancelled for certain.

On Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the moment in which what it waits for is done,
and redis-py and nats-py call it with every command: a loop `while True: look; wait` may live on after `cancel()`.
The task still knows that it was cancelled; every loop of ours asks at its waiting point.
"""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raises CancelledError if this task was cancelled, even if a library has swallowed it. Not for use in cleanup."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """True if the event is set, now or within the time."""
    check_cancelled()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def rest(seconds: float) -> None:
    """Sleep between two rounds of a loop."""
    check_cancelled()
    await asyncio.sleep(seconds)
