"""Keeps the vLLM engine of a rollout worker's last job for the next one, if that has the same base and arguments.

Only engines whose weights all come from a trainer are kept, and those that merge one adapter into an unchanged base:
the next job's trainer sends everything before the first token is sampled. An engine that is kept has no requests, no
cached prompts and no weight group. It ends after `keep_s` without a job, and before another engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from opentinker.services.rollout_worker.engines import vllm_startup
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled, sleep

log = structlog.get_logger()

LET_GO_S = 1.5
"""Time limit for an engine to let go of a job."""
Key = tuple[Any, ...]
"""The model with its files, and the arguments: an engine is kept for a job for which all are equal."""


@dataclass(frozen=True)
class KeptEngine:
    key: Key
    llm: Any
    """vllm.AsyncLLM."""
    context_length: int
    merges: bool
    share: float
    """Share of the GPU's memory."""


class WarmEngine:
    """Holds at most one engine. `end(llm)` ends one."""

    def __init__(self, keep_s: float, end: Callable[[Any], Awaitable[None]]) -> None:
        """`keep_s` 0: none is kept."""
        self.keep_s = keep_s
        self._end = end
        self._kept: KeptEngine | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def share(self) -> float:
        """Return the share of the GPU's memory that an engine has which is kept; 0 without one."""
        return 0.0 if self._kept is None else self._kept.share

    async def take(self, key: Key | None) -> KeptEngine | None:
        """Give away the engine with this key if it is there and alive. Any other ends first: two may not fit."""
        try:
            await cancel_and_wait(self._expiry)
        except asyncio.CancelledError:
            if self._kept is not None:
                self._count_down()
            raise
        if (kept := self._kept) is not None and kept.key == key and not kept.llm.errored:
            self._kept = None
            return kept
        del kept
        await self._drop()
        return None

    def put(self, kept: KeptEngine) -> None:
        assert self._kept is None, "an engine is taken before another one starts"
        self._kept = kept
        self._count_down()

    def _count_down(self) -> None:
        # Without the context of the job, whose log it is no longer.
        self._expiry = asyncio.create_task(self._expire(), context=contextvars.Context())

    async def _expire(self) -> None:
        await sleep(self.keep_s)
        log.info("engine_expired", seconds=self.keep_s)
        await self._drop()

    async def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        try:
            await finish_uncancelled(self._end(kept.llm))
        finally:
            del kept
            vllm_startup.release_heap()

    async def close(self) -> None:
        await self.take(None)


async def let_go(llm: Any) -> bool:
    """Take its requests, cached prompts and weight group from an engine; False if that is not sure to have worked."""
    try:
        async with asyncio.timeout(LET_GO_S):
            await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
            is_idle = None not in await llm.collective_rpc("weights_poll", args=(0,))
            if is_idle:
                await llm.collective_rpc("weights_forget", args=(0,))
            await llm.engine_core.resume_scheduler_async()
    except Exception as error:  # noqa: BLE001 - it ends then
        log.warning("engine_not_kept", error=str(error))
        return False
    return is_idle


def files_of(model: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, bytes and time of change (ns) of a model directory's files; nothing for a hub's id. Blocking."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(model).iterdir()) if Path(model).is_dir() else ():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)
