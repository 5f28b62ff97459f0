"""The worker's side of leases: beat, follow the lease the scheduler wrote, run the job, stop when it is taken away.

Consumes leases (Redis, woken by WAKE), produces heartbeats. A lease names the process incarnation, so a restarted
process waits for a new one with a higher epoch.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from opentinker.shared.asyncio_tools import RETRY_S, cancel_and_wait, sleep, wait_event
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.gpus import visible
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.runtime.timeline import REPORT_S, Lanes
from opentinker.shared.runtime.tracing import trace_id
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.spec import JobSpec, read_stored
from opentinker.shared.state.usage import metered
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import (
    Conflict,
    Fenced,
    JobFailed,
    NotFound,
    OpenTinkerError,
    RestartNeeded,
    SpecError,
)
from opentinker.shared.types.workers import WorkerInfo

log = structlog.get_logger()

GRANT_S = 2.0
"""Between a scheduler's observation of the workers and the lease that it writes."""
POLL_S = 0.5
"""At what ends its work: whether that is still wanted."""
LEAVE_S = 1.0
CLOSE_S = 30.0
"""Time for closing resources after a lost lease; a trainer has more, because it saves."""
RELEASE_TIMEOUT_S = 120.0
"""Time that a trainer may save for a job that is over. Placement ignores a worker that holds on longer."""
STOP_S = 1.0
"""Time beyond `drain_s` for which work that cannot be interrupted may delay the end of a stopping service."""
Work = Callable[["LeasedWorker", Lease, JobSpec], Awaitable[None]]


