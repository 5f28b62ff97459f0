"""Waiting that can be cancelled for certain.

On Python 3.11 `asyncio.wait_for` swallows a cancellation that comes in the moment in which what it waits for is done,
and redis-py and nats-py call it with every command: a loop `while True: poll; wait` may live on after `cancel()`.
The task still knows that it was cancelled: calls into those libraries are heeded, and every loop of ours asks at its
waiting point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
RETRY_S = 10.0
"""Delay before `cancel_and_wait` cancels again; longer than any cleanup, which that would cut short."""


def check_cancelled() -> None:
    """Raises CancelledError if this task was cancelled, even if a library has swallowed it. Not for use in cleanup."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def await_cancellable(call: Awaitable[T]) -> T:
    """Await a library's call; raise a cancellation that it swallowed. May be used in cleanup."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await call
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set, now or within the time."""
    check_cancelled()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Notifier:
    """Wakes all tasks that listened before it rang: listen, check the condition, then wait for the event."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        return self._event

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def sleep(seconds: float) -> None:
    """Sleep between two rounds of a loop."""
    check_cancelled()
    await asyncio.sleep(seconds)


async def finish_uncancelled(work: Awaitable[T]) -> T:
    """Await `work` to its end even if the caller is cancelled in between; the cancellation takes effect afterwards.

    Raises what the work raised, CancelledError if it went well and we were cancelled.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


async def gather_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines side by side and return their results in order. If one raises, the others are cancelled, and
    have ended when the first exception is raised here."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def first_results(tasks: Sequence[asyncio.Task[T]], wanted: int, failure: type[Exception]) -> list[T]:
    """Return the results of the first `wanted` tasks that end well, in the order of `tasks`. Raise a `failure` when too
    few are left, and any other exception immediately."""
    pending: set[asyncio.Task[T]] = set(tasks)
    while True:
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in finished if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, failure):
                raise error
        ended = [task for task in tasks if task.done() and task.exception() is None]
        if len(ended) >= wanted:
            return [task.result() for task in ended[:wanted]]
        if len(ended) + len(pending) < wanted:
            raise errors[-1]


def forward_exception(task: asyncio.Task[Any], broken: asyncio.Future[None]) -> None:
    """Forward a background task's exception to `broken`; only the first one is kept."""
    if not task.cancelled() and (error := task.exception()) is not None and not broken.done():
        broken.set_exception(error)


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, with any exception; cancel again while one keeps running.
    Exceptions of tasks that had ended before are left to their owner.

    A cancellation of the caller takes effect after they have ended, so no task is left behind.
    """
    running = {task for task in tasks if task is not None and not task.done()}
    put, cancelled, ask = list(running), False, True
    while running:
        if ask:
            for task in running:
                task.cancel()
        try:
            _, running = await asyncio.wait(running, timeout=RETRY_S)
            ask = True
        except asyncio.CancelledError:
            running = {task for task in running if not task.done()}
            cancelled, ask = True, False
    for ended in put:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.info("task_failed_after_cancellation", task=ended.get_name(), error=f"{type(error).__name__}: {error}")
    if cancelled:
        raise asyncio.CancelledError


class TasksByName:
    """Background tasks of which each works for one thing that there is."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def keep(self, wanted: Iterable[str], start: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Cancel the tasks of others than these names, and start those that are missing. Raises what a task raised."""
        names = list(wanted)
        for name in [name for name, task in self._tasks.items() if name not in names or task.done()]:
            task = self._tasks.pop(name)
            await cancel_and_wait(task)
            if not task.cancelled():
                task.result()
        for name in names:
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(start(name), name=name)

    async def cancel(self) -> None:
        await cancel_and_wait(*self._tasks.values())


async def every(seconds: float, call: Callable[[], Awaitable[object]]) -> NoReturn:
    """Sleep, then call, again and again."""
    while True:
        await sleep(seconds)
        await call()


async def every_despite(
    seconds: float, call: Callable[[], Awaitable[object]], event: str, *errors: type[Exception]
) -> NoReturn:
    """Call, then sleep, again and again; log `event` when the call raises one of these errors."""
    while True:
        try:
            await call()
        except errors as error:
            log.warning(event, error=str(error) or type(error).__name__)
        await sleep(seconds)
