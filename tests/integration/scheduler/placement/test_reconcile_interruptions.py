"""Jobs that are paused, interrupted by others, or begin with half of what they need."""

from __future__ import annotations

import time
from typing import Any

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from tests.conftest import NewContext, until
from tests.integration.scheduler.placement.reconciling import (
    begun,
    is_leased,
    looking,
    reaches_epoch,
    reconciled,
    started,
    state,
    waits_for,
    works_for,
)
from tests.support.scheduling import Workers, kinds, new_job


async def test_paused_job_frees_workers_and_resumes(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await store.transition(job, JobState.PAUSED)
    await until(store.leases, lambda leases: not leases)
    await until(lambda: workers.idle("trainer-0", "rollout-0"))
    assert await state(store, job) == JobState.PAUSED
    await store.transition(job, JobState.QUEUED, allowed=[JobState.PAUSED])
    await until(lambda: started(store, job, epoch=2))


async def test_priority_interrupts_and_resumes(store: Store, workers: Workers, new_context: NewContext) -> None:
    at_once: dict[str, Any] = {"queue_preempt_after_s": 0.0, "queue_min_run_s": 0.0}
    async with new_context(**at_once) as ctx, looking(Reconciler(ctx)):
        low = await new_job(store, "j-low")
        await workers.start("trainer-0", "rollout-0")
        await until(lambda: is_leased(workers, "trainer-0", low, 1))
        high = await new_job(store, "j-high", resources__priority=3)
        await until(lambda: started(store, high))
        events = await store.events(low)
        assert next(event for event in events if event["event"] == "preempted")["by"] == high
        assert await state(store, low) == JobState.QUEUED
        await store.transition(high, JobState.CANCELLED)
        await until(lambda: started(store, low, epoch=2))


async def test_interrupted_job_waits_for_its_workers(store: Store, workers: Workers, new_context: NewContext) -> None:
    async with new_context() as ctx:
        job = await new_job(store, "j-a")
        await workers.start("trainer-0", "rollout-0")
        reconciler = Reconciler(ctx)
        await reconciler.reconcile()
        await until(lambda: works_for(store, "trainer-0", job))
        await workers["trainer-0"].stop()  # it saves: it beats, and has not let go
        await workers.start("trainer-1")
        await store.transition(job, JobState.PAUSED)
        await store.transition(job, JobState.QUEUED, allowed=[JobState.PAUSED], since=time.time())
        await reconciler.reconcile()
        await reconciler.reconcile()
        assert await waits_for(store, job, "its last workers, which save what they have")
        await workers.start("trainer-0")
        await reaches_epoch(reconciler, job, 2)


async def test_half_started_jobs_do_not_deadlock(store: Store, workers: Workers, new_context: NewContext) -> None:
    async with new_context(queue_gang_s=0.0) as ctx:
        first, second = [await new_job(store, f"j-{name}") for name in ("first", "second")]
        await workers.start("trainer-0", "rollout-0", "trainer-1", "rollout-1")
        reconciler = Reconciler(ctx)
        await reconciler.reconcile()
        held = {lease.worker: lease.job for lease in await store.leases()}
        assert sorted(held.values()) == [first, first, second, second]
        await until(lambda: time.monotonic() >= reconciler.watch.absence_counts_from)
        await workers[next(w for w, job in held.items() if job == first and "trainer" in w)].die()
        await workers[next(w for w, job in held.items() if job == second and "rollout" in w)].die()
        whole = {Pool.TRAINER, Pool.ROLLOUT}
        await reconciled(
            reconciler, store.leases, lambda leases: {one.pool for one in leases if one.job == first} == whole
        )
        assert await state(store, second) == JobState.QUEUED
        assert "requeued" in await kinds(store, second)
