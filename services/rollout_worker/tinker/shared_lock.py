"""Requests for samples are drawn side by side; one that may kill the engine is drawn without others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SharedLock:
    """Has many holders, or one exclusive holder. In the order of their coming: who comes after one that waits for
    exclusiveness waits for its end."""

    def __init__(self) -> None:
        self._entrance = asyncio.Lock()
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._entrance:
            self._holders += 1
            self._free.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._free.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._entrance:
            await self._free.wait()
            yield
