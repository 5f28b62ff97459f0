"""Adapters of an engine that are loaded when a request names their directory, the most recently used ones.

load    consumes directories of requests; one at a time, in the order of their arrival
evict   waits until the requests that use the adapter have ended; new ones for it wait for a place, like any other
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from opentinker.services.rollout_worker.engines.base import Engine, EngineError, EngineLost
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused, check_adapter
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.types.core import WeightVersion

log = structlog.get_logger()

Key = tuple[str, str]
"""Directory, and version of its contents."""


class _Loaded:
    def __init__(self, name: str) -> None:
        self.name = name
        self.users = 0
        self.leaving = False
        """It is being evicted: no further request may use it."""
        self.idle = asyncio.Event()
        self.idle.set()


class AdapterCache:
    def __init__(self, engine: Engine, room: int, max_rank: int) -> None:
        """`room`: adapters that the engine may hold."""
        self._engine, self._room, self._max_rank = engine, room, max_rank
        self._loaded: OrderedDict[Key, _Loaded] = OrderedDict()
        """The least recently used first."""
        self._line = asyncio.Lock()
        self.loads = 0

    def __len__(self) -> int:
        return len(self._loaded)

    @asynccontextmanager
    async def holding(self, directory: str, version: str) -> AsyncIterator[str]:
        """Give the engine's name of an adapter, which stays loaded while the block runs; of the base for an empty
        `directory`, the empty name. Raises AdapterGone, AdapterRefused, EngineLost."""
        if not directory:
            yield ""
            return
        adapter = self._use((directory, version)) or await self._get((directory, version))
        try:
            yield adapter.name
        finally:
            adapter.users -= 1
            if not adapter.users:
                adapter.idle.set()

    def _use(self, key: Key) -> _Loaded | None:
        adapter = self._loaded.get(key)
        if adapter is None or adapter.leaving:
            return None
        self._loaded.move_to_end(key)
        adapter.users += 1
        adapter.idle.clear()
        return adapter

    async def _get(self, key: Key) -> _Loaded:
        async with self._line:
            if (adapter := self._use(key)) is not None:  # another request has loaded it
                return adapter
            await asyncio.to_thread(check_adapter, Path(key[0]), self._max_rank)
            while len(self._loaded) >= self._room:
                await self._evict()
            await finish_uncancelled(self._load(key))
            adapter = self._use(key)
            assert adapter is not None
            return adapter

    async def _load(self, key: Key) -> None:
        directory, version = key
        # vLLM keeps cached prompts by name: the same contents have the same name when they come back.
        name = f"{version}~{hashlib.sha256(directory.encode()).hexdigest()[:12]}"
        try:
            await self._engine.add(name, WeightVersion(0, 0), Path(directory))
        except EngineLost:
            raise
        except EngineError as error:
            if not await asyncio.to_thread(Path(directory).is_dir):
                raise AdapterGone(f"the weights in {directory} were removed") from None
            raise AdapterRefused(str(error)) from error
        self._loaded[key] = _Loaded(name)
        self.loads += 1
        log.info("adapter_loaded", directory=directory, version=version, loaded=len(self._loaded))

    async def _evict(self) -> None:
        """Unload the least recently used one that is idle, or else the least recently used one when it is."""
        key = next((key for key, adapter in self._loaded.items() if not adapter.users), next(iter(self._loaded)))
        adapter = self._loaded[key]
        adapter.leaving = True
        try:
            await adapter.idle.wait()
        except asyncio.CancelledError:
            adapter.leaving = False
            raise
        del self._loaded[key]
        await finish_uncancelled(self._engine.drop(adapter.name))
