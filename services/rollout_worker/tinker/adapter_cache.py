"""Adapters of an engine that are loaded when a request names their directory, the most recently used ones.

load    consumes directories of requests, one at a time: next is the tenant that uses the fewest adapters, then the one
        served the longest ago. One whose adapter could not be loaded comes after all others, until one of them is
        served
evict   the least recently used one that is idle. If none is, one of a tenant that uses the most takes no more requests,
        which wait like any others; the first to be idle makes room
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import structlog

from opentinker.services.rollout_worker.engines.base import Engine, EngineError, EngineLost
from opentinker.services.rollout_worker.tinker.adapter_files import AdapterGone, AdapterRefused, check_adapter
from opentinker.services.rollout_worker.tinker.turns import MAX_SERVED, lower
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.types.core import WeightVersion

log = structlog.get_logger()

Key = tuple[str, str]
"""Directory, and version of its contents."""


@dataclass(eq=False)
class _Loaded:
    name: str
    users: Counter[str] = field(default_factory=Counter)
    """Requests that use it, by tenant."""
    leaving: bool = False
    """Room is needed, and it is to be idle: no further request may use it."""


@dataclass(eq=False)
class _Waiting:
    """A request whose adapter is not loaded, or leaving."""

    tenant: str
    key: Key
    is_checked: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterCache:
    def __init__(self, engine: Engine, room: int, max_rank: int) -> None:
        """`room`: adapters that the engine may hold."""
        self._engine, self._room, self._max_rank = engine, room, max_rank
        self._loaded: OrderedDict[Key, _Loaded] = OrderedDict()
        """The least recently used first."""
        self._in_use = Counter[str]()
        """Adapters that a tenant's requests use."""
        self._waiting: list[_Waiting] = []
        """In the order of arrival."""
        self._next: _Waiting | None = None
        self._busy = False
        """An adapter is being checked, loaded or dropped."""
        self._served: dict[str, int] = {}
        self._failed: set[str] = set()
        """Tenants whose adapter could not be loaded since a request that waited was served: they use none, and would
        always be next."""
        self._number = count(1)
        self.loads = 0

    def __len__(self) -> int:
        return len(self._loaded)

    @asynccontextmanager
    async def holding(self, tenant: str, directory: str, version: str) -> AsyncIterator[str]:
        """Give the engine's name of an adapter, which stays loaded while the block runs; of the base for an empty
        `directory`, the empty name. Raises AdapterGone, AdapterRefused, EngineLost."""
        if not directory:
            yield ""
            return
        adapter = self._use(tenant, (directory, version)) or await self._get(tenant, (directory, version))
        try:
            yield adapter.name
        finally:
            lower(adapter.users, tenant, 1)
            if not adapter.users[tenant]:
                lower(self._in_use, tenant, 1)
                self._wake()

    def _use(self, tenant: str, key: Key) -> _Loaded | None:
        adapter = self._loaded.get(key)
        if adapter is None or adapter.leaving:
            return None
        self._loaded.move_to_end(key)
        self._in_use[tenant] += not adapter.users[tenant]
        adapter.users[tenant] += 1
        self._end_turn(tenant)
        self._wake()
        return adapter

    def _end_turn(self, tenant: str) -> None:
        self._served[tenant] = next(self._number)
        if len(self._served) > MAX_SERVED:
            here = {*self._in_use, *(one.tenant for one in self._waiting)}
            self._served = {one: at for one, at in self._served.items() if one in here}
            self._failed &= here

    async def _get(self, tenant: str, key: Key) -> _Loaded:
        own = _Waiting(tenant, key)
        self._waiting.append(own)
        self._wake()
        try:
            while (adapter := self._take(own)) is None:
                own.woken.clear()
                if own is self._next and not self._busy:
                    await self._make_progress(own)
                else:
                    await own.woken.wait()
            self._failed.clear()
            return adapter
        except EngineError:
            self._failed.add(tenant)
            self._end_turn(tenant)
            raise
        finally:
            self._waiting.remove(own)
            if not self._waiting:
                self._unmark_leaving()
            self._wake()

    def _take(self, own: _Waiting) -> _Loaded | None:
        """Use the adapter if it is loaded; one that is leaving stays if this is the request to make room for."""
        if own is self._next and own.key in self._loaded:
            self._loaded[own.key].leaving = False
        return self._use(own.tenant, own.key)

    def _wake(self) -> None:
        """Find out who is next, and wake it and those whose adapter is loaded."""
        self._next = min(self._waiting, key=lambda one: self._order(one.tenant), default=None)
        for one in self._waiting:
            adapter = self._loaded.get(one.key)
            if one is self._next or (adapter is not None and not adapter.leaving):
                one.woken.set()

    def _order(self, tenant: str) -> tuple[bool, int, int]:
        return tenant in self._failed, self._in_use[tenant], self._served.get(tenant, 0)

    async def _make_progress(self, own: _Waiting) -> None:
        """Take a single step to the adapter of who is next: another may be next after it."""
        idle = next((key for key, adapter in self._loaded.items() if not adapter.users), None)
        is_full = own.is_checked and len(self._loaded) >= self._room
        if is_full and idle is None:
            self._mark_leaving()
            await own.woken.wait()
            return
        self._busy = True
        try:
            if not own.is_checked:
                await asyncio.to_thread(check_adapter, Path(own.key[0]), self._max_rank)
                own.is_checked = True
            elif is_full and idle is not None:
                self._unmark_leaving()
                await finish_uncancelled(self._engine.drop(self._loaded.pop(idle).name))
            else:
                await finish_uncancelled(self._load(own.key))
        finally:
            self._busy = False
            self._wake()

    def _mark_leaving(self) -> None:
        """Mark one of a tenant that uses the most, the least recently used of them, unless one is marked."""
        if not any(adapter.leaving for adapter in self._loaded.values()):
            crowded = max(self._loaded.values(), key=lambda one: min(self._in_use[tenant] for tenant in one.users))
            crowded.leaving = True

    def _unmark_leaving(self) -> None:
        for adapter in self._loaded.values():
            adapter.leaving = False

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
                raise AdapterGone("the weights of this sampler were removed") from None
            raise AdapterRefused(str(error)) from error
        self._loaded[key] = _Loaded(name)
        self.loads += 1
        log.info("adapter_loaded", directory=directory, version=version, loaded=len(self._loaded))
