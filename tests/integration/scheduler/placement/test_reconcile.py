"""Placement over real servers: who gets what, and what happens when somebody dies."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
import pytest
import structlog

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.services.scheduler.placement.worker_loss import MAX_RESTARTS
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import Gpu, JobState, Lease, Pool
from tests.conftest import NewContext, Server, until
from tests.support.scheduling import BEAT_S, Workers, context, kinds, new_job, running

T = TypeVar("T")


@pytest.fixture
async def workers(store: Store) -> AsyncIterator[Workers]:
    workers = Workers(store)
    await workers.start("env-0")
    yield workers
    await workers.stop()


@asynccontextmanager
async def looking(reconciler: Reconciler) -> AsyncIterator[None]:
    """It looks as often as workers beat, which say nothing here that would wake it."""

    async def wake() -> None:
        while True:
            reconciler._wake.set()
            await asyncio.sleep(BEAT_S)

    async with running(reconciler.run()), running(wake()):
        yield


@pytest.fixture
async def reconciler(ctx: Context) -> AsyncIterator[Reconciler]:
    reconciler = Reconciler(ctx)
    async with looking(reconciler):
        yield reconciler


async def reconciled(reconciler: Reconciler, read: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> T:
    """Reconcile until what is read afterwards satisfies `holds`, and return it."""

    async def look() -> T:
        await reconciler.reconcile()
        return await read()

    return await until(look, holds)


async def reaches_epoch(reconciler: Reconciler, job: str, epoch: int) -> None:
    await reconciled(reconciler, partial(reconciler.ctx.store.job, job), lambda record: record.epoch == epoch)


async def state(store: Store, job: str) -> JobState:
    return (await store.job(job)).state


async def started(store: Store, job: str, epoch: int = 1) -> bool:
    record = await store.job(job)
    return record.state == JobState.STARTING and record.epoch == epoch


async def begun(store: Store, workers: Workers) -> str:
    """A job whose two workers have seen their leases."""
    job = await new_job(store, "j-a")
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: started(store, job))
    for id in ("trainer-0", "rollout-0"):
        await until(partial(_leased, workers, id, job, 1))
    return job


async def test_job_starts_when_workers_are_free(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await new_job(store, "j-a")
    await until(lambda: _waits_for(store, job, "trainer, rollout worker (none is running)"))
    await workers.start("trainer-0")
    await until(lambda: _waits_for(store, job, "rollout worker (none is running)"))
    await workers.start("rollout-0")
    await until(lambda: started(store, job))
    for id, pool in (("trainer-0", Pool.TRAINER), ("rollout-0", Pool.ROLLOUT)):
        expected = Lease(job=job, worker=id, incarnation=workers[id].info.incarnation, epoch=1, pool=pool)
        await until(partial(_has, workers, id, expected))
    assert (await store.job(job)).waiting_for == ""
    assert await kinds(store, job) == ["queued", "waiting", "waiting", "starting"]


async def _waits_for(store: Store, job: str, what: str) -> bool:
    return (await store.job(job)).waiting_for == what


async def _has(workers: Workers, id: str, lease: Lease) -> bool:
    return await workers[id].lease() == lease


async def placed(ctx: Context, workers: Workers, **changes: Any) -> tuple[Reconciler, str]:
    """A job that has just got its two workers."""
    reconciler, job = Reconciler(ctx), await new_job(ctx.store, "j-a", **changes)
    await workers.start("trainer-0", "rollout-0")
    await reaches_epoch(reconciler, job, 1)
    return reconciler, job


TAUGHT: dict[str, Any] = {"algorithm": {"name": "distill"}, "teacher": {"base": "t"}, "train": {"steps": 1}}


@pytest.mark.parametrize("changes", [{"algorithm__kl_coef": 0.1}, TAUGHT], ids=["reference", "teacher"])
async def test_job_waits_for_shared_workers(store: Store, ctx: Context, changes: dict[str, Any]) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0")
    job = await new_job(store, "j-a", **changes)
    async with looking(Reconciler(ctx)):
        await until(lambda: _waits_for(store, job, "env worker, shared reference-forward (none is running)"))
        await workers.start("env-0", "reference-0")
        await until(lambda: started(store, job))
    await workers.stop()


async def test_oldest_job_goes_first(store: Store, workers: Workers, ctx: Context) -> None:
    jobs = [await new_job(store, f"j-{name}") for name in ("z", "a", "m")]
    await workers.start("trainer-0", "rollout-0")
    await Reconciler(ctx).reconcile()
    assert [await state(store, job) for job in jobs] == [JobState.STARTING, JobState.QUEUED, JobState.QUEUED]


async def test_dead_trainer_is_replaced_at_a_new_epoch(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await store.transition(job, JobState.RUNNING, epoch=1)
    rollout = await workers["rollout-0"].lease()
    # The scheduler has just started: it gives everybody one ttl to be seen.
    await until(lambda: time.monotonic() >= reconciler.watch.absence_counts_from)
    await workers.start("trainer-1")
    await workers["trainer-0"].die()
    await until(lambda: started(store, job, epoch=2))
    await until(lambda: _leased(workers, "trainer-1", job, 2))
    assert await workers.holds("trainer-0") is None
    assert await workers["rollout-0"].lease() == rollout
    assert (await kinds(store, job))[-2:] == ["trainer_lost", "trainer_restarted"]


async def test_a_stopping_trainer_keeps_its_job_until_it_left(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler, job = await placed(ctx, workers)
    await until(lambda: _works(store, "trainer-0", job))
    await until(lambda: _works(store, "rollout-0", job))
    await workers.start("trainer-1", "rollout-1")
    for id in ("trainer-0", "rollout-0"):
        workers[id].drains = True
        await until(partial(_drains, store, id))
    await leased_now(reconciler, workers, "rollout-1", job)
    await reconciler.reconcile()
    assert (await store.job(job)).epoch == 1 and await workers.holds("trainer-1") is None, "it saves"
    await workers["trainer-0"].die()
    await reaches_epoch(reconciler, job, 2)
    assert await _leased(workers, "trainer-1", job, 2) and await workers.holds("trainer-0") is None


async def _drains(store: Store, id: str) -> bool:
    return any(worker.id == id and worker.status == "draining" for worker in await store.workers())


async def _leased(workers: Workers, id: str, job: str, epoch: int) -> bool:
    lease = await workers[id].lease()
    return lease is not None and (lease.job, lease.epoch) == (job, epoch)


async def test_restarted_trainer_gets_its_job_back(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await workers.start("trainer-0")  # same slot, new incarnation
    again = Lease(
        job=job, worker="trainer-0", incarnation=workers["trainer-0"].info.incarnation, epoch=2, pool=Pool.TRAINER
    )
    await until(partial(_has, workers, "trainer-0", again))
    assert (await store.job(job)).epoch == 2


async def test_job_says_it_waits_for_a_new_trainer(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    await workers["trainer-0"].die()
    await until(lambda: _waits_for(store, job, "trainer (none is running)"))
    await workers.start("trainer-0")
    await until(lambda: started(store, job, epoch=2))
    await until(lambda: _waits_for(store, job, ""))


async def test_dead_rollout_worker_keeps_the_epoch(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers)
    trainer = await workers["trainer-0"].lease()
    await workers["rollout-0"].die()
    await workers.start("rollout-1")
    await until(lambda: _leased(workers, "rollout-1", job, 1))
    assert await workers.holds("rollout-0") is None
    assert await workers["trainer-0"].lease() == trainer
    assert (await kinds(store, job))[-2:] == ["rollout_worker_lost", "rollout_worker_added"]


async def test_lent_workers_go_to_a_startable_job(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    wide = await new_job(store, "j-wide", resources__rollout_workers=3)
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: started(store, wide))
    await workers.start("rollout-1")
    await until(lambda: _leased(workers, "rollout-1", wide, 1))
    workers["rollout-1"].leaves = False
    await workers.start("trainer-1")
    narrow = await new_job(store, "j-narrow")
    await until(lambda: _leaving(workers, "rollout-1", wide))
    held = f"held by rl job {wide}; cancel it or add a rollout worker"
    await until(lambda: _waits_for(store, narrow, f"a free rollout worker ({held})"))
    workers["rollout-1"].leaves = True
    await until(lambda: started(store, narrow))
    await until(lambda: _leased(workers, "rollout-1", narrow, 1))
    assert await workers.holds("rollout-0") == wide, "its last one stays"
    assert (await kinds(store, wide))[-1] == "rollout_worker_taken_back"
    await store.transition(narrow, JobState.CANCELLED)
    await until(lambda: _leased(workers, "rollout-1", wide, 1))  # and is lent again


async def _leaving(workers: Workers, id: str, job: str) -> bool:
    lease = await workers[id].lease()
    return lease is not None and lease.job == job and lease.leaves_by > time.time()


async def test_a_worker_that_overstays_is_taken_away(store: Store, workers: Workers, new_context: NewContext) -> None:
    async with new_context(take_back_s=0.2) as ctx, looking(Reconciler(ctx)):
        wide = await new_job(store, "j-wide", resources__rollout_workers=2)
        await workers.start("trainer-0", "rollout-0", "rollout-1")
        await until(lambda: _leased(workers, "rollout-1", wide, 1))
        workers["rollout-1"].leaves = False
        await workers.start("trainer-1")
        narrow = await new_job(store, "j-narrow")
        await until(lambda: _leased(workers, "rollout-1", narrow, 1))


async def test_a_job_starts_with_all_its_minimum(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    resources = {"rollout_workers": 3, "min_rollout_workers": 2}
    job = await new_job(store, "j-a", resources=resources)
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: _waits_for(store, job, "2 rollout workers (1 of them running)"))
    assert await store.leases() == []
    await workers.start("rollout-1")
    await until(lambda: started(store, job))
    assert {lease.worker for lease in await store.leases()} == {"trainer-0", "rollout-0", "rollout-1"}


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
        await until(lambda: _leased(workers, "trainer-0", low, 1))
        high = await new_job(store, "j-high", resources__priority=3)
        await until(lambda: started(store, high))
        events = await store.events(low)
        assert next(event for event in events if event["event"] == "preempted")["by"] == high
        assert await state(store, low) == JobState.QUEUED
        await store.transition(high, JobState.CANCELLED)
        await until(lambda: started(store, low, epoch=2))


async def test_ids_of_other_tenants_stay_hidden(store: Store, workers: Workers, new_context: NewContext) -> None:
    """Taken back, interrupted, kept: all that is written down of a job, and logged, is for its tenant."""
    at_once: dict[str, Any] = dict.fromkeys(("queue_preempt_after_s", "queue_min_run_s", "queue_reserve_after_s"), 0.0)
    async with new_context(**at_once) as ctx:
        with structlog.testing.capture_logs() as logged:
            async with running(Reconciler(ctx).run()):
                await workers.start("trainer-0", "trainer-1", "rollout-0", "rollout-1")
                red = await new_job(store, "j-red", tenant="red", resources__rollout_workers=2, resources__priority=-1)
                await until(lambda: _leased(workers, "rollout-1", red, 1))
                blue = await new_job(store, "j-blue-1", tenant="blue")
                await until(lambda: started(store, blue))
                high = await new_job(store, "j-blue-2", tenant="blue", resources__priority=3)
                await until(lambda: started(store, high))
                needs = {"priority": 2, "rollout_workers": 2, "min_rollout_workers": 2}
                await new_job(store, "j-blue-3", tenant="blue", resources=needs)
                await until(lambda: store.job(red), lambda job: "kept for a job of another tenant" in job.waiting_for)
        events = await store.events(red)
        told = {event["event"]: event for event in events}
        assert told["rollout_worker_taken_back"]["wanted_by"] == "a job of another tenant"
        assert told["preempted"]["by"] == "a job of another tenant"
        lines = [line for line in logged if line.get("job") == red]
        assert {"job_started", "rollout_worker_taken_back", "job_preempted"} <= {line["event"] for line in lines}
        readable = [msgspec.json.encode(await store.job(red)), orjson.dumps(events), orjson.dumps(lines)]
        assert not [text for text in readable if b"j-blue" in text]


async def test_a_job_waits_for_enough_gpus(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    await workers.start("trainer-0", "rollout-0")
    job = await new_job(store, "j-a", resources__trainer_gpus=2, train__learner="torch")
    await until(lambda: _waits_for(store, job, "trainer with 2 GPUs (none is running)"))
    gpus = [Gpu(index=n, uuid=str(n), model="X", memory=80 << 30) for n in range(2)]
    await workers.start("trainer-1", gpus=gpus)
    await until(lambda: started(store, job))
    assert await workers.holds("trainer-1") == job and await workers.holds("trainer-0") is None


async def test_interrupted_job_waits_for_its_workers(store: Store, workers: Workers, new_context: NewContext) -> None:
    async with new_context() as ctx:
        job = await new_job(store, "j-a")
        await workers.start("trainer-0", "rollout-0")
        reconciler = Reconciler(ctx)
        await reconciler.reconcile()
        await until(lambda: _works(store, "trainer-0", job))
        await workers["trainer-0"].stop()  # it saves: it beats, and has not let go
        await workers.start("trainer-1")
        await store.transition(job, JobState.PAUSED)
        await store.transition(job, JobState.QUEUED, allowed=[JobState.PAUSED], since=time.time())
        await reconciler.reconcile()
        await reconciler.reconcile()
        assert await _waits_for(store, job, "its last workers, which save what they have")
        await workers.start("trainer-0")
        await reaches_epoch(reconciler, job, 2)


async def _works(store: Store, id: str, job: str) -> bool:
    return any(worker.id == id and worker.job == job for worker in await store.workers())


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


async def test_quotas_count_what_workers_hold(store: Store, workers: Workers, new_context: NewContext) -> None:
    tenants: Any = {"default": {"running_jobs": 1, "worker_seconds_per_day": 0.001}}
    async with new_context(tenants=tenants) as ctx:
        first, second = [await new_job(store, f"j-{name}") for name in ("first", "second")]
        await workers.start("trainer-0", "rollout-0", "trainer-1", "rollout-1")
        reconciler = Reconciler(ctx)
        await reaches_epoch(reconciler, first, 1)
        await until(lambda: _waits_for(store, second, "its tenant's quota of 1 running jobs"))
        await store.transition(first, JobState.CANCELLED)
        await reconciled(reconciler, partial(store.job, second), lambda job: "worker seconds a day" in job.waiting_for)
        usage = UsageStore(store.redis)
        (spent,) = await usage.of_jobs([first])
        assert spent["worker_s"] > 0.001 and (await usage.today(["default"]))["default"] == spent


async def test_a_full_store_keeps_jobs_waiting(store: Store, workers: Workers, new_context: NewContext) -> None:
    tenants: Any = {"default": {"stored_gb": 1.0}}
    async with new_context(tenants=tenants) as ctx:
        index, job = ArtifactIndex(store.redis), await new_job(store, "j-next")
        for name, size in (("j-small", 1), ("j-large", 1_250_000_000)):
            await index.add("default", name, ArtifactEntry(path="logs.jsonl", bytes=size, created=0.0))
        await workers.start("trainer-0", "rollout-0")
        reconciler = Reconciler(ctx)
        words = "its tenant's quota of 1 GB of artifacts: 1.25 GB are stored; delete some with `opentinker delete"
        record = await reconciled(reconciler, partial(store.job, job), lambda found: words in found.waiting_for)
        assert "(the largest: j-large 1.25 GB, j-small" in record.waiting_for
        await index.remove("default", "j-large", ["logs.jsonl"])
        await reaches_epoch(reconciler, job, 1)


@pytest.mark.parametrize("before", [JobState.QUEUED, JobState.STARTING, JobState.RUNNING])
async def test_cancel_frees_workers(store: Store, workers: Workers, reconciler: Reconciler, before: JobState) -> None:
    job = await new_job(store, "j-a")
    if before != JobState.QUEUED:
        await workers.start("trainer-0", "rollout-0")
        await until(lambda: started(store, job))
    if before == JobState.RUNNING:
        await store.transition(job, JobState.RUNNING, epoch=1)
    await store.transition(job, JobState.CANCELLED)
    await until(store.leases, lambda leases: not leases)
    if before != JobState.QUEUED:
        following = await new_job(store, "j-b")
        await until(lambda: started(store, following))


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


CHECKPOINT = {"job": "j-a", "epoch": 7, "step": 10, "version": [7, 10]}


@pytest.mark.parametrize(
    ("file", "text", "epoch"), [("step-000010/manifest.json", orjson.dumps(CHECKPOINT), 8), (".epoch", b"4", 5)]
)
async def test_epoch_is_higher_than_that_of_any_trainer_before(
    store: Store, workers: Workers, ctx: Context, file: str, text: bytes, epoch: int
) -> None:
    """Whether or not it wrote a checkpoint."""
    path = ctx.settings.data_dir / "jobs" / await new_job(store, "j-a") / "checkpoints" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    await workers.start("trainer-0", "rollout-0")
    await Reconciler(ctx).reconcile()
    assert (await store.job("j-a")).epoch == epoch


async def test_real_worker_runs_the_job_and_lets_go_when_it_is_cancelled(
    store: Store, workers: Workers, reconciler: Reconciler, new_context: NewContext
) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
        await worker.status("ready", job=lease.job, epoch=lease.epoch)
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    await workers.start("rollout-0")
    async with (
        new_context("trainer-0", worker_ttl_s=60.0) as trainer,
        running(LeasedWorker(trainer, Pool.TRAINER, work).serve()),
    ):
        job = await new_job(store, "j-a")
        await until(entered.is_set)
        await store.transition(job, JobState.CANCELLED)
        await until(left.is_set)
        await until(lambda: workers.idle("rollout-0"))


async def endpoint(store: Store, id: str, **changes: Any) -> str:
    """A queued inference job."""
    spec = parse_spec({"name": "chat", "kind": "inference", "model": {"base": "m"}, **changes})
    await store.create_job(id=id, spec=spec.model_dump(mode="json"), tenant="default")
    return id


async def test_a_job_answers_open_requests_before_sleep(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler = Reconciler(ctx)
    job = await endpoint(store, "j-sleepy0000", serving={"sleep_s": 5.0})
    await workers.start("rollout-0")
    await reconciler.reconcile()
    worker = workers["rollout-0"]
    worker.leaves = False  # a request has come since it said so
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": 60.0})
    await reconciled(reconciler, partial(store.job, job), lambda record: record.asleep)
    await reconciler.reconcile()
    lease = await worker.lease()
    assert lease is not None and lease.leaves_by > time.time()
    assert await state(store, job) == JobState.QUEUED
    worker.leaves = True
    await reconciled(reconciler, worker.lease, lambda lease: lease is None)
    assert (await store.job(job)).asleep


async def test_an_idle_inference_job_lends_its_worker(store: Store, workers: Workers, ctx: Context) -> None:
    """On a server with one rollout worker an endpoint that nobody uses starves no other job."""
    reconciler = Reconciler(ctx)
    chat = await endpoint(store, "j-idle000000")
    await workers.start("rollout-0", "trainer-0")
    worker = workers["rollout-0"]
    await reconciled(reconciler, partial(state, store, chat), lambda found: found == JobState.RUNNING)
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": ctx.settings.inference_lend_s - 1.0})
    rl = await new_job(store, "j-rl")
    await store.update(rl, since=time.time() - ctx.settings.queue_preempt_after_s)
    await store.update(chat, since=time.time() - ctx.settings.queue_min_run_s)
    await reconciled(reconciler, partial(store.job, rl), lambda job: "held by inference job" in job.waiting_for)
    assert await state(store, chat) == JobState.RUNNING
    worker.info = msgspec.structs.replace(worker.info, detail={"quiet_s": ctx.settings.inference_lend_s})
    await reconciled(reconciler, partial(store.job, rl), lambda job: job.state in (JobState.STARTING, JobState.RUNNING))
    asleep = await store.job(chat)
    assert asleep.asleep and asleep.waiting_for == (
        f"a request: idle, it lent its rollout workers to {rl}, and the next request wakes it"
    )
    assert asleep.since - asleep.quiet_since == pytest.approx(ctx.settings.inference_lend_s)
    assert (await store.latest_event(chat, "asleep") or {})["lent_to"] == rl


async def test_a_following_job_leaves_the_other_its_workers(store: Store, workers: Workers, ctx: Context) -> None:
    reconciler = Reconciler(ctx)
    follower = await endpoint(store, "j-follower00", start={"from": "j-source0000@live"})
    source = await new_job(store, "j-source0000", JobState.PAUSED)
    await workers.start("trainer-0", "rollout-0")
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.QUEUED
    assert await _waits_for(store, follower, f"job {source} to run")
    await store.transition(source, JobState.QUEUED)
    await reconciler.reconcile()
    assert await started(store, source, epoch=2)
    await workers.start("rollout-1")
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.STARTING
    await store.transition(source, JobState.PAUSED)
    await reconciler.reconcile()
    assert await state(store, follower) == JobState.QUEUED and await workers.holds("rollout-1") is None
