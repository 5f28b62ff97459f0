"""Thousands of jobs wait: what has not changed is not read again, and what takes long does not stop the server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from opentinker.services.scheduler.placement import planner
from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.services.scheduler.placement.types import ClusterView, PlacementPlan
from opentinker.shared.state.active_jobs import PORTION, ActiveJobs
from opentinker.shared.state.list_rows import ListRows
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord, JobState
from tests.conftest import Server
from tests.support.scheduling import context, new_job

JOBS = 2 * PORTION + 5


class Reading:
    """The active jobs of a store, and the ids of those whose records were read."""

    def __init__(self, store: Store) -> None:
        self.store, self.ids = store, list[str]()
        self.jobs = ActiveJobs(store.redis, self._read)

    async def _read(self, ids: Sequence[str]) -> list[JobRecord]:
        self.ids += ids
        return await self.store.jobs(ids)


@pytest.fixture
def reading(store: Store) -> Reading:
    return Reading(store)


async def test_only_changed_jobs_are_read_again(store: Store, reading: Reading) -> None:
    ids = [await new_job(store, f"j-{number:04}") for number in range(JOBS)]
    assert [job.id for job in await reading.jobs.all()] == ids == sorted(reading.ids)
    reading.ids.clear()
    await store.transition(ids[3], JobState.STARTING, epoch=1)
    await store.update(ids[5], waiting_for="a trainer")
    await ListRows(store.redis).label(ids[7], {"name": "renamed"}, add=["new"], remove=[])
    await store.transition(ids[9], JobState.CANCELLED)
    late = await new_job(store, "j-late")
    jobs = {job.id: job for job in await reading.jobs.all()}
    assert sorted(reading.ids) == [*ids[3:9:2], late] and jobs.keys() == {*ids, late} - {ids[9]}
    assert jobs[ids[3]].state == JobState.STARTING and jobs[ids[5]].waiting_for == "a trainer"
    assert (jobs[ids[7]].spec["name"], jobs[ids[7]].tags) == ("renamed", ["new"])
    assert list(jobs.values()) == sorted(await store.jobs(list(jobs)), key=lambda job: job.created)


async def test_jobs_that_have_begun_are_read_without_the_queue(store: Store, reading: Reading) -> None:
    ids = [await new_job(store, f"j-{number:04}") for number in range(JOBS)]
    for id in (ids[8], ids[2]):
        await store.transition(id, JobState.STARTING, epoch=1)
    await store.transition(ids[8], JobState.RUNNING)
    assert [job.id for job in await reading.jobs.held()] == [ids[2], ids[8]] == sorted(reading.ids)
    await store.transition(ids[2], JobState.QUEUED)
    assert [job.id for job in await reading.jobs.held()] == [ids[8]]


async def test_a_round_plans_beside_the_requests(
    nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_before, where = planner.plan, []

    def plan(view: ClusterView) -> PlacementPlan:
        where.append(threading.current_thread())
        return as_before(view)

    monkeypatch.setattr(planner, "plan", plan)
    await new_job(store, "j-a")
    async with context(nats_server, valkey_server, "scheduler-0", tmp_path) as ctx:
        await Reconciler(ctx).reconcile()
    assert len(where) == 1 and where[0] is not threading.main_thread()
    assert (await store.job("j-a")).waiting_for.startswith("trainer, rollout worker")
