"""Single-flight cache: concurrent lookups of a key share one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Caches the result of a call for `fresh_s` from its start. An exception reaches all waiting callers and is not
    cached."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._calls: dict[Hashable, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if not self._is_fresh(key):
            self._calls = {name: made for name, made in self._calls.items() if self._is_fresh(name)}
            task = asyncio.get_running_loop().create_task(call())
            task.add_done_callback(_failed)  # the waiting callers may be gone
            self._calls[key] = time.monotonic(), task
        return await asyncio.shield(self._calls[key][1])

    def forget(self, key: Hashable) -> None:
        """The next lookup of the key calls again: what it is about has changed."""
        self._calls.pop(key, None)

    def _is_fresh(self, key: Hashable) -> bool:
        if key not in self._calls:
            return False
        started, task = self._calls[key]
        return not task.done() or (time.monotonic() - started <= self._fresh_s and not _failed(task))


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
