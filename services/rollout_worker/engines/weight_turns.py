"""Turns at an engine that serves one set of weights at a time: of a member of a pool, or of a model of the Tinker API.

Users of the same weights use the engine side by side; others are loaded when no user of the last ones is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(eq=False)
class _Waiting(Generic[K]):
    """A user that waits for its weights."""

    weights: K
    number: int
    """In the order of arrival."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class WeightTurns(Generic[K]):
    """Lets users in by their weights. Nobody waits forever: once a user waits for other weights, those that come later
    for the loaded ones wait behind it."""

    def __init__(self, load: Callable[[K], Awaitable[None]], loaded: K | None = None) -> None:
        """`load`: gives the engine weights; `loaded`: those that it has, None if it is unknown."""
        self._load_weights, self._loaded = load, loaded
        self._users = 0
        self._loading = False
        self._waiting: list[_Waiting[K]] = []
        self._arrived = self._opened = 0
        """Users that have arrived, and those that had when the weights were loaded."""

    @asynccontextmanager
    async def using(self, weights: K) -> AsyncIterator[None]:
        """Keep the engine at these weights until the end of the body. Raises what `load` raises: it is then unknown
        which weights the engine has."""
        await self._enter(weights)
        try:
            yield
        finally:
            self._users -= 1
            self._wake()

    async def _enter(self, weights: K) -> None:
        self._arrived += 1
        own = _Waiting(weights, self._arrived)
        self._waiting.append(own)
        try:
            while not self._may_enter(own):
                own.woken.clear()
                await own.woken.wait()
            if self._loaded != weights:
                await self._load(weights)
            self._users += 1
        finally:
            self._waiting.remove(own)
            self._wake()

    def _may_enter(self, own: _Waiting[K]) -> bool:
        if self._loading:
            return False
        welcome = [one for one in self._waiting if one.weights == self._loaded and one.number <= self._opened]
        before = [one for one in self._waiting if one.number < own.number and one not in welcome]
        if self._loaded != own.weights:
            return not (self._users or before or welcome)
        return own in welcome or all(one.weights == own.weights for one in before)

    def _wake(self) -> None:
        for one in self._waiting:
            one.woken.set()

    async def _load(self, weights: K) -> None:
        self._loaded, self._loading = None, True
        try:
            await self._load_weights(weights)
            self._loaded, self._opened = weights, self._arrived
        finally:
            self._loading = False
