"""A cancelled loop ends, also when the cancellation came in the moment in which a library call was done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog
import structlog.testing

from opentinker.shared.asyncio_tools import (
    Notifier,
    cancel_and_wait,
    check_cancelled,
    finish_uncancelled,
    gather_all,
    sleep,
    wait_event,
)


async def test_set_within_tells_a_set_event_from_a_time_out() -> None:
    event = asyncio.Event()
    assert await wait_event(event, 0.01) is False
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_event(event, 5.0) is True
    assert await wait_event(event, 0.0) is True


async def test_a_bell_wakes_who_listened_before_and_nobody_twice() -> None:
    bell = Notifier()
    first, second = bell.listen(), bell.listen()
    bell.ring()
    assert first.is_set() and second.is_set() and not bell.listen().is_set()


async def _check() -> None:
    check_cancelled()
    await asyncio.sleep(0)


@pytest.mark.parametrize("wait", [lambda: wait_event(asyncio.Event(), 0.01), lambda: sleep(0.01), _check])
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
    done, _ = await asyncio.wait([task], timeout=60)
    assert done and task.cancelled() and swallowed.is_set()


async def test_what_must_not_be_left_halfway_is_not() -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def save() -> str:
        await may_end.wait()
        ended.set()
        return "saved"

    task = asyncio.create_task(finish_uncancelled(save()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await finish_uncancelled(save()) == "saved"


async def test_what_fails_after_all_is_told_unless_nobody_asks_any_more() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await finish_uncancelled(fail())


async def test_only_what_fails_while_it_is_put_down_is_told_of() -> None:
    async def fail(*, late: bool) -> None:
        try:
            await asyncio.sleep(60 if late else 0)
        finally:
            raise ValueError("no")

    before, late = asyncio.create_task(fail(late=False)), asyncio.create_task(fail(late=True))
    await asyncio.wait([before])
    with structlog.testing.capture_logs() as logs:
        await cancel_and_wait(before, None)
        assert logs == [] and isinstance(before.exception(), ValueError)
        await cancel_and_wait(before, late)
    assert [(entry["event"], entry["task"]) for entry in logs] == [("task_failed_after_cancellation", late.get_name())]


async def test_nobody_is_left_behind_when_putting_down_is_cancelled() -> None:
    may_end = asyncio.Event()
    asked = 0

    async def cleanup() -> None:
        nonlocal asked
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            asked += 1
            await may_end.wait()
            raise

    child = asyncio.create_task(cleanup())
    await asyncio.sleep(0)
    task = asyncio.create_task(cancel_and_wait(child))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done() and not child.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert child.cancelled() and asked == 1


async def test_gather_all_ends_the_others_before_it_raises_the_first_error() -> None:
    ended: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await gather_all([forever("a"), fail(), forever("b")])
    assert sorted(ended) == ["a", "b"]


async def test_gather_all_returns_results_in_the_order_of_the_work() -> None:
    async def late(value: int, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return value

    assert await gather_all([late(1, 0.01), late(2, 0.0)]) == [1, 2]
    assert await gather_all([late(3, 0.0)]) == [3]
