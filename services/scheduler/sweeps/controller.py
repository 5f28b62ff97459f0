"""Sweeps: the leading scheduler submits their jobs, reads their reports, and decides which continue.

    sweep loop     consumes sweeps that run; starts and stops a task for each; waits for a second
    sweep's task   consumes states and metrics of its jobs; produces jobs, cancellations, trials; waits for two seconds

A trial is in Redis before its jobs are submitted, each under its own idempotency key, so another leader continues
with the same trials and submits nothing twice.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import nats.errors
import structlog
from redis.exceptions import RedisError

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.artifacts.store import StoreUnavailable
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway
from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.sweeps.running_sweep import RunningSweep
from opentinker.services.scheduler.sweeps.trial_jobs import abandon
from opentinker.shared.asyncio_tools import TasksByName, sleep
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.errors import Fenced, NotFound

log = structlog.get_logger()

AWAY = (TimeoutError, nats.errors.Error, NoReply, StoreUnavailable, ReferencesAway)
"""Errors after which a sweep waits and tries again."""


class SweepController:
    def __init__(self, ctx: Context, leadership: int, *, poll_s: float = 1.0, step_s: float = 2.0) -> None:
        self.ctx, self.leader, self._poll_s, self._step_s = ctx, leadership, poll_s, step_s
        self._store = SweepStore(ctx.store.redis)
        self._history = MetricHistory(ctx.bus, ArtifactCatalog(ctx))
        self._search = ThreadPoolExecutor(1, "search")
        """One thread for all sweeps: a search takes the interpreter's lock from everything else in this process."""
        self._tasks = TasksByName()

    async def run(self) -> None:
        """Run sweeps until cancelled. Raises errors of a sweep's task."""
        try:
            while True:
                await self._tasks.keep(await self._store.active(), self._lead)
                await sleep(self._poll_s)
        finally:
            await self._tasks.cancel()
            self._search.shutdown(wait=False, cancel_futures=True)

    async def _lead(self, id: str) -> None:
        running: RunningSweep | None = None
        with structlog.contextvars.bound_contextvars(sweep=id):
            while True:
                try:
                    if running is None:
                        sweep = await self._store.sweep(id)
                        running = RunningSweep(self.ctx, self._store, self._history, self._search, self.leader, sweep)
                    if await running.step():
                        return
                except NotFound:  # it was deleted
                    return
                except AWAY as error:
                    log.warning("sweep_deferred", error=str(error) or type(error).__name__)
                except (Fenced, RedisError):
                    raise
                except Exception as error:  # noqa: BLE001 - a fault of ours ends this sweep, and no other work of the leader
                    return await self._abandon(id, error)
                await sleep(self._step_s)

    async def _abandon(self, id: str, error: Exception) -> None:
        log.exception("sweep_failed", exc_info=error)
        reason = f"it cannot continue: {type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(NotFound, *AWAY):  # while a server is away, it is tried again
            await abandon(self.ctx, self._store, id, reason, self.leader)
