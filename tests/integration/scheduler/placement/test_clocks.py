"""Clocks are set, forwards and backwards, while jobs run: nobody is lost, charged or kept waiting for that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import orjson
import pytest

from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.services.scheduler.placement.types import Rules
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.lease_table import CHARGED_AT_MOST_S
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import Server, until
from tests.support.scheduling import context, kinds, new_job
from tests.unit.shared.test_liveness import Clock

HOUR_S = 3600.0
PATIENCE_S = 5.0
LOOK_S = 0.5


@pytest.fixture
async def ctx(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> AsyncIterator[Context]:
    async with context(
        nats_server, valkey_server, "scheduler-0", tmp_path, take_back_s=20.0, worker_ttl_s=PATIENCE_S
    ) as ctx:
        yield ctx


class Hearts:
    """Workers that beat when the test says so."""

    def __init__(self, store: Store, *ids: str) -> None:
        self.store = store
        self.workers = {
            id: WorkerInfo(id=id, incarnation=f"{id}-1", pool=Pool(id.split("-")[0]), host="h", pid=1) for id in ids
        }

    async def beat(self, *ids: str) -> None:
        for id in ids or self.workers:
            lease = await self.store.lease(id)
            idle = self.workers[id].pool == Pool.ENV or lease is None
            job, status = (None, "idle") if idle or lease is None else (lease.job, "ready")
            await self.store.beat(msgspec.structs.replace(self.workers[id], job=job, status=status), PATIENCE_S)


async def clock_of_redis_steps(store: Store, seconds: float) -> None:
    """What is left: after a step forwards nothing that expires, and what was stored at a time was so earlier."""
    if seconds > 0:
        for key in await store.redis.keys("*"):
            if await store.redis.pttl(key) >= 0:
                await store.redis.delete(key)
    for slot, text in (await store.redis.hgetall("leases:held")).items():
        held = orjson.loads(text)
        await store.redis.hset("leases:held", slot, orjson.dumps({**held, "at": held["at"] - seconds}))


@pytest.mark.parametrize("step_s", [HOUR_S, 1000 * 24 * HOUR_S, -HOUR_S])
async def test_a_clock_step_of_redis_costs_no_worker(store: Store, ctx: Context, step_s: float) -> None:
    clock = Clock()
    job = await new_job(store, "j-a")
    hearts = Hearts(store, "trainer-0", "rollout-0", "env-0")
    await hearts.beat()
    reconciler = Reconciler(ctx, clock=clock)
    await reconciler.reconcile()
    before = {lease.worker: lease for lease in await store.leases()}
    assert before.keys() == {"trainer-0", "rollout-0"}
    await clock_of_redis_steps(store, step_s)
    for _ in range(12):  # longer than anybody's patience
        clock.now += LOOK_S
        await hearts.beat()
        await reconciler.reconcile()
    assert {lease.worker: lease for lease in await store.leases()} == before
    assert (await store.job(job)).epoch == 1 and "trainer_lost" not in await kinds(store, job)
    (spent,) = await UsageStore(store.redis).of_jobs([job])
    assert spent["worker_s"] <= 2 * CHARGED_AT_MOST_S + 60.0, "two workers, and what this test took"


async def test_worker_timeouts_are_of_the_leaders_clock(store: Store, ctx: Context) -> None:
    clock = Clock()
    job = await new_job(store, "j-a")
    hearts = Hearts(store, "trainer-0", "rollout-0", "env-0", "trainer-1")
    await hearts.beat()
    reconciler = Reconciler(ctx, clock=clock)
    await reconciler.reconcile()
    await hearts.beat()
    await reconciler.reconcile()
    for _ in range(round(PATIENCE_S / LOOK_S) - 1):
        clock.now += LOOK_S
        await hearts.beat("rollout-0", "env-0", "trainer-1")
        await reconciler.reconcile()
    assert (await store.job(job)).epoch == 1
    clock.now += LOOK_S
    await hearts.beat("rollout-0", "env-0", "trainer-1")
    await reconciler.reconcile()
    assert (await store.job(job)).epoch == 2, "in the very look that found it"
    assert {lease.worker: lease.epoch for lease in await store.leases()} == {"rollout-0": 1, "trainer-1": 2}
    assert not await store.lives("trainer-0", "trainer-0-1"), "everybody reads the same"
    await hearts.beat("trainer-0")
    assert await store.lives("trainer-0", "trainer-0-1"), "it only slept"


async def test_a_new_leader_counts_anew(store: Store, ctx: Context) -> None:
    clock = Clock()
    job = await new_job(store, "j-a")
    await Hearts(store, "trainer-0", "rollout-0", "env-0").beat()
    first = Reconciler(ctx, clock=clock)
    await first.reconcile()
    clock.now += HOUR_S
    next_ = Reconciler(ctx, clock=clock)
    for _ in range(round(PATIENCE_S / LOOK_S)):
        await next_.reconcile()
        assert len(await store.leases()) == 2
        clock.now += LOOK_S
    await next_.reconcile()
    assert await store.leases() == [] and "trainer_lost" in await kinds(store, job)


async def test_a_worker_that_is_taken_back_has_its_time_whatever_clocks_say(store: Store, ctx: Context) -> None:
    clock = Clock()
    hearts = Hearts(store, "rollout-0", "env-0")
    job = await new_job(store, "j-a", JobState.RUNNING)
    lease = Lease(job=job, worker="rollout-0", incarnation="rollout-0-1", epoch=1, pool=Pool.ROLLOUT, leaves_by=1.0)
    await store.grant(lease)  # by a scheduler whose clock was set forwards since
    reconciler = Reconciler(ctx, clock=clock)
    for _ in range(round(ctx.settings.take_back_s / LOOK_S)):
        await hearts.beat()
        await reconciler.reconcile()
        assert await store.leases() == [lease]
        clock.now += LOOK_S
    clock.now += LOOK_S
    await reconciler.reconcile()
    assert await store.leases() == []


async def test_a_job_that_lost_a_worker_does_not_wait_for_an_hour_when_the_clock_is_set_back(store: Store) -> None:
    await new_job(store, "j-a")
    await store.update("j-a", retry_at=1000.0 + HOUR_S)
    await new_job(store, "j-b")
    await store.update("j-b", retry_at=1000.0 + 30.0)
    rules = Rules(reserve_after_s=1.0, preempt_after_s=1.0, min_run_s=1.0, gang_s=1.0)
    jobs = await store.jobs(["j-a", "j-b"])
    view = Cluster([], []).view(jobs, now=1000.0, limits={}, used={}, rules=rules)
    assert {job.id: job.retry_at for job in view.jobs} == {"j-a": 0.0, "j-b": 1030.0}


async def test_dead_leadership_ends_by_the_clock_of_another(store: Store, valkey_server: Server) -> None:
    """The clock of Redis was set back: the key would stay for an hour."""
    async with Store.connect(valkey_server.url, "rival") as rival:
        ttl_s = 1.0
        epoch = await store.lead("s-1", "one", ttl_s)
        for _ in range(5):
            await store.redis.persist("leader")
            assert await rival.lead("s-2", "two", ttl_s) is None
            assert await store.lead("s-1", "one", ttl_s) == epoch
        await store.redis.persist("leader")
        await until(lambda: rival.lead("s-2", "two", ttl_s), lambda found: found is not None)
        assert await store.lead("s-1", "one", ttl_s) is None
