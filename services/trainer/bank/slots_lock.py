"""Whose turn it is at the slots of a bank: the loop's, with a pass or with steps, or one that adds an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class SlotsLock(asyncio.Lock):
    """First come, first served, but of all who add adapters one at a time stands in line, tenants by turns: however
    many a tenant adds, each pass and each call of steps comes after one of them at most."""

    def __init__(self) -> None:
        super().__init__()
        self._line = asyncio.Lock()
        self._of_tenant: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def adding(self, tenant: str) -> AsyncIterator[None]:
        async with self._of_tenant.setdefault(tenant, asyncio.Lock()), self._line, self:
            yield
