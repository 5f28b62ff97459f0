"""Loads the frozen models that queued groups wait for.

load  consumes the group queue's next model, produces cached models; waits for memory; woken by arrivals; runs
      concurrently with scoring
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
from redis.exceptions import RedisError

from opentinker.services.reference_forward.group_queue import GroupQueue
from opentinker.services.reference_forward.model_cache import ModelCache
from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.shared.asyncio_tools import Notifier, sleep, wait_event
from opentinker.shared.data.readable_paths import check_opened
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.errors import JobFailed, NotFound

if TYPE_CHECKING:
    from opentinker.services.reference_forward.scorer import Scorer

MODEL_ERRORS = (ValueError, IndexError, RuntimeError, MemoryError, OSError)
"""Exceptions that a model may raise over a group or while it is loaded."""
POLL_S = 0.5

log = structlog.get_logger()


class ModelLoader:
    """`make_scorer` is called once, in a thread. `fail_job(job, reason)` fails a job and drops its groups."""

    def __init__(
        self,
        ctx: Context,
        queue: GroupQueue,
        cache: ModelCache,
        changed: Notifier,
        make_scorer: Callable[[], Scorer],
        fail_job: Callable[[str, str], Awaitable[None]],
        on_load: Callable[[], None],
    ) -> None:
        self._ctx, self._queue, self._cache, self._changed = ctx, queue, cache, changed
        self._make_scorer, self._fail_job, self._on_load = make_scorer, fail_job, on_load
        self._scorer: Scorer | None = None
        self._scorer_lock = asyncio.Lock()

    async def get_scorer(self) -> Scorer:
        """Return the scorer, which is created by the first call."""
        async with self._scorer_lock:
            if self._scorer is None:
                self._scorer = await asyncio.to_thread(self._make_scorer)
            return self._scorer

    async def run(self) -> None:
        """Load models until cancelled. A model that cannot be loaded fails the jobs that wait for it."""
        while True:
            changed = self._changed.listen()
            if (key := self._queue.next_to_load(self._cache)) is None:
                await wait_event(changed, 1.0)
                continue
            try:
                await self._load(key)
            except (JobFailed, *MODEL_ERRORS) as error:
                why = str(error) if isinstance(error, JobFailed) else f"model {key.base!r}: {describe_error(error)}"
                for job in self._queue.jobs_waiting_for(key):
                    await self._fail_job(job, why)
            self._changed.ring()

    async def _load(self, key: ModelKey) -> None:
        """Load a model; returns without it if no group waits for it any longer. Raises JobFailed or one of
        MODEL_ERRORS."""
        scorer = await self.get_scorer()
        if not await self._check_readable(key):
            return
        size = await asyncio.to_thread(scorer.size, key)
        self._cache.check(key, size)
        evicted, polled_at = self._cache.evictions, -math.inf
        while True:
            if time.monotonic() - polled_at >= POLL_S:
                await self._drop_ended(key)
                polled_at = time.monotonic()
            if key not in self._queue.queues:
                return
            if self._cache.make_room(size, self._queue.queues):
                break
            await wait_event(self._changed.listen(), 0.1)
        if self._cache.evictions > evicted:
            await asyncio.to_thread(scorer.release_memory)
        began = time.monotonic()
        model = await asyncio.to_thread(scorer.load, key)
        if not await self._check_readable(key):  # the path changed during the load: the model is not used
            return
        seconds = time.monotonic() - began
        self._cache.put(key, model, size, seconds)
        log.info("model_loaded", model=key.base, dtype=key.dtype, bytes=size, seconds=round(seconds, 3))
        self._on_load()

    async def _check_readable(self, key: ModelKey) -> bool:
        """Return whether all jobs that wait for the model may read it now. Jobs that may not fail."""
        readable = True
        for job in self._queue.jobs_waiting_for(key):
            try:
                await check_opened(self._ctx.store, self._ctx.settings, job)
            except JobFailed as error:
                await self._fail_job(job, str(error))
                readable = False
            except NotFound:  # deleted: the next poll drops its groups
                continue
            except (RedisError, OSError):  # checked again at the next attempt
                await sleep(POLL_S)
                return False
        return readable

    async def _drop_ended(self, key: ModelKey) -> None:
        """Drop groups that wait for the model and whose job has finished. If an acknowledgement is lost, the group is
        delivered again and dropped on arrival."""
        for job in self._queue.jobs_waiting_for(key):
            try:
                if not (await self._ctx.store.job(job)).state.final:
                    continue
            except NotFound:
                pass
            except (RedisError, OSError):  # checked again at the next poll; the model is not at fault
                return
            for work in self._queue.drop({job}):
                log.info("group_of_ended_job_dropped", job=job, group=work.group.seq)
                await work.delivery.ack()
                self._queue.release(work)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
