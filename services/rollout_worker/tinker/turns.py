"""Turns of the tenants whose requests for samples a rollout worker holds: one that floods does not delay the others.

may_begin   a request is taken while there is room, or as the only one of its tenant
place       a sample is drawn in one of the places; the tenant with the fewest samples in places first. A tenant with
            none there does not wait: samples of others may be long
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

MAX_SERVED = 1000


class Turns:
    def __init__(self, places: int) -> None:
        """`places`: samples that are drawn at the same time, not counting one of each tenant that has no other there.
        Requests with as many samples are begun, too."""
        self._places = places
        self.begun = Counter[str]()
        """Samples of a tenant's requests that have begun, and that are not drawn yet."""
        self.drawn = Counter[str]()
        """A tenant's samples in places."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        self._number = count(1)
        self.left = asyncio.Event()
        """Set whenever samples leave."""

    @property
    def open(self) -> int:
        """Samples of the requests that have begun, and that are not drawn yet."""
        return self.begun.total()

    def may_begin(self, tenant: str) -> bool:
        """Return whether another request of the tenant may begin."""
        return not self.begun[tenant] or self.open < self._places

    def enter(self, tenant: str, samples: int) -> None:
        """Begin a request; each of its samples then leaves."""
        self.begun[tenant] += samples

    def leave(self, tenant: str, samples: int = 1) -> None:
        lower(self.begun, tenant, samples)
        self.left.set()

    def _has_place(self, tenant: str) -> bool:
        return self.drawn.total() < self._places or not self.drawn[tenant]

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it for one sample."""
        if tenant not in self._waiting and self._has_place(tenant):
            self._use(tenant)
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._give(tenant)

    async def _turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give(tenant)
            raise

    def _give(self, tenant: str) -> None:
        """Give a place back, and wake whose turn it is: of the tenant that has the fewest places, then of the one
        served the longest ago."""
        lower(self.drawn, tenant, 1)
        while ready := [one for one in self._waiting if self._has_place(one)]:
            self._wake(min(ready, key=lambda one: (self.drawn[one], self._served.get(one, 0))))

    def _wake(self, tenant: str) -> None:
        line = self._waiting[tenant]
        turn = line.popleft()
        if not line:
            del self._waiting[tenant]
        if not turn.cancelled():
            self._use(tenant)
            turn.set_result(None)

    def _use(self, tenant: str) -> None:
        self.drawn[tenant] += 1
        self._served[tenant] = next(self._number)
        if len(self._served) > MAX_SERVED:
            here = {*self.drawn, *self._waiting}
            self._served = {one: at for one, at in self._served.items() if one in here}


def lower(used: Counter[str], tenant: str, amount: int) -> None:
    """Subtract; a tenant that has nothing left is not counted any longer."""
    used[tenant] -= amount
    if not used[tenant]:
        del used[tenant]
