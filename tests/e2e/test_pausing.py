"""Real services: jobs that are paused, interrupted and resumed, workers that are lent, schedulers that die. Each test
ends its jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from opentinker.client import ApiConflict
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.e2e.test_kills import check, toy_spec
from tests.support.cluster import Cluster, Toys, shared_fixture, toy_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

one_each = shared_fixture(toy_cluster, queue_preempt_after_s=0.2, queue_min_run_s=0.5)
"""One worker per pool; a waiting job of higher priority interrupts the running one."""


two_each = shared_fixture(toy_cluster, trainers=2, rollout_workers=2, worker_ttl_s=4, heartbeat_s=0.4)


@pytest.fixture(autouse=True)
def logs_of_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails shows the last log lines of every service."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for name in {"one_each", "two_each"} & set(request.fixturenames):
            request.getfixturevalue(name)[0].show()


async def has_let_go(cluster: Cluster, job: str) -> bool:
    busy = {worker.job for worker in await cluster.store.workers()} | {
        lease.job for lease in await cluster.store.leases()
    }
    return job not in busy


async def test_paused_job_has_saved_what_it_trained_and_goes_on_from_there(one_each: Toys) -> None:
    cluster, model = one_each
    train = {"learner": "simulated", "steps": 40, "simulated_step_s": 0.05, "checkpoint_every": 1000}
    spec = toy_spec(model, steps=40, train=train)
    job = await cluster.submit(spec)
    await cluster.reaches(job, 5)
    assert (await cluster.client.pause(job))["state"] == "paused"
    await until(lambda: has_let_go(cluster, job))
    step = cluster.manifest(job).step
    assert step >= 5 and cluster.lines(job)[-1]["step"] == step, "not a step is lost"
    assert (await cluster.ledger(job)).balanced
    assert (await cluster.client.pause(job))["state"] == "paused", "again is fine"
    other = await cluster.submit(toy_spec(model, steps=3))
    assert (await cluster.wait(other))["state"] == "succeeded", "the workers are free"
    assert (await cluster.client.resume(job))["state"] in ("queued", "starting")
    await cluster.succeeds(job)
    assert cluster.manifest(job).resumed[2] == step
    await check(cluster, job, spec)
    with pytest.raises(ApiConflict, match="succeeded"):
        await cluster.client.pause(job)
    with pytest.raises(ApiConflict, match="nothing to resume"):
        await cluster.client.resume(job)


@pytest.mark.slow
async def test_interrupted_job_goes_on_where_it_was(one_each: Toys) -> None:
    cluster, model = one_each
    train = {"learner": "simulated", "steps": 60, "simulated_step_s": 0.05, "checkpoint_every": 1000}
    spec = toy_spec(model, steps=60, train=train)
    low = await cluster.submit(spec)
    await cluster.reaches(low, 5)
    high = await cluster.run(toy_spec(model, steps=5, resources={"priority": 5}))
    await cluster.succeeds(low)
    events = await cluster.client.event_log(low)
    (preempted,) = [event for event in events if event["event"] == "preempted"]
    assert preempted["by"] == high
    assert [line["step"] for line in cluster.lines(low)] == list(range(1, 61)), "nothing is trained again"
    await check(cluster, low, spec)


async def leads(cluster: Cluster) -> str:
    found: Any = await cluster.store.redis.get("leader")
    return str(found)


@pytest.mark.slow
async def test_a_second_scheduler_takes_over_and_the_first_grants_nothing_later(two_each: Toys) -> None:
    """SIGSTOP for longer than its leadership lasts, jobs placed meanwhile, SIGCONT: everything that it then tries to
    write is refused, and counted by the leases that are as they were."""
    cluster, model = two_each
    cluster.env |= {"OPENTINKER_HTTP_PORT": "0"}
    cluster._add("scheduler", "scheduler-2")
    first = await cluster.submit(toy_spec(model, steps=10_000))
    await cluster.reaches(first, 3)
    assert '"scheduler"' in await leads(cluster)
    cluster.pause("scheduler")
    await until(lambda: leads(cluster), lambda found: '"scheduler-2"' in found)
    epoch = (await cluster.store.job(first)).epoch
    second = await cluster.store.create_job(id="j-aftersleep", spec=(await cluster.store.job(first)).spec, tenant="t")
    await until(lambda: cluster.store.job(second), lambda found: found.state == JobState.RUNNING)
    before = sorted((lease.worker, lease.job, lease.epoch) for lease in await cluster.store.leases())
    cluster.resume("scheduler")
    await until(lambda: "leadership_lost" in cluster.logs("scheduler"))
    await cluster.client.jobs()  # it serves HTTP as before
    assert sorted((lease.worker, lease.job, lease.epoch) for lease in await cluster.store.leases()) == before
    assert (await cluster.store.job(first)).epoch == epoch, "nobody was disturbed"
    assert '"scheduler-2"' in await leads(cluster)


@pytest.mark.slow
async def test_scheduler_that_is_killed_answers_soon_and_freed_workers_are_used(one_each: Toys) -> None:
    cluster, model = one_each
    job = await cluster.submit(toy_spec(model, steps=10_000))
    await cluster.reaches(job, 3)
    before = await cluster.store.job(job)
    killed = time.monotonic()
    cluster.kill("scheduler")
    assert (await cluster.client.job(job))["state"] == "running"  # it asks until somebody answers
    print(f"first correct answer {time.monotonic() - killed:.2f} s after the kill (goal 3 s)")
    await cluster.reaches(job, (await cluster.step(job)) + 3)
    after = await cluster.store.job(job)
    assert (after.epoch, after.version, after.restarts) == (before.epoch, before.version, 0), "nobody was disturbed"
    following = await cluster.submit(toy_spec(model, steps=3))
    await cluster.client.cancel(job)
    await until(lambda: has_let_go(cluster, job))
    free = time.monotonic()
    await until(cluster.store.leases, lambda found: [lease for lease in found if lease.job == following])
    print(f"freed workers were used {time.monotonic() - free:.2f} s after they were free (goal 1 s)")
    await cluster.succeeds(following)
