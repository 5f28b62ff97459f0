"""Turns of the tenants whose requests for samples a rollout worker holds: one that floods does not delay the others.

enter   a request begins: within the room, or as the only one of its tenant; the tenant with the fewest samples first
place   a sample is drawn in one of the places; the tenant with the fewest samples in places first. A tenant with none
        there does not wait: samples of others may be long
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count


class _Line:
    """Waiters by tenant. The next one is of the tenant that uses the least, then of the one served the longest ago."""

    def __init__(self) -> None:
        self.used = Counter[str]()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._served: dict[str, int] = {}
        self._number = count(1)

    @property
    def total(self) -> int:
        return self.used.total()

    @property
    def tenants(self) -> set[str]:
        """Those that use something or wait."""
        return {*self.used, *self._waiting}

    async def take(self, tenant: str, amount: int, fits: Callable[[str], bool]) -> None:
        """Wait until it is the tenant's turn and `fits` allows it."""
        if tenant not in self._waiting and fits(tenant):
            self._use(tenant, amount)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, amount))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(tenant, amount, fits)
            elif (turn, amount) in (line := self._waiting.get(tenant, deque())):
                self._remove(tenant, line.index((turn, amount)))
            raise

    def _remove(self, tenant: str, at: int = 0) -> tuple[asyncio.Future[None], int]:
        line = self._waiting[tenant]
        found = line[at]
        del line[at]
        if not line:
            del self._waiting[tenant]
        return found

    def give(self, tenant: str, amount: int, fits: Callable[[str], bool]) -> None:
        """Give back, and wake those whose turn it is."""
        self.used[tenant] -= amount
        if not self.used[tenant]:
            del self.used[tenant]
        while ready := [one for one in self._waiting if fits(one)]:
            self._wake(min(ready, key=lambda one: (self.used[one], self._served.get(one, 0))))

    def _wake(self, tenant: str) -> None:
        turn, amount = self._remove(tenant)
        if not turn.cancelled():
            self._use(tenant, amount)
            turn.set_result(None)

    def _use(self, tenant: str, amount: int) -> None:
        self.used[tenant] += amount
        self._served[tenant] = next(self._number)
        if len(self._served) > 1000:
            self._served = {one: self._served[one] for one in self.tenants if one in self._served}


class Turns:
    def __init__(self, places: int) -> None:
        """`places`: samples that are drawn at the same time, not counting one of each tenant that has no other there.
        Requests with as many samples are begun, too."""
        self._places = places
        self._begun, self._drawn = _Line(), _Line()

    @property
    def open(self) -> int:
        """Samples of the requests that have begun, and that are not drawn yet."""
        return self._begun.total

    @property
    def is_full(self) -> bool:
        return self.open >= self._places

    @property
    def tenants(self) -> set[str]:
        """Those whose requests have begun or wait."""
        return self._begun.tenants

    def _may_begin(self, tenant: str) -> bool:
        return self.open < self._places or not self._begun.used[tenant]

    def _has_place(self, tenant: str) -> bool:
        return self._drawn.total < self._places or not self._drawn.used[tenant]

    async def enter(self, tenant: str, samples: int) -> None:
        """Wait until a request may begin; each of its samples then leaves."""
        await self._begun.take(tenant, samples, self._may_begin)

    def leave(self, tenant: str, samples: int = 1) -> None:
        if samples:
            self._begun.give(tenant, samples, self._may_begin)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place, for one sample."""
        await self._drawn.take(tenant, 1, self._has_place)
        try:
            yield
        finally:
            self._drawn.give(tenant, 1, self._has_place)
