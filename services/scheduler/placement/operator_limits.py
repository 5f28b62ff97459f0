"""The cluster with the operator's limits and today's usage, as the planner sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.quotas import Used
from opentinker.services.scheduler.placement.types import OTHER_TENANTS, ClusterView, Rules, Slot
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactIndex
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord

NAMED = 3
"""Jobs listed to a tenant whose artifacts leave no room."""


async def view_of(
    ctx: Context, cluster: Cluster, jobs: Sequence[JobRecord], starting: Mapping[str, Slot] | None = None
) -> ClusterView:
    """Return the planner's view of these jobs, now. The arguments are those of `Cluster.view`, which runs in a thread:
    of thousands of jobs it takes long, and requests are answered by the same process."""
    settings = ctx.settings
    rules = Rules(
        reserve_after_s=settings.queue_reserve_after_s,
        preempt_after_s=settings.queue_preempt_after_s,
        min_run_s=settings.queue_min_run_s,
        gang_s=settings.queue_gang_s,
        inference_lend_s=settings.inference_lend_s,
    )
    used = await _used_today(ctx, {job.tenant for job in jobs})
    starting = dict(starting or {})  # a copy: other tasks change it
    return await asyncio.to_thread(
        cluster.view, jobs, now=time.time(), limits=settings.tenants, used=used, rules=rules, starting=starting
    )


async def _used_today(ctx: Context, tenants: Iterable[str]) -> dict[str, Used]:
    """Return today's usage of tenants with limits: seconds, and currently stored bytes."""
    limits, index = ctx.settings.tenants, ArtifactIndex(ctx.store.redis)
    bound = {tenant: limit for tenant in tenants if (limit := limits.get(tenant) or limits.get(OTHER_TENANTS))}
    counted = [tenant for tenant, limit in bound.items() if limit.by_time]
    seconds = await UsageStore(ctx.store.redis).today(counted) if counted else {}
    stored = await index.stored_by([tenant for tenant, limit in bound.items() if limit.stored_gb is not None])
    return {
        tenant: Used(
            seconds.get(tenant, {}).get("worker_s", 0.0),
            seconds.get(tenant, {}).get("gpu_s", 0.0),
            sum(stored.get(tenant, {}).values()),
            tuple(stored.get(tenant, {}).items())[:NAMED],
        )
        for tenant in seconds.keys() | stored.keys()
    }
