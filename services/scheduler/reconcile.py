"""Placement: what every active job should have, against what it has. Leases are written here and nowhere else.

    reconcile loop   consumes jobs, heartbeats and leases; produces leases, epochs and events;
                     waits for half a second; woken by WAKE "scheduler"

One look, oldest job first, and a job that cannot be served never holds back the next one:

    lease of a job that is over or unknown  -> revoked
    lease of a worker that is gone          -> revoked; lost trainers and rollout workers are counted, too many in a row
                                               fail the job
    queued, trainer + rollout worker free   -> starting, epoch + 1, both leased (sft, dpo: a trainer is all they need)
    starting/running without a trainer      -> the next free one, epoch + 1; rollout workers keep generating
    starting/running without rollout worker -> the next free one
    then, if any are left: rollout workers up to `resources.rollout_workers`

An inference job needs rollout workers alone. It is running once one of them is ready, which nobody else says, and it
has succeeded when nobody asked it anything for `serving.idle_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from opentinker.services.scheduler.checkpoints import newest_epoch
from opentinker.services.scheduler.cluster import Cluster
from opentinker.shared.errors import Conflict, NotFound
from opentinker.shared.service import Context
from opentinker.shared.sessions import SERVED
from opentinker.shared.spec.frozen import is_scored
from opentinker.shared.subjects import WAKE
from opentinker.shared.types import JobRecord, JobState, Lease, Pool, WorkerInfo
from opentinker.shared.waiting import set_within

log = structlog.get_logger()

LOOK_S = 0.5
MAX_RESTARTS = 5
"""Trainers in a row that may be lost without a new step; the next loss fails the job. As many rollout workers, and one
for each that the job asks for beyond the first, may be lost before one serves it."""
HELD = (JobState.STARTING, JobState.RUNNING)


class Reconciler:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.store = ctx, ctx.store
        self._ttl_s = ctx.settings.worker_ttl_s
        self._wake = asyncio.Event()
        self._seen_at = float("-inf")
        self._absence_counts_from = 0.0
        self._ignored_since: dict[Lease, float] = {}
        """When a live worker was first seen not acting on its lease."""

    async def run(self) -> None:
        async def wake(_: dict[str, Any]) -> None:
            self._wake.set()

        subscription = await self.ctx.bus.listen(WAKE, wake, who="scheduler")
        try:
            while True:
                self._wake.clear()
                await self.look()
                await set_within(self._wake, LOOK_S)
        finally:
            await subscription.unsubscribe()

    async def look(self) -> None:
        """Once over everything."""
        cluster = await self._observe()
        jobs = await self.store.active_jobs()
        await self._revoke_ended(cluster, {job.id for job in jobs})
        kept = [await self._keep(job, cluster) for job in jobs]
        for job in kept:
            with _over_meanwhile(job):
                await self._serve(job, cluster)
        for job in kept:
            if job.state in HELD:
                with _over_meanwhile(job):
                    await self._add_rollout_workers(job, cluster, _rollout_workers(job))

    async def _observe(self) -> Cluster:
        """Leases are read before jobs: a lease whose job is not active then is a lease of a job that is over."""
        workers, leases = await self.store.workers(), await self.store.leases()
        now = time.monotonic()
        if now - self._seen_at > max(self._ttl_s / 2, 3 * LOOK_S):
            # We start, or Redis was away: heartbeats may have expired although the workers live. Let them beat first.
            self._absence_counts_from = now + self._ttl_s
        self._seen_at = now
        return Cluster(workers, leases)

    # --- what goes ----------------------------------------------------------------------------------------------

    async def _revoke_ended(self, cluster: Cluster, active: set[str]) -> None:
        for lease in cluster.leases_outside(active):
            log.info("lease_revoked", job=lease.job, lease_worker=lease.worker, why="the job is over")
            await self._revoke(lease, cluster)

    async def _revoke(self, lease: Lease, cluster: Cluster) -> None:
        await self.store.revoke(lease.worker)
        cluster.forget(lease)
        self._ignored_since.pop(lease, None)
        await self._wake_worker(lease.worker)

    def _lost(self, lease: Lease, cluster: Cluster) -> str | None:
        """Why the holder will not do its work any more; None if it does, or may."""
        worker, now = cluster.workers.get(lease.worker), time.monotonic()
        if worker is None:
            return "it stopped beating" if now >= self._absence_counts_from else None
        if worker.incarnation != lease.incarnation:
            return "its process was restarted"
        if worker.job == lease.job or worker.status == "draining":
            self._ignored_since.pop(lease, None)
            return None
        since = self._ignored_since.setdefault(lease, now)
        return "it does not act on its lease" if now - since > 3 * self._ttl_s else None

    async def _keep(self, job: JobRecord, cluster: Cluster) -> JobRecord:
        """Take back what dead workers hold. Returns the job as it is afterwards."""
        for lease in cluster.leases_of(job.id):
            why = self._lost(lease, cluster)
            if why is None:
                continue
            log.warning("worker_lost", job=job.id, lost=lease.worker, pool=lease.pool, why=why)
            await self._revoke(lease, cluster)
            with _over_meanwhile(job):
                if lease.pool == Pool.TRAINER:
                    job = await self._count_restart(job, lease, why)
                else:
                    job = await self._count_loss(job, lease, why)
        if job.rollout_losses and job.state == JobState.RUNNING and cluster.serving(job.id):
            with _over_meanwhile(job):
                await self.store.update(job.id, only_active=True, rollout_losses=0)
                job = msgspec.structs.replace(job, rollout_losses=0)
        return job

    async def _count_restart(self, job: JobRecord, lease: Lease, why: str) -> JobRecord:
        restarts = 1 if job.step > job.restart_step else job.restarts + 1
        if restarts > MAX_RESTARTS:
            reason = (
                f"the trainer was lost {restarts} times in a row without a new step (step {job.step} of {job.steps}); "
                f"the last one was {lease.worker}: {why}. See the trainer's log"
            )
            await self.store.transition(job.id, JobState.FAILED, allowed=HELD, reason=reason)
            return msgspec.structs.replace(job, state=JobState.FAILED)
        changes = {"restarts": restarts, "restart_step": max(job.step, job.restart_step)}
        detail = {"worker": lease.worker, "why": why, "step": job.step, "restarts": restarts}
        await self.store.update(job.id, only_active=True, event="trainer_lost", detail=detail, **changes)
        return msgspec.structs.replace(job, **changes)

    async def _count_loss(self, job: JobRecord, lease: Lease, why: str) -> JobRecord:
        """What kills every process that loads the job's model must have an end."""
        losses = job.rollout_losses + 1
        if losses >= MAX_RESTARTS + job.spec["resources"]["rollout_workers"]:
            reason = (
                f"rollout workers were lost {losses} times in a row before one served the job; the last one was "
                f"{lease.worker}: {why}. See its log. If nothing is said there it was killed, most often for want of "
                "memory: take a smaller model or a shorter rollout.context_length, or a machine with more memory"
            )
            await self.store.transition(job.id, JobState.FAILED, allowed=HELD, reason=reason)
            return msgspec.structs.replace(job, state=JobState.FAILED)
        detail = {"worker": lease.worker, "why": why}
        await self.store.update(
            job.id, only_active=True, event="rollout_worker_lost", detail=detail, rollout_losses=losses
        )
        return msgspec.structs.replace(job, rollout_losses=losses)

    # --- what comes ---------------------------------------------------------------------------------------------

    async def _serve(self, job: JobRecord, cluster: Cluster) -> None:
        """The least that a job needs to go on: a trainer and one rollout worker."""
        if job.state == JobState.QUEUED:
            await self._start(job, cluster)
        elif job.state in HELD:
            if Pool.TRAINER in _leased(job) and not cluster.leases_of(job.id, Pool.TRAINER):
                job = await self._replace_trainer(job, cluster)
            await self._add_rollout_workers(job, cluster, min(1, _rollout_workers(job)))
            await self._say_waiting(job, cluster)
            if job.kind == "inference":
                await self._serve_requests(job, cluster)

    async def _serve_requests(self, job: JobRecord, cluster: Cluster) -> None:
        """From the first rollout worker that is ready to the last question."""
        if job.state == JobState.STARTING and cluster.serving(job.id):
            await self.store.transition(job.id, JobState.RUNNING, allowed=[JobState.STARTING])
            log.info("job_serves", job=job.id)
        idle_s, quiet_s = job.spec["serving"]["idle_s"], cluster.quiet_s(job.id)
        if job.state == JobState.RUNNING and idle_s is not None and quiet_s is not None and quiet_s >= idle_s:
            reason = f"nobody asked it anything for {idle_s:g} s (serving.idle_s)"
            await self.store.transition(job.id, JobState.SUCCEEDED, allowed=[JobState.RUNNING], reason=reason)
            log.info("job_idle", job=job.id, idle_s=idle_s)

    async def _start(self, job: JobRecord, cluster: Cluster) -> None:
        if _lacking(job, cluster):
            await self._say_waiting(job, cluster)
            return
        workers = [worker for pool in _leased(job) if (worker := cluster.free(pool)) is not None]
        names = {LEASED[worker.pool]: worker.id for worker in workers}
        epoch = await self._next_epoch(job)
        await self.store.transition(
            job.id,
            JobState.STARTING,
            allowed=[JobState.QUEUED],
            epoch=epoch,
            detail=names,
            waiting_for="",
        )
        log.info("job_started", job=job.id, epoch=epoch, **names)
        for worker in workers:
            await self._grant(job.id, epoch, worker, cluster)

    async def _replace_trainer(self, job: JobRecord, cluster: Cluster) -> JobRecord:
        trainer = cluster.free(Pool.TRAINER)
        if trainer is None:
            return job
        epoch = await self._next_epoch(job)
        await self.store.transition(
            job.id,
            JobState.STARTING,
            allowed=HELD,
            epoch=epoch,
            event="trainer_restarted",
            detail={"trainer": trainer.id, "restarts": job.restarts},
        )
        log.info("trainer_restarted", job=job.id, epoch=epoch, trainer=trainer.id)
        await self._grant(job.id, epoch, trainer, cluster)
        return msgspec.structs.replace(job, epoch=epoch)

    async def _add_rollout_workers(self, job: JobRecord, cluster: Cluster, wanted: int) -> None:
        """Leases of rollout workers stay as they are when the trainer changes; new ones carry today's epoch."""
        while len(cluster.working(job.id, Pool.ROLLOUT)) < wanted and (worker := cluster.free(Pool.ROLLOUT)):
            await self._grant(job.id, job.epoch, worker, cluster)
            await self.store.update(
                job.id, only_active=True, event="rollout_worker_added", detail={"worker": worker.id}
            )
            log.info("rollout_worker_added", job=job.id, added=worker.id)

    async def _next_epoch(self, job: JobRecord) -> int:
        """Higher than any that Redis or a checkpoint knows of."""
        root = self.ctx.settings.data_dir / "jobs" / job.id / "checkpoints"
        return max(job.epoch, await asyncio.to_thread(newest_epoch, root)) + 1

    async def _grant(self, job: str, epoch: int, worker: WorkerInfo, cluster: Cluster) -> None:
        lease = Lease(job=job, worker=worker.id, incarnation=worker.incarnation, epoch=epoch, pool=worker.pool)
        await self.store.grant(lease)
        cluster.remember(lease)
        await self._wake_worker(worker.id)

    async def _wake_worker(self, worker: str) -> None:
        await self.ctx.bus.emit(WAKE, {}, who=worker)

    # --- what is missing ----------------------------------------------------------------------------------------

    async def _say_waiting(self, job: JobRecord, cluster: Cluster) -> None:
        """Shown with the job; an event only when it changes."""
        waiting = _lacking(job, cluster)
        if waiting != job.waiting_for:
            event = "waiting" if waiting else ""
            await self.store.update(job.id, only_active=True, event=event, detail={"for": waiting}, waiting_for=waiting)


