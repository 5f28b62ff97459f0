"""Placement over real servers: which job gets which workers."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import orjson
import pytest
import structlog

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.workers import Gpu
from tests.conftest import NewContext, until
from tests.integration.scheduler.placement.reconciling import (
    has_lease,
    is_leased,
    looking,
    reaches_epoch,
    reconciled,
    started,
    state,
    waits_for,
)
from tests.support.scheduling import Workers, kinds, new_job, running


async def test_job_starts_when_workers_are_free(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await new_job(store, "j-a")
    await until(lambda: waits_for(store, job, "trainer, rollout worker (none is running)"))
    await workers.start("trainer-0")
    await until(lambda: waits_for(store, job, "rollout worker (none is running)"))
    await workers.start("rollout-0")
    await until(lambda: started(store, job))
    for id, pool in (("trainer-0", Pool.TRAINER), ("rollout-0", Pool.ROLLOUT)):
        expected = Lease(job=job, worker=id, incarnation=workers[id].info.incarnation, epoch=1, pool=pool)
        await until(partial(has_lease, workers, id, expected))
    assert (await store.job(job)).waiting_for == ""
    assert await kinds(store, job) == ["queued", "waiting", "waiting", "starting"]


TAUGHT: dict[str, Any] = {"algorithm": {"name": "distill"}, "teacher": {"base": "t"}, "train": {"steps": 1}}


@pytest.mark.parametrize("changes", [{"algorithm__kl_coef": 0.1}, TAUGHT], ids=["reference", "teacher"])
async def test_job_waits_for_shared_workers(store: Store, ctx: Context, changes: dict[str, Any]) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0")
    job = await new_job(store, "j-a", **changes)
    async with looking(Reconciler(ctx)):
        await until(lambda: waits_for(store, job, "env worker, shared reference-forward (none is running)"))
        await workers.start("env-0", "reference-0")
        await until(lambda: started(store, job))
    await workers.stop()


async def test_oldest_job_goes_first(store: Store, workers: Workers, ctx: Context) -> None:
    jobs = [await new_job(store, f"j-{name}") for name in ("z", "a", "m")]
    await workers.start("trainer-0", "rollout-0")
    await Reconciler(ctx).reconcile()
    assert [await state(store, job) for job in jobs] == [JobState.STARTING, JobState.QUEUED, JobState.QUEUED]


async def test_lent_workers_go_to_a_startable_job(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    wide = await new_job(store, "j-wide", resources__rollout_workers=3)
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: started(store, wide))
    await workers.start("rollout-1")
    await until(lambda: is_leased(workers, "rollout-1", wide, 1))
    workers["rollout-1"].leaves = False
    await workers.start("trainer-1")
    narrow = await new_job(store, "j-narrow")
    await until(lambda: _leaving(workers, "rollout-1", wide))
    held = f"held by rl job {wide}"
    await until(lambda: waits_for(store, narrow, f"a free rollout worker ({held})"))
    workers["rollout-1"].leaves = True
    await until(lambda: started(store, narrow))
    await until(lambda: is_leased(workers, "rollout-1", narrow, 1))
    assert await workers.holds("rollout-0") == wide, "its last one stays"
    assert (await kinds(store, wide))[-1] == "rollout_worker_taken_back"
    await store.transition(narrow, JobState.CANCELLED)
    await until(lambda: is_leased(workers, "rollout-1", wide, 1))  # and is lent again


async def _leaving(workers: Workers, id: str, job: str) -> bool:
    lease = await workers[id].lease()
    return lease is not None and lease.job == job and lease.leaves_by > time.time()


async def test_a_worker_that_overstays_is_taken_away(store: Store, workers: Workers, new_context: NewContext) -> None:
    async with new_context(take_back_s=0.2) as ctx, looking(Reconciler(ctx)):
        wide = await new_job(store, "j-wide", resources__rollout_workers=2)
        await workers.start("trainer-0", "rollout-0", "rollout-1")
        await until(lambda: is_leased(workers, "rollout-1", wide, 1))
        workers["rollout-1"].leaves = False
        await workers.start("trainer-1")
        narrow = await new_job(store, "j-narrow")
        await until(lambda: is_leased(workers, "rollout-1", narrow, 1))


async def test_a_job_starts_with_all_its_minimum(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    resources = {"rollout_workers": 3, "min_rollout_workers": 2}
    job = await new_job(store, "j-a", resources=resources)
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: waits_for(store, job, "2 rollout workers (1 of them running)"))
    assert await store.leases() == []
    await workers.start("rollout-1")
    await until(lambda: started(store, job))
    assert {lease.worker for lease in await store.leases()} == {"trainer-0", "rollout-0", "rollout-1"}


async def test_ids_of_other_tenants_stay_hidden(store: Store, workers: Workers, new_context: NewContext) -> None:
    """Taken back, interrupted, kept: all that is written down of a job, and logged, is for its tenant."""
    at_once: dict[str, Any] = dict.fromkeys(("queue_preempt_after_s", "queue_min_run_s", "queue_reserve_after_s"), 0.0)
    async with new_context(**at_once) as ctx:
        with structlog.testing.capture_logs() as logged:
            async with running(Reconciler(ctx).run()):
                await workers.start("trainer-0", "trainer-1", "rollout-0", "rollout-1")
                red = await new_job(store, "j-red", tenant="red", resources__rollout_workers=2, resources__priority=-1)
                await until(lambda: is_leased(workers, "rollout-1", red, 1))
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
    await until(lambda: waits_for(store, job, "trainer with 2 GPUs (none is running)"))
    gpus = [Gpu(index=n, uuid=str(n), model="X", memory=80 << 30) for n in range(2)]
    await workers.start("trainer-1", gpus=gpus)
    await until(lambda: started(store, job))
    assert await workers.holds("trainer-1") == job and await workers.holds("trainer-0") is None


async def test_quotas_count_what_workers_hold(store: Store, workers: Workers, new_context: NewContext) -> None:
    tenants: Any = {"default": {"running_jobs": 1, "worker_seconds_per_day": 0.001}}
    async with new_context(tenants=tenants) as ctx:
        first, second = [await new_job(store, f"j-{name}") for name in ("first", "second")]
        await workers.start("trainer-0", "rollout-0", "trainer-1", "rollout-1")
        reconciler = Reconciler(ctx)
        await reaches_epoch(reconciler, first, 1)
        await until(lambda: waits_for(store, second, "its tenant's quota of 1 running jobs"))
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
