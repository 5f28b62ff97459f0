"""Shares resources between episodes: created for the first borrower, kept for a while after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

LINGER_S = 20.0


class Thing(Protocol):
    @property
    def broken(self) -> bool:
        """Return whether the resource is no longer usable."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Thing)


class _Lent(Generic[T]):
    def __init__(self, thing: asyncio.Task[T]) -> None:
        self.thing = thing
        self.users = 0
        self.leaving: asyncio.TimerHandle | None = None


class RefcountedPool(Generic[T]):
    """Shares things by key. Concurrent borrowers share one call of `make`; if it fails, all of them get the error."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._lent: dict[Hashable, _Lent[T]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def borrow(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> tuple[T, Callable[[], None]]:
        """Return the resource and a function that gives it back. Raise errors of `make`."""
        lent = self._lent.get(key)
        if lent is None or (lent.thing.done() and _broken(lent.thing)):
            lent = self._lent[key] = _Lent(asyncio.ensure_future(_made(make)))
        lent.users += 1
        if lent.leaving is not None:
            lent.leaving.cancel()
            lent.leaving = None
        try:
            thing = await asyncio.shield(lent.thing)
        except BaseException:
            self._give_back(key, lent)
            raise
        return thing, lambda: self._give_back(key, lent)

    def _give_back(self, key: Hashable, lent: _Lent[T]) -> None:
        lent.users -= 1
        if lent.users == 0:
            lent.leaving = asyncio.get_running_loop().call_later(self._linger_s, self._leave, key, lent)

    def _leave(self, key: Hashable, lent: _Lent[T]) -> None:
        if self._lent.get(key) is lent:
            del self._lent[key]
        task = asyncio.get_running_loop().create_task(_end(lent.thing))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all things, even those in use."""
        for key, lent in list(self._lent.items()):
            if lent.leaving is not None:
                lent.leaving.cancel()
            self._leave(key, lent)
        await asyncio.gather(*self._closing)


async def _made(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


def _broken(thing: asyncio.Task[T]) -> bool:
    return thing.cancelled() or thing.exception() is not None or thing.result().broken


async def _end(thing: asyncio.Task[T]) -> None:
    if not thing.done():
        thing.cancel()
        await asyncio.wait([thing])
    if not thing.cancelled() and thing.exception() is None:
        await thing.result().close()
