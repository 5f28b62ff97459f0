"""Forecasts when a job would begin if it were submitted now, by running the planner on the current cluster."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from opentinker.services.scheduler.placement import planner
from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.gpu_matching import ANY, FreeWorkers, GpuMatcher
from opentinker.services.scheduler.placement.operator_limits import view_of
from opentinker.services.scheduler.placement.quotas import Used, over_quota
from opentinker.services.scheduler.placement.shortages import with_gpus
from opentinker.services.scheduler.placement.types import (
    LEASED,
    OTHER_TENANTS,
    UNLIMITED,
    ClusterView,
    Counts,
    PlannedJob,
    Start,
)
from opentinker.shared.api_types import Check
from opentinker.shared.data.dry_run import check
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.frozen_models import is_scored
from opentinker.shared.types.core import JobRecord, JobState, Pool
from opentinker.shared.types.env_protocol import SERVED
from opentinker.shared.types.errors import plural

CANDIDATE = "(this job)"


async def forecast_start(ctx: Context, spec: JobSpec, tenant: str) -> list[Check]:
    """A check for each pool that it needs workers of, and one of the queue. `spec`: with resolved paths, and without
    `resources.trainer = "auto"`."""
    workers, leases = await ctx.store.workers(), await ctx.store.leases()
    cluster, candidate = Cluster(workers, leases), _record(spec, tenant, time.time())
    taken = {lease.worker for lease in leases}
    free = [worker for worker in workers if worker.job is None and worker.id not in taken]
    active = [job for job in await ctx.store.active_jobs() if job.state != JobState.PAUSED and not job.asleep]
    view = await view_of(ctx, cluster, [*active, candidate])
    (job,) = (job for job in view.jobs if job.id == CANDIDATE)
    ahead = sum(one.state == JobState.QUEUED for one in active)
    matcher = GpuMatcher(view.gpus, view.shared_gpus)
    suit, unused = (
        FreeWorkers(matcher, {pool: [worker.id for worker in some if worker.pool == pool] for pool in LEASED}).count(
            job
        )
        for some in (workers, free)
    )
    alive = Counter(worker.pool for worker in workers)
    return [*_pools(spec, job, alive, suit, unused), await _queue(ctx, view, job, ahead)]


def _pools(spec: JobSpec, job: PlannedJob, alive: Counts, suit: Counts, unused: Counts) -> list[Check]:
    """`suit`, `unused`: suitable workers of the pools from which it needs its own."""
    checks = []
    for pool, least in job.needs.items():
        need, most = job.gpus.get(pool, ANY), spec.resources.rollout_workers if pool == Pool.ROLLOUT else least
        checks.append(_leased(f"{pool} workers{with_gpus(need)}", least, most, suit[pool], unused[pool]))
    shared = [Pool.ENV] if spec.environment.name and not spec.environment.name.startswith(SERVED) else []
    shared += [Pool.REFERENCE] if is_scored(spec.model_dump()) else []
    return checks + [_leased(f"{pool} workers", 1, 1, alive[pool], alive[pool]) for pool in shared]


def _leased(what: str, least: int, most: int, alive: int, free: int) -> Check:
    wanted = f"{least} wanted" if least == most else f"{least} needed, {most} wanted"
    found = f"{wanted}, {alive} running, {free} free"
    if alive < least:
        return check(what, found, "note", f"the job waits until {_run(least)}")
    if free < least:
        return check(what, found, "note", f"the job waits until {_are(least)} free")
    return check(what, found, hint="" if free >= most else f"it begins with {free}, and gets more as they become free")


def _run(count: int) -> str:
    return "one runs" if count == 1 else f"{count} run"


def _are(count: int) -> str:
    return "one is" if count == 1 else f"{count} are"


async def _queue(ctx: Context, view: ClusterView, job: PlannedJob, ahead: int) -> Check:
    """Ask the planner when the job would start among running and queued ones, `ahead` of which are queued."""
    settings = ctx.settings
    limits = settings.tenants.get(job.tenant) or settings.tenants.get(OTHER_TENANTS) or UNLIMITED
    if never := over_quota(limits, Used(), jobs=0, workers=0, more=sum(job.needs.values())):
        hint = "it would never start: ask for less (resources), or the operator for more (tenants)"
        return check("queue", f"beyond {never}", "bad", hint)
    # in a thread: a long queue takes time, and other requests must be answered
    planned = await asyncio.to_thread(planner.plan, view)
    if any(isinstance(made, Start) and made.job == CANDIDATE for made in planned.decisions):
        return check("queue", "it would begin at once")
    why = planned.waiting.get(CANDIDATE) or "what others must give back first"
    hint = "the scheduler starts workers for it" if settings.launcher != "none" else ""
    queued = f"; queued now: {plural(ahead, 'other job')}" if ahead else ""
    return check("queue", f"it would wait for {why}{queued}", "note", hint)


def _record(spec: JobSpec, tenant: str, now: float) -> JobRecord:
    return JobRecord(
        id=CANDIDATE,
        name=spec.name,
        kind=spec.kind,
        tenant=tenant,
        state=JobState.QUEUED,
        version=0,
        epoch=0,
        created=now,
        updated=now,
        since=now,
        step=0,
        steps=0,
        reason="",
        spec=spec.model_dump(mode="json"),
    )
