"""Bounds the copies of adapters that are on their way to files, of all jobs of a bank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from opentinker.shared.asyncio_tools import Notifier

COPY_BYTES = 2**30
"""Bytes of all copies; a larger one is held alone."""
TENANT_COPIES = 2
"""Copies of a tenant's adapters at a time."""
WRITES = 2
"""Files that are written at a time: each has a thread, and others need those, too."""


class Copies:
    def __init__(self) -> None:
        self.writing = asyncio.Semaphore(WRITES)
        """Hold it while writing one."""
        self._bytes = 0
        self._next = asyncio.Lock()
        """Held by the first that waits for room."""
        self._freed = Notifier()
        self._tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def take(self, tenant: str, size: int) -> Callable[[], None]:
        """Wait for room for a copy of this size, in turn. Call it before the copy is made, and what it returns once
        the copy is gone."""
        turn = self._tenants.setdefault(tenant, asyncio.Semaphore(TENANT_COPIES))
        await turn.acquire()
        try:
            async with self._next:
                while self._bytes and self._bytes + size > COPY_BYTES:
                    await self._freed.listen().wait()
                self._bytes += size
        except BaseException:
            turn.release()
            raise

        def release() -> None:
            self._bytes -= size
            turn.release()
            self._freed.ring()

        return release

    @asynccontextmanager
    async def holding(self, tenant: str, size: int) -> AsyncIterator[None]:
        release = await self.take(tenant, size)
        try:
            yield
        finally:
            release()
