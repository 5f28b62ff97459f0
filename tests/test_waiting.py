"""A cancelled loop ends, also when the cancellation came in the moment in which a library call was done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from opentinker.shared.waiting import check_cancelled, rest, set_within


async def test_set_within_tells_a_set_event_from_a_time_out() -> None:
    event = asyncio.Event()
    assert await set_within(event, 0.01) is False
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, 5.0) is True
    assert await set_within(event, 0.0) is True


async def _check() -> None:
    check_cancelled()
    await asyncio.sleep(0)


@pytest.mark.parametrize("wait", [lambda: set_within(asyncio.Event(), 0.01), lambda: rest(0.01), _check])
async def test_loop_ends_although_its_cancellation_was_swallowed(wait: Callable[[], Awaitable[object]]) -> None:
    swallowed = asyncio.Event()

    async def loop() -> None:
        while True:
            try:
                await asyncio.sleep(0 if swallowed.is_set() else 60)
            except asyncio.CancelledError:  # as a library does it
                swallowed.set()
            await wait()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5.0)
    assert done and task.cancelled() and swallowed.is_set()