@contextmanager
def _over_meanwhile(job: JobRecord) -> Iterator[None]:
    """The job was cancelled or ended since we read it: leave it alone, the next look takes its leases back."""
    try:
        yield
    except (Conflict, NotFound) as error:
        log.info("job_changed_meanwhile", job=job.id, why=str(error))


NAMES = {
    Pool.TRAINER: "trainer",
    Pool.ROLLOUT: "rollout worker",
    Pool.REFERENCE: "reference-forward",
    Pool.ENV: "env worker",
}


LEASED = {Pool.TRAINER: "trainer", Pool.ROLLOUT: "rollout_worker"}
"""As events name them."""


def _leased(job: JobRecord) -> list[Pool]:
    """The pools of which the job needs a worker of its own."""
    needs = {"rl": [Pool.TRAINER, Pool.ROLLOUT], "inference": [Pool.ROLLOUT]}
    return needs.get(job.kind, [Pool.TRAINER])


def _rollout_workers(job: JobRecord) -> int:
    """That the job asks for."""
    return int(job.spec["resources"]["rollout_workers"]) if Pool.ROLLOUT in _leased(job) else 0


def _served(job: JobRecord) -> str:
    """The environment, if it is one that a user serves."""
    name = str(job.spec["environment"]["name"]) if job.kind == "rl" else ""
    return name if name.startswith(SERVED) else ""


def _lacking(job: JobRecord, cluster: Cluster) -> str:
    """In words; empty if nothing is. Env workers and reference-forward serve every job and are not leased."""
    queued = job.state == JobState.QUEUED
    short = [
        pool for pool in _leased(job) if (cluster.free(pool) is None if queued else not cluster.working(job.id, pool))
    ]
    shared, served = [], _served(job)
    if job.kind == "rl":
        shared = ([] if served else [Pool.ENV]) + ([Pool.REFERENCE] if is_scored(job.spec) else [])
    unserved = [f"whoever serves {served}"] if served and not cluster.serves(served, job.tenant) else []
    busy = [f"a free {NAMES[pool]}" for pool in short if cluster.alive(pool)]
    absent = [NAMES[pool] for pool in short + shared if not cluster.alive(pool)] + unserved
    return "; ".join(busy + ([f"{', '.join(absent)} (none is running)"] if absent else []))
