"""Jobs whose ranks several trainers share: leased together, lost together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import NewContext, until
from tests.integration.scheduler.placement.reconciling import is_leased, looking, started, waits_for, works_for
from tests.support.scheduling import Workers, kinds, new_job

WIDE: dict[str, Any] = {"train__learner": "torch", "resources__trainer_ranks": 2}
TRAINERS = ("trainer-0", "trainer-1")


@pytest.fixture
async def reconciler(new_context: NewContext) -> AsyncIterator[Reconciler]:
    async with new_context(queue_gang_s=0.5) as ctx:
        reconciler = Reconciler(ctx)
        async with looking(reconciler):
            yield reconciler


async def begun(store: Store, workers: Workers, reconciler: Reconciler, **changes: Any) -> str:
    """A job on two trainers, which work for it."""
    job = await new_job(store, "j-a", **{**WIDE, **changes})
    await workers.start(*TRAINERS, max_ranks=1)
    await workers.start("rollout-0")
    await until(lambda: started(store, job))
    for id in TRAINERS:
        await until(partial(works_for, store, id, job))
    await store.transition(job, JobState.RUNNING, epoch=1)
    await until(lambda: time.monotonic() >= reconciler.watch.absence_counts_from)
    return job


async def shares(workers: Workers, id: str) -> list[tuple[str, int]]:
    lease = await workers[id].lease()
    return [] if lease is None else [(share.worker, share.ranks) for share in lease.group]


async def test_a_group_begins_with_all_trainers(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await new_job(store, "j-a", **WIDE)
    await workers.start("trainer-0", max_ranks=1)
    await workers.start("rollout-0")
    await until(lambda: waits_for(store, job, "2 trainers (1 of them running)"))
    assert await workers.holds("trainer-0") is None and await workers.holds("rollout-0") is None
    await workers.start("trainer-1", max_ranks=1)
    await until(lambda: started(store, job))
    for id in TRAINERS:
        assert await is_leased(workers, id, job, 1)
        assert await shares(workers, id) == [("trainer-0", 1), ("trainer-1", 1)]
    rollout = await workers["rollout-0"].lease()
    assert rollout is not None and rollout.group == ()


async def test_the_loss_of_one_is_the_loss_of_all(store: Store, workers: Workers, reconciler: Reconciler) -> None:
    job = await begun(store, workers, reconciler)
    await workers["trainer-1"].die()
    await until(lambda: waits_for(store, job, "2 more free trainers"))
    assert await workers.holds("trainer-0") is None, "nothing is held while it waits for the rest"
    (event,) = [event for event in await store.events(job) if event["event"] == "trainer_lost"]
    assert (event["worker"], event["why"]) == ("trainer-1", "it stopped beating")
    assert event["group"] == "trainer-0, trainer-1"
    await workers.start("trainer-1", max_ranks=1)
    await until(lambda: started(store, job, epoch=2))
    assert len(await shares(workers, "trainer-1")) == 2


async def test_it_continues_with_fewer_ranks_when_the_others_stay_away(
    store: Store, workers: Workers, reconciler: Reconciler
) -> None:
    job = await begun(store, workers, reconciler, resources__min_trainer_ranks=1)
    await workers["trainer-0"].die()  # the one that led
    await until(lambda: started(store, job, epoch=2))
    lost, again = [e for e in await store.events(job) if e["event"] in ("trainer_lost", "trainer_restarted")]
    assert lost["worker"] == "trainer-0" and again["ranks"] == 1
    assert again["time"] - (await store.job(job)).lost_at >= 0.5, "it waits for the others first"
    assert await shares(workers, "trainer-1") == [("trainer-1", 1)]


async def test_a_member_that_is_told_to_stop_lets_the_lead_save(
    store: Store, workers: Workers, reconciler: Reconciler
) -> None:
    job = await begun(store, workers, reconciler)
    workers["trainer-1"].drains = True

    async def free() -> bool:
        return [await workers.holds(id) for id in (*TRAINERS, "rollout-0")] == [None] * 3

    await until(free)
    assert (await store.job(job)).state == JobState.QUEUED
    assert "requeued" in await kinds(store, job) and "trainer_lost" not in await kinds(store, job)
