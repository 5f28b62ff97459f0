"""Placement carried out: what every active job should have, against what it has. Leases are written here and nowhere
else.

    reconcile loop   consumes jobs, heartbeats and leases; produces leases, epochs and events;
                     waits for half a second; woken by WAKE "scheduler"

One round:

    lease of a job that has no workers (over, paused, queued, unknown)  -> revoked; of one that went to sleep as if it
                                               were taken back
    lease of a worker that is gone          -> revoked; lost trainers and rollout workers are counted, too many in a row
                                               fail the job, and from the second on it waits before the next try
    lease of a worker that was taken back   -> revoked when its work has ended, or its time is over
    all else                                -> what `placement.plan` decides, one script of the store per decision

A job that starts changes its state and gets all its leases in one act, with an epoch higher than any before. A trainer
that is replaced gets the next epoch; rollout workers keep generating. Trainers that share the ranks of a job
(`trainer_groups.py`) are leased together and lost together: one that is gone ends the leases of all, and one that is
told to stop sends the job back to the queue, so that rank 0 saves before it continues elsewhere.

Inference and eval jobs need rollout workers alone; `untrained_jobs.py` says when they run, sleep, and are over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from opentinker.services.scheduler.artifacts.checkpoint_dir import newest_epoch
from opentinker.services.scheduler.placement import planner
from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.operator_limits import view_of
from opentinker.services.scheduler.placement.shortages import named
from opentinker.services.scheduler.placement.trainer_groups import group_of
from opentinker.services.scheduler.placement.types import (
    AddTrainers,
    AddWorker,
    Decision,
    Preempt,
    Reclaim,
    Requeue,
    Sleep,
    Slot,
    Start,
)
from opentinker.services.scheduler.placement.untrained_jobs import (
    LENT,
    SLEEPS,
    UNTRAINED,
    followed_by,
    update_untrained,
    waits_for_source,
)
from opentinker.services.scheduler.placement.worker_loss import NATS_AWAY, lost
from opentinker.services.scheduler.placement.worker_watch import WorkerWatch
from opentinker.shared.asyncio_tools import sleep, wait_event
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import HELD, JobRecord, JobState, Lease, Pool
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.trainer_group import RankShare
from opentinker.shared.types.workers import WorkerInfo

log = structlog.get_logger()

POLL_S = 0.5
IDLE_FACTOR = 4.0
"""Times what a round took: the least interval before the next one."""
QUEUE_S = 0.001
"""The interval may be so much longer per job that waits."""
CHARGE_S = 2.0
"""Interval at which usage of leases is counted."""
MAX_WAITING_UPDATES = 100
"""Jobs per round whose `waiting_for` is updated."""


class Reconciler:
    """`leader`: the number of this scheduler's leadership; what it writes into leases and jobs is refused after it.
    `clock`: monotonic. `nats_grace_s`: no loss counts within this time after an outage of NATS; longer than requests of
    that time wait for an answer, and than a death stays unnoticed."""

    def __init__(
        self,
        ctx: Context,
        leader: int = UNFENCED,
        starting: Mapping[str, Slot] | None = None,
        clock: Callable[[], float] = time.monotonic,
        nats_grace_s: float = 30.0,
    ) -> None:
        self.ctx, self.store, self.leader = ctx, ctx.store, leader
        self._starting: Mapping[str, Slot] = {} if starting is None else starting
        """Started workers that have not sent a heartbeat yet; the launcher updates it."""
        self._wake = asyncio.Event()
        self._clock = clock
        self.watch = WorkerWatch(ctx, leader, clock)
        self.nats_grace_s = nats_grace_s
        self._charged_at = float("-inf")
        self._waiting = 0
        """Jobs in the queue at the last round."""

    async def run(self) -> None:
        async with self.ctx.bus.wakes(self._wake, WAKE, who="scheduler"):
            while True:
                self._wake.clear()
                began = time.monotonic()
                await self.reconcile()
                # However many wake us, and however many wait: requests are answered by the same process.
                await sleep(min(POLL_S + QUEUE_S * self._waiting, IDLE_FACTOR * (time.monotonic() - began)))
                await wait_event(self._wake, POLL_S)

    async def reconcile(self) -> int:
        """One round. Return the number of decisions made. Raises Fenced if another scheduler leads."""
        cluster = await self.watch.observe()
        jobs = await self.store.active_jobs()
        await self._revoke_others(cluster, jobs)
        kept = [await self._check_leases(job, cluster) if job.state.held else job for job in jobs]
        active = {job.id: job for job in kept if job.state.held or job.state == JobState.QUEUED}
        self._waiting = sum(not job.state.held for job in active.values())
        early = await self._hold_back_followers(active, cluster)
        awake = [job for job in active.values() if not job.asleep and job.id not in early]
        planned = await asyncio.to_thread(planner.plan, await view_of(self.ctx, cluster, awake, self._starting))
        for decision in planned.decisions:
            with _log_if_ended(decision.job):
                active[decision.job] = await self._carry_out(decision, active, cluster)
        known = {job.id for job in jobs}
        for job in active.values():
            if job.kind in UNTRAINED:
                with _log_if_ended(job.id):
                    if await update_untrained(self.store, job, cluster, known, self.leader):
                        await self._put_to_sleep(job, cluster)
        await self._update_waiting(active, planned.waiting | early)
        await self._charge()
        return len(planned.decisions)

    async def _charge(self) -> None:
        if self._clock() - self._charged_at >= CHARGE_S:
            await self.store.charge()
            self._charged_at = self._clock()

    # --- what goes ----------------------------------------------------------------------------------------------

    async def _revoke_others(self, cluster: Cluster, jobs: list[JobRecord]) -> None:
        queued = {job.id for job in jobs if job.state == JobState.QUEUED}
        for lease in cluster.leases_outside({job.id for job in jobs if job.state.held}):
            if lease.job in queued and not self.watch.may_revoke(lease, cluster):
                continue  # of a job that went to sleep: it answers what it has begun
            log.info("lease_revoked", job=lease.job, lease_worker=lease.worker, why="the job has no workers now")
            await self._revoke(lease, cluster)

    async def _revoke(self, lease: Lease, cluster: Cluster) -> None:
        await self.store.revoke(lease.worker, leader=self.leader)
        cluster.forget(lease)
        self.watch.forget(lease)
        await self._wake_worker(lease.worker)

    async def _check_leases(self, job: JobRecord, cluster: Cluster) -> JobRecord:
        """Take back what dead workers hold, and those that were lent and have ended. Returns the job as it is
        afterwards."""
        if (leaving := self.watch.leaving_group(cluster.leases_of(job.id, Pool.TRAINER), cluster)) is not None:
            with _log_if_ended(job.id):
                detail = {"why": f"{leaving.worker}, one of its trainers, was told to stop"}
                return await self._back_to_queue(job, cluster, "requeued", detail)
        for lease in cluster.leases_of(job.id):
            if not cluster.holds(lease):  # gone with the rest of its group
                continue
            if lease.leaves_by:
                if self.watch.may_revoke(lease, cluster):
                    await self._revoke(lease, cluster)
                continue
            why = self.watch.why_lost(lease, cluster)
            if why is None:
                continue
            counts = self.watch.loss_counts(lease)
            if counts and self.ctx.bus.was_away(self.nats_grace_s):
                why, counts = f"{why}; {NATS_AWAY}", False
            log.warning("worker_lost", job=job.id, lost=lease.worker, pool=lease.pool, why=why, counts=counts)
            for held in cluster.leases_of(job.id, Pool.TRAINER) if lease.group else [lease]:
                await self._revoke(held, cluster)
            with _log_if_ended(job.id):
                job = await self._record_loss(job, lease, why, counts=counts)
        if job.rollout_losses and job.state == JobState.RUNNING and cluster.serving(job.id):
            with _log_if_ended(job.id):
                await self.store.update(job.id, only_active=True, leader=self.leader, rollout_losses=0)
                job = msgspec.structs.replace(job, rollout_losses=0)
        return job

    async def _record_loss(self, job: JobRecord, lease: Lease, why: str, *, counts: bool) -> JobRecord:
        loss = lost(job, lease, why, counts=counts, now=time.time(), retry_s=self.ctx.settings.queue_retry_s)
        if loss.failed:
            await self.store.transition(job.id, JobState.FAILED, allowed=HELD, reason=loss.failed, leader=self.leader)
            return msgspec.structs.replace(job, state=JobState.FAILED)
        await self._record(job, loss.event, loss.detail, **loss.changes)
        return msgspec.structs.replace(job, **loss.changes)

    # --- what is decided ----------------------------------------------------------------------------------------

    async def _carry_out(self, decision: Decision, jobs: Mapping[str, JobRecord], cluster: Cluster) -> JobRecord:
        """Returns the job as it is afterwards. What is written down of it, its tenant may read."""
        job = jobs[decision.job]
        match decision:
            case Start(_, workers, ranks):
                return await self._start(job, [cluster.workers[id] for id in workers], ranks)
            case AddTrainers(_, workers, ranks):
                return await self._replace_trainers(job, [cluster.workers[id] for id in workers], ranks)
            case AddWorker(_, worker, _):
                await self._add_rollout_worker(job, cluster.workers[worker])
            case Reclaim(_, worker, wanted_by):
                await self._take_back(job, cluster.lease(worker), named(jobs[wanted_by], job.tenant))
            case Preempt(_, by):
                return await self._back_to_queue(job, cluster, "preempted", {"by": named(jobs[by], job.tenant)})
            case Sleep(_, by):
                return await self._put_to_sleep(job, cluster, lent_to=named(jobs[by], job.tenant))
            case Requeue(_, why):
                return await self._back_to_queue(job, cluster, "requeued", {"why": why})
        return job

    async def _start(self, job: JobRecord, workers: list[WorkerInfo], ranks: int) -> JobRecord:
        names: dict[str, Any] = {"ranks": ranks} if ranks else {}
        for worker in workers:
            kind = EVENT_NAMES[worker.pool]
            names[kind] = ", ".join([*([names[kind]] if kind in names else []), worker.id])
        epoch = await self._next_epoch(job)
        changes: dict[str, Any] = {"since": time.time(), "waiting_for": ""}
        await self._change(job, workers, epoch, ranks, allowed=[JobState.QUEUED], detail=names, **changes)
        log.info("job_started", job=job.id, epoch=epoch, **names)
        return msgspec.structs.replace(job, state=JobState.STARTING, epoch=epoch, **changes)

    async def _replace_trainers(self, job: JobRecord, trainers: list[WorkerInfo], ranks: int) -> JobRecord:
        epoch = await self._next_epoch(job)
        names = ", ".join(trainer.id for trainer in trainers)
        detail = {"trainer": names, "restarts": job.restarts, **({"ranks": ranks} if ranks else {})}
        await self._change(job, trainers, epoch, ranks, allowed=HELD, event="trainer_restarted", detail=detail)
        log.info("trainer_restarted", job=job.id, epoch=epoch, trainer=names)
        return msgspec.structs.replace(job, state=JobState.STARTING, epoch=epoch)

    async def _change(self, job: JobRecord, workers: list[WorkerInfo], epoch: int, ranks: int, **changes: Any) -> None:
        """Move a job to `starting` and grant its workers, atomically. `ranks`: which its trainers share, see
        `PlannedJob.ranks`."""
        group = group_of([worker for worker in workers if worker.pool == Pool.TRAINER], ranks)
        leases = [_lease(job.id, epoch, worker, group if worker.pool == Pool.TRAINER else ()) for worker in workers]
        await self.store.transition(
            job.id,
            JobState.STARTING,
            epoch=epoch,
            leader=self.leader,
            leases=leases,
            gpus=[gpus_counted(job, worker) for worker in workers],
            tenant=job.tenant,
            **changes,
        )
        self.watch.grant(leases)
        for worker in workers:
            await self._wake_worker(worker.id)

    async def _add_rollout_worker(self, job: JobRecord, worker: WorkerInfo) -> None:
        """Leases of rollout workers stay as they are when the trainer changes; new ones carry today's epoch."""
        lease = _lease(job.id, job.epoch, worker)
        await self.store.grant(lease, tenant=job.tenant, gpus=len(worker.gpus), leader=self.leader)
        self.watch.grant([lease])
        await self._wake_worker(worker.id)
        await self._record(job, "rollout_worker_added", {"worker": worker.id})
        log.info("rollout_worker_added", job=job.id, added=worker.id)

    async def _take_back(self, job: JobRecord, lease: Lease, wanted_by: str) -> None:
        await self._leave(lease)
        await self._record(job, "rollout_worker_taken_back", {"worker": lease.worker, "wanted_by": wanted_by})
        log.info("rollout_worker_taken_back", job=job.id, taken=lease.worker, wanted_by=wanted_by)

    async def _leave(self, lease: Lease) -> None:
        """Begin nothing more for a lease, and revoke it when the work in progress has ended."""
        leaving = msgspec.structs.replace(lease, leaves_by=time.time() + self.ctx.settings.take_back_s)
        await self.store.start_drain(leaving, leader=self.leader)
        await self._wake_worker(lease.worker)

    async def _put_to_sleep(self, job: JobRecord, cluster: Cluster, lent_to: str = "") -> JobRecord:
        """Put a job to sleep. Its workers' reports are as old as their last heartbeat: a request that has arrived since
        is answered.

        `lent_to`: the job that gets its workers, if that is why.
        """
        why = LENT.format(lent_to) if lent_to else SLEEPS
        detail = {"lent_to": lent_to} if lent_to else {}
        quiet_since = time.time() - (cluster.quiet_s(job.id) or 0.0)
        job = await self._queue(job, "asleep", detail, waiting_for=why, asleep=True, quiet_since=quiet_since)
        for lease in cluster.leases_of(job.id):
            if not lease.leaves_by:
                await self._leave(lease)
        return job

    async def _hold_back_followers(self, active: dict[str, JobRecord], cluster: Cluster) -> dict[str, str]:
        """Return jobs that would serve the live policy of a job without workers, and what they wait for: their workers
        may be the very ones that it needs. One that already serves continues with what it has."""
        held = {id for id, job in active.items() if job.state.held}
        early = {}
        for job in list(active.values()):
            if not waits_for_source(job, held):
                continue
            source = followed_by(job)
            early[job.id] = f"job {source} to run"
            if job.state == JobState.STARTING:
                with _log_if_ended(job.id):
                    why = {"why": f"job {source}, whose live policy it serves, has no workers"}
                    active[job.id] = await self._back_to_queue(job, cluster, "requeued", why)
        return early

    async def _back_to_queue(self, job: JobRecord, cluster: Cluster, event: str, why: dict[str, str]) -> JobRecord:
        """Send a job back to the queue. Its trainer saves its progress when its lease is gone; the job starts again
        after that."""
        job = await self._queue(job, event, why, waiting_for="")
        for lease in cluster.leases_of(job.id):
            await self._revoke(lease, cluster)
        return job

    async def _queue(self, job: JobRecord, event: str, detail: dict[str, str], **changes: Any) -> JobRecord:
        changes["since"] = time.time()
        await self.store.transition(
            job.id, JobState.QUEUED, allowed=HELD, leader=self.leader, event=event, detail=detail, **changes
        )
        log.info(f"job_{event}", job=job.id, **detail)
        return msgspec.structs.replace(job, state=JobState.QUEUED, **changes)

    async def _record(self, job: JobRecord, event: str, detail: dict[str, Any], **changes: Any) -> None:
        """Into the log of an active job."""
        await self.store.update(job.id, only_active=True, leader=self.leader, event=event, detail=detail, **changes)

    async def _next_epoch(self, job: JobRecord) -> int:
        """Higher than any that Redis or a checkpoint knows of."""
        roots = [self.ctx.settings.data_dir / "jobs" / part / "checkpoints" for part in job.parts]
        known = [await asyncio.to_thread(newest_epoch, root) for root in roots]
        return max(job.epoch, *known) + 1

    async def _wake_worker(self, worker: str) -> None:
        await self.ctx.bus.emit(WAKE, {}, who=worker)

    # --- messages for users -------------------------------------------------------------------------------------------

    async def _update_waiting(self, jobs: dict[str, JobRecord], waiting: dict[str, str]) -> None:
        """Shown with the job; an event only when it changes."""
        changed = [id for id, why in waiting.items() if why != jobs[id].waiting_for]
        for id in changed[:MAX_WAITING_UPDATES]:
            event, why = "waiting" if waiting[id] else "", waiting[id]
            with _log_if_ended(id):
                detail = {"for": why}
                await self.store.update(
                    id, only_active=True, leader=self.leader, event=event, detail=detail, waiting_for=why
                )


@contextmanager
def _log_if_ended(job: str) -> Iterator[None]:
    """The job was cancelled, paused or ended since we read it: leave it alone, the next round takes its leases back."""
    try:
        yield
    except (Conflict, NotFound) as error:
        log.info("job_update_conflict", job=job, why=str(error))


EVENT_NAMES = {Pool.TRAINER: "trainer", Pool.ROLLOUT: "rollout_worker"}
"""As events name them."""


def gpus_counted(job: JobRecord, worker: WorkerInfo) -> int:
    """Return for how many GPUs a lease counts: a place of a shared trainer whose jobs train on the CPU, for none."""
    if worker.bank and not job.spec["resources"].get("trainer_gpus"):
        return 0
    return len(worker.gpus)


def _lease(job: str, epoch: int, worker: WorkerInfo, group: tuple[RankShare, ...] = ()) -> Lease:
    return Lease(job=job, worker=worker.id, incarnation=worker.incarnation, epoch=epoch, pool=worker.pool, group=group)
