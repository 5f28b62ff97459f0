"""Workers that die, stop or ignore their leases, and what becomes of their jobs."""

from __future__ import annotations

import operator
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.services.scheduler.placement.worker_loss import MAX_RESTARTS
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from tests.conftest import Server, until
from tests.integration.scheduler.placement.reconciling import (
    begun,
    has_lease,
    is_leased,
    reaches_epoch,
    reconciled,
    started,
    state,
    waits_for,
    works_for,
)
from tests.support.scheduling import Workers, context, kinds, new_job


async def placed(ctx: Context, workers: Workers, **changes: Any) -> tuple[Reconciler, str]:
    """A job that has just got its two workers."""
    reconciler, job = Reconciler(ctx), await new_job(ctx.store, "j-a", **changes)
    await workers.start("trainer-0", "rollout-0")
    await reaches_epoch(reconciler, job, 1)
    return reconciler, job


async def test_dead_trainer_is_replaced_at_a_new_epoch(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await store.transition(job, JobState.RUNNING, epoch=1)
    rollout = await workers["rollout-0"].lease()
    # The scheduler has just started: it gives everybody one ttl to be seen.
    await until(lambda: time.monotonic() >= reconciler.watch.absence_counts_from)
    await workers.start("trainer-1")
    await workers["trainer-0"].die()
    await until(lambda: started(store, job, epoch=2))
    await until(lambda: is_leased(workers, "trainer-1", job, 2))
    assert await workers.holds("trainer-0") is None
    assert await workers["rollout-0"].lease() == rollout
    assert (await kinds(store, job))[-2:] == ["trainer_lost", "trainer_restarted"]


async def test_a_stopping_trainer_keeps_its_job_until_it_left(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler, job = await placed(ctx, workers)
    await until(lambda: works_for(store, "trainer-0", job))
    await until(lambda: works_for(store, "rollout-0", job))
    await workers.start("trainer-1", "rollout-1")
    for id in ("trainer-0", "rollout-0"):
        workers[id].drains = True
        await until(partial(_drains, store, id))
    await leased_now(reconciler, workers, "rollout-1", job)
    await reconciler.reconcile()
    assert (await store.job(job)).epoch == 1 and await workers.holds("trainer-1") is None, "it saves"
    await workers["trainer-0"].die()
    await reaches_epoch(reconciler, job, 2)
    assert await is_leased(workers, "trainer-1", job, 2) and await workers.holds("trainer-0") is None


async def _drains(store: Store, id: str) -> bool:
    return any(worker.id == id and worker.status == "draining" for worker in await store.workers())


async def test_restarted_trainer_gets_its_job_back(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await workers.start("trainer-0")  # same slot, new incarnation
    again = Lease(
        job=job, worker="trainer-0", incarnation=workers["trainer-0"].info.incarnation, epoch=2, pool=Pool.TRAINER
    )
    await until(partial(has_lease, workers, "trainer-0", again))
    assert (await store.job(job)).epoch == 2


async def test_job_says_it_waits_for_a_new_trainer(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await workers["trainer-0"].die()
    await until(lambda: waits_for(store, job, "trainer (none is running)"))
    await workers.start("trainer-0")
    await until(lambda: started(store, job, epoch=2))
    await until(lambda: waits_for(store, job, ""))


async def test_dead_rollout_worker_keeps_the_epoch(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    trainer = await workers["trainer-0"].lease()
    await workers["rollout-0"].die()
    await workers.start("rollout-1")
    await until(lambda: is_leased(workers, "rollout-1", job, 1))
    assert await workers.holds("rollout-0") is None
    assert await workers["trainer-0"].lease() == trainer
    assert (await kinds(store, job))[-2:] == ["rollout_worker_lost", "rollout_worker_added"]


async def test_job_fails_when_trainers_are_lost_without_progress(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler, job = await placed(ctx, workers)
    for epoch in range(1, MAX_RESTARTS + 1):
        await store.update(job, step=2, epoch=epoch)
        await workers.start("trainer-0")
        await reaches_epoch(reconciler, job, epoch + 1)
        assert (await store.job(job)).restarts == epoch
    await store.update(job, resumed_step=2, step=3)  # progress: the count starts again
    await workers.start("trainer-0")
    await reaches_epoch(reconciler, job, MAX_RESTARTS + 2)
    assert (await store.job(job)).restarts == 1
    for restarts in range(1, MAX_RESTARTS + 1):
        await workers.start("trainer-0")
        await reconciler.reconcile()
        if restarts < MAX_RESTARTS:
            await reaches_epoch(reconciler, job, MAX_RESTARTS + 2 + restarts)
    record = await store.job(job)
    assert record.state == JobState.FAILED
    assert "lost 6 times in a row without a new step (step 3 of 3)" in record.reason
    assert "its process was restarted" in record.reason


async def test_trainers_that_make_steps_may_be_killed_without_end(store: Store, workers: Workers, ctx: Context) -> None:
    """Each life begins at the checkpoint again and gets no further than the best one did; a step that kills, does."""
    reconciler, job = await placed(ctx, workers, train__steps=60)
    steps = [18, 13, 16, 13, 18, 12, 17, 11, 14]
    deadly = [16] * (MAX_RESTARTS + 1)
    for epoch, step in enumerate(steps + deadly, start=1):
        await store.update(job, epoch=epoch, resumed_step=10, step=step)
        await workers.start("trainer-0")
        if epoch < len(steps + deadly):
            await reaches_epoch(reconciler, job, epoch + 1)
            assert (await store.job(job)).restarts == max(1, epoch - len(steps))
    await reconciler.reconcile()
    record = await store.job(job)
    assert record.state == JobState.FAILED and "lost 6 times in a row" in record.reason


async def test_losses_while_nats_is_away_or_just_was_do_not_fail_a_job(
    store: Store, own_server: Server, valkey_server: Server, workers: Workers, tmp_path: Path
) -> None:
    async with context(own_server, valkey_server, "scheduler-0", tmp_path) as ctx:
        reconciler, job = await placed(ctx, workers)
        own_server.kill()
        await until(lambda: not ctx.bus.nc.is_connected)
        for epoch in range(1, MAX_RESTARTS + 3):
            if epoch == MAX_RESTARTS:  # the rest is lost just after the outage
                own_server.start()
                await until(lambda: ctx.bus.nc.is_connected)
            await store.update(job, step=2, epoch=epoch)
            await workers.start("trainer-0")
            await reaches_epoch(reconciler, job, epoch + 1)
        record = await store.job(job)
        assert (record.state, record.restarts) == (JobState.STARTING, 0)
        events = await store.events(job)
        why = {event["why"] for event in events if event["event"] == "trainer_lost"}
        assert why == {"its process was restarted; NATS was away"}
        reconciler.nats_grace_s = 0.0  # the outage is long ago
        await workers.start("trainer-0")
        await reaches_epoch(reconciler, job, MAX_RESTARTS + 4)
        assert (await store.job(job)).restarts == 1


@pytest.mark.parametrize("pool", ["trainer-0", "rollout-0"])
async def test_stopped_workers_are_no_losses(store: Store, workers: Workers, ctx: Context, pool: str) -> None:
    reconciler, job = await placed(ctx, workers)
    for _ in range(MAX_RESTARTS + 1):
        reconciler = Reconciler(ctx)  # as after the death of the whole machine
        await workers.start(pool)
        await leased_now(reconciler, workers, pool, job)
    for _ in range(MAX_RESTARTS + 1):
        workers[pool].drains = True
        await until(partial(_drains, store, pool))
        await reconciler.reconcile()
        workers[pool].drains = False
        await workers.start(pool)
        await leased_now(reconciler, workers, pool, job)
    record = await store.job(job)
    assert (record.state.held, record.restarts, record.rollout_losses) == (True, 0, 0)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
async def test_losses_before_service_fail_a_job(store: Store, workers: Workers, ctx: Context, state: JobState) -> None:
    """Each dies while it loads the model: the job would wait without end."""
    reconciler, job = await placed(ctx, workers, resources__rollout_workers=2)
    await store.transition(job, state, epoch=1)
    workers["rollout-0"].obeys = False
    for losses in range(1, MAX_RESTARTS + 2):
        await leased_now(reconciler, workers, "rollout-0", job)
        await workers.start("rollout-0")
        await reconciled(reconciler, partial(store.job, job), lambda found, n=losses: found.rollout_losses == n)  # type: ignore[misc]
    await leased_now(reconciler, workers, "rollout-0", job)
    await workers.start("rollout-0")
    await reconciler.reconcile()
    record = await store.job(job)
    assert record.state == JobState.FAILED
    assert "rollout workers were lost 7 times in a row before one served the job" in record.reason
    assert "rollout-0: its process was restarted" in record.reason and "memory" in record.reason


async def leased_now(reconciler: Reconciler, workers: Workers, id: str, job: str) -> None:
    """Reconcile until the very process that beats now has the lease."""
    own = (job, workers[id].info.incarnation)
    await reconciled(reconciler, workers[id].lease, lambda lease: lease and (lease.job, lease.incarnation) == own)


async def test_losses_do_not_fail_a_job_while_one_worker_serves(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler = Reconciler(ctx)
    job = await new_job(store, "j-a", resources__rollout_workers=2)
    await workers.start("trainer-0", "rollout-0", "rollout-1")
    await reaches_epoch(reconciler, job, 1)
    await store.transition(job, JobState.RUNNING, epoch=1)
    await reconciler.reconcile()

    async def losses() -> tuple[int, int]:
        """Noted so far, and not forgiven."""
        return (await kinds(store, job)).count("rollout_worker_lost"), (await store.job(job)).rollout_losses

    for number in range(1, 2 * MAX_RESTARTS + 3):
        await workers.start("rollout-1")
        await reconciled(reconciler, losses, partial(operator.eq, (number, 0)))
    assert await state(store, job) == JobState.RUNNING


async def test_a_scheduler_that_starts_anew_disturbs_nobody(store: Store, workers: Workers, ctx: Context) -> None:
    job = await new_job(store, "j-a")
    await workers.start("trainer-0", "rollout-0")
    await Reconciler(ctx).reconcile()
    leases = sorted(await store.leases(), key=lambda lease: lease.worker)
    # As after an outage of Redis: the heartbeats are gone although the workers live.
    await workers.stop()
    await store.redis.delete("worker:trainer-0", "worker:rollout-0")
    anew = Reconciler(ctx)
    await anew.reconcile()
    assert sorted(await store.leases(), key=lambda lease: lease.worker) == leases
    assert (await store.job(job)).epoch == 1
    await until(lambda: time.monotonic() >= anew.watch.absence_counts_from)
    await anew.reconcile()  # they had their time
    assert await store.leases() == []


async def test_worker_that_ignores_its_lease_loses_it(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await new_job(store, "j-a")
    await workers.start("trainer-0", "rollout-0")
    workers["trainer-0"].obeys = False
    await until(lambda: started(store, job))
    await until(lambda: started(store, job, epoch=2))
    events = await store.events(job)
    assert next(e for e in events if e["event"] == "trainer_lost")["why"] == "it does not act on its lease"