class LeasedWorker:
    """`work(worker, lease, spec)` runs while the lease holds; it is cancelled when the lease goes away.

    If it raises JobFailed the job fails with that text; Fenced ends it quietly; RestartNeeded makes the process execute
    itself again, and the job gets the next lease; anything else ends the process, or with `bank` the
    incarnation. So does JobFailed of a rollout worker that cannot even load what others of the job generate with.
    """

    def __init__(
        self,
        ctx: Context,
        pool: Pool,
        work: Work,
        *,
        grant_s: float = GRANT_S,
        close_s: float = CLOSE_S,
        release_timeout_s: float = RELEASE_TIMEOUT_S,
        bank: str = "",
        cpu: Callable[[], float] | None = None,
    ) -> None:
        """`cpu`: see usage.metered. `bank`: see WorkerInfo. The process is then not this worker's: where others would
        re-execute it, this one becomes a new incarnation in it, once its work has ended."""
        self.ctx = ctx
        self._grant_s, self._close_s, self._release_timeout_s = grant_s, close_s, release_timeout_s
        self._work = work
        self._wake = asyncio.Event()
        self._leaving = asyncio.Event()
        """The lease is being taken back, and goes when its work has ended what it has begun."""
        self._loaded = asyncio.Event()
        """Set once the lease's work has loaded what it needs."""
        self._free_since: float | None = time.monotonic()
        """None while it has a lease."""
        self.trace = ""
        """`traceparent` of the lease's job."""
        self.tenant = ""
        """The tenant of the lease's job."""
        self.spent: Counter[str] = Counter()
        """Costs of the lease other than time, by kind (usage.py); `work` adds to it."""
        self.leftovers: list[str] = []
        """Glob patterns of files that the work would leave behind if this process re-executed itself; set by `work`."""
        self._silent = False
        """True: no more heartbeats, because this process is about to re-execute itself."""
        self._bank, self._cpu = bank, cpu
        self.info = self._new_info(pool)

    def _new_info(self, pool: Pool) -> WorkerInfo:
        max_ranks = self.ctx.settings.max_ranks if pool == Pool.TRAINER else 0
        tokens = self.ctx.settings.bank_tokens if self._bank else 0
        return worker_info(self.ctx.worker, pool, max_ranks=max_ranks, bank=self._bank, bank_tokens=tokens)

    @property
    def ending(self) -> bool:
        """Return whether nothing more may be begun: the service stops, or the lease is about to end."""
        return self._leaving.is_set() or self.ctx.stopping.is_set()

    async def ended(self) -> None:
        """Waits until `ending`."""
        waits = [asyncio.create_task(event.wait()) for event in (self._leaving, self.ctx.stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*waits)

    async def status(self, status: str, *, job: str | None = None, epoch: int = 0, address: str = "") -> None:
        """Report the status to the scheduler and the trainer immediately instead of with the next heartbeat."""
        if status != "loading":
            self._loaded.set()
        self.info = msgspec.structs.replace(self.info, status=status, job=job, epoch=epoch, address=address)
        await self._beat()
        await self.ctx.bus.emit(WAKE, {"worker": self.info.id}, who="scheduler")

    def tell(self, detail: dict[str, Any]) -> None:
        """Send this with the next heartbeat, in the place of what was told before."""
        self.info = msgspec.structs.replace(self.info, detail=detail)

    async def serve(self) -> None:
        """Run until the service is stopped; a running job may finish within `drain_s`."""
        gpus = await asyncio.to_thread(visible)
        self.info = msgspec.structs.replace(self.info, gpus=gpus[:1] if self._bank else gpus)  # a bank uses its first
        async with self.ctx.bus.wakes(self._wake, WAKE, who=self.info.id):
            await self.status("idle")
            self.ctx.ready()
            tasks = {"beat": self._beat_loop(), "follow": self._follow_loop()}
            if (idle_s := self.ctx.settings.idle_exit_s) is not None:
                tasks["idle"] = self._idle_loop(idle_s)
            try:
                await first_failure(tasks)
            finally:
                await self.ctx.store.leave(self.info)

    async def _beat(self) -> None:
        if self._silent:
            return
        await self.ctx.store.beat(self.info, self.ctx.settings.worker_ttl_s)

    async def _beat_loop(self) -> None:
        while True:
            await self._beat()
            await sleep(self.ctx.settings.heartbeat_s)

    async def _idle_loop(self, idle_s: float) -> None:
        """Stop the service after `idle_s` without a job. It first announces its end, then waits until a scheduler that
        had not received the announcement would have written a lease: that lease is honoured."""
        self._free_since = time.monotonic()
        while True:
            left_s = math.inf if self._free_since is None else self._free_since + idle_s - time.monotonic()
            if left_s > 0:
                await sleep(min(left_s, self.ctx.settings.heartbeat_s))
                continue
            await self.status("draining")
            await sleep(self._grant_s + self.ctx.settings.heartbeat_s)
            if self._free_since is None:
                continue
            if await self._mine(None) is None:
                log.info("idle_exit", idle_s=idle_s)
                self.ctx.stopping.set()
                await asyncio.Event().wait()  # the follow loop ends with it

    async def _mine(self, held: Lease | None) -> Lease | None:
        """Return the lease that this process should work for. A lease that is being reclaimed is still the same, but is
        not started any longer."""
        lease = await self.ctx.store.lease(self.info.id)
        if lease is None or lease.incarnation != self.info.incarnation:
            return None
        if not lease.leaves_by:
            return lease
        if msgspec.structs.replace(lease, leaves_by=0.0) != held:
            return None
        self._leaving.set()
        return held

    async def _changed(self, held: Lease | None) -> Lease | None:
        """Waits until the lease differs from the one held."""
        self._wake.clear()
        while (lease := await self._mine(held)) == held:
            await wait_event(self._wake, self.ctx.settings.heartbeat_s)
            self._wake.clear()
        return lease

    async def _follow_loop(self) -> None:
        """Consume leases and run one at a time. Returns when the service is stopping and the job has been released."""
        stopping = asyncio.create_task(self.ctx.stopping.wait())
        held: Lease | None = None
        try:
            while not self.ctx.stopping.is_set():
                watch = asyncio.create_task(self._changed(held))
                task = None if held is None else asyncio.create_task(self._run(held), name=f"job-{held.job}")
                try:
                    await asyncio.wait([t for t in (task, watch, stopping) if t], return_when=asyncio.FIRST_COMPLETED)
                    if task is not None and held is not None:
                        await self._let_go(task, held, gone=watch)
                    await asyncio.wait([watch, stopping], return_when=asyncio.FIRST_COMPLETED)
                    if watch.done():
                        held = watch.result()
                        self._free_since = time.monotonic() if held is None else None
                        self._leaving.clear()
                finally:
                    await cancel_and_wait(task, watch)
        finally:
            await cancel_and_wait(stopping)

    async def _let_go(self, task: asyncio.Task[None], lease: Lease, *, gone: asyncio.Task[Lease | None]) -> None:
        """The job ended by itself, or its lease is `gone` (it ends now), or the service stops (it has `drain_s`).

        Raises what the job raised, also while it was cancelled.
        """
        begun = self.info.status not in ("idle", "loading")
        if not task.done() and not gone.done():
            await self.status("draining", job=self.info.job, epoch=self.info.epoch, address=self.info.address)
            drain_s = self.ctx.settings.drain_s
            await asyncio.wait([task, gone], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        await self._put_down(task, lease, begun=begun)
        if not task.cancelled():
            task.result()
        if not self.ctx.stopping.is_set():
            await self.status("idle")

    async def _put_down(self, task: asyncio.Task[None], lease: Lease, *, begun: bool) -> None:
        """Cancel like asyncio_tools.cancel_and_wait, but let a trainer save what was trained, however long that takes.
        Loading a model, or a step of a large one, cannot be interrupted: after `cancel_grace_s` without success this
        process re-executes itself. `begun`: there is more to release than a load."""
        began, asked, vain = time.monotonic(), -math.inf, math.inf
        while not task.done():
            grace_s = min(self.ctx.settings.cancel_grace_s, STOP_S if self.ctx.stopping.is_set() else math.inf)
            now = time.monotonic()
            if now - asked >= RETRY_S:
                task.cancel()
                asked = now
            if vain == math.inf and not (begun and now - began < await self._wanted_s(lease)):
                vain = now
            if now - vain >= grace_s and not task.done():
                if not self._bank:
                    await self._begin_anew(lease, now - vain)
                grace_s = math.inf
            await asyncio.wait([task], timeout=min(POLL_S, max(0.01, vain + grace_s - now)))

    async def _wanted_s(self, lease: Lease) -> float:
        """Return for how long unfinished work for a lost lease is still wanted."""
        try:
            state = (await self.ctx.store.job(lease.job)).state
        except NotFound:
            return 0.0
        if state == JobState.CANCELLED:
            return 0.0
        if state.held and len(lease.group) > 1 and await self._mine(lease) != lease:
            return 0.0  # a trainer that has lost others of its group waits for them in vain
        if self.info.pool != Pool.TRAINER:
            return self._close_s
        return self._release_timeout_s if state.final else math.inf

    async def _begin_anew(self, lease: Lease, waited_s: float, why: str = "its work cannot be interrupted") -> None:
        with structlog.contextvars.bound_contextvars(job=lease.job, epoch=lease.epoch):
            log.warning("process_restarts", why=why, waited_s=round(waited_s, 1))
        self._silent = True
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.ctx.store.leave(self.info)
        except (TimeoutError, RedisError) as error:  # its last heartbeat expires
            log.warning("lease_not_released", error=str(error))
        if not self._bank:
            await self.ctx.begin_anew(self.leftovers)
        self.info = msgspec.structs.replace(self._new_info(self.info.pool), gpus=self.info.gpus)
        self._silent = False

    async def _run(self, lease: Lease) -> None:
        with structlog.contextvars.bound_contextvars(job=lease.job, epoch=lease.epoch):
            log.info("lease_taken")
            try:
                record = await self.ctx.store.job(lease.job)
                self.trace, self.tenant = record.trace, record.tenant
                await self.status("loading", job=lease.job, epoch=lease.epoch)
                self.spent, self.leftovers = Counter(), []
                with structlog.contextvars.bound_contextvars(trace=trace_id(record.trace)):
                    meter = metered(self.ctx.store.redis, lease.job, self.spent, cpu=self._cpu)
                    async with meter, self._loading_shown(lease.job):
                        await self._work(self, lease, read_stored(record.spec))
            except JobFailed as error:
                await self._fail(lease, str(error))
            except SpecError as error:  # stored by another release
                await self._fail(lease, f"its stored spec is not valid here: {error}")
            except RestartNeeded as error:
                await self.status("draining", job=lease.job, epoch=lease.epoch)  # no loss that counts
                await self._begin_anew(lease, 0.0, str(error))
            except (Fenced, NotFound) as error:
                log.warning("fenced", error=str(error))
            except Exception as error:
                if not self._bank:
                    raise
                log.error("worker_failed", exc_info=error)  # a loss of this worker: other jobs of the process train on
                await self._begin_anew(lease, 0.0, str(error))
            finally:
                if isinstance(failure := sys.exception(), Exception):
                    log.error("worker_failed", exc_info=failure)
                log.info("lease_released")

    @asynccontextmanager
    async def _loading_shown(self, job: str) -> AsyncIterator[None]:
        self._loaded.clear()
        showing = asyncio.create_task(self._show_loading(job))
        try:
            yield
        finally:
            await cancel_and_wait(showing)

    async def _show_loading(self, job: str) -> None:
        """Put the time until the work is ready on the job's timeline. Produces TIMELINE once a second."""
        lanes = Lanes(self.ctx.bus, job, self.info.id)
        try:
            with lanes.busy("loading", "loading"):
                while not await wait_event(self._loaded, REPORT_S):
                    await lanes.report()
        finally:
            await lanes.report()

    async def _fail(self, lease: Lease, reason: str) -> None:
        """Fail the job, unless it is over or another worker's. Rollout leases outlive trainers, so their epoch may be
        old. Raises OpenTinkerError if the fault is not the job's but this worker's.

        Raises OpenTinkerError if the fault is not the job's but this worker's.
        """
        if self.info.pool == Pool.ROLLOUT and self.info.status != "ready" and await self._is_served(lease.job):
            raise OpenTinkerError(f"this worker cannot serve job {lease.job}, which others serve: {reason}")
        log.error("job_failed", error=reason)
        epoch = lease.epoch if self.info.pool == Pool.TRAINER else -1
        try:
            await self.ctx.store.transition(
                lease.job, JobState.FAILED, epoch=epoch, reason=f"{self.info.pool}: {reason}"
            )
        except (Conflict, Fenced, NotFound) as error:
            log.warning("failure_not_recorded", error=str(error))
            return
        await self.ctx.bus.emit(WAKE, {"job": lease.job}, who="scheduler")

    async def _is_served(self, job: str) -> bool:
        """Another rollout worker serves the job now: what the job asks for can be loaded."""
        return any(worker.ready_for(job) for worker in await self.ctx.store.workers() if worker.id != self.info.id)
