"""Single-flight cache: concurrent lookups of a key share one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Caches the result of `look(key)` for `fresh_s` from its start. An exception reaches all waiting callers and is
    not cached."""

    def __init__(self, look: Callable[[str], Awaitable[T]], fresh_s: float) -> None:
        self._look, self._fresh_s = look, fresh_s
        self._said: dict[str, tuple[float, asyncio.Future[T]]] = {}

    async def get(self, key: str) -> T:
        now = time.monotonic()
        self._said = {name: (at, said) for name, (at, said) in self._said.items() if self._holds(at, said, now)}
        if key not in self._said:
            self._said[key] = now, asyncio.ensure_future(self._look(key))
        return await asyncio.shield(self._said[key][1])

    def _holds(self, at: float, said: asyncio.Future[T], now: float) -> bool:
        failed = said.done() and (said.cancelled() or said.exception() is not None)
        return now - at <= self._fresh_s and not failed
