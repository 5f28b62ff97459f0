"""Who holds a job and is silent or loads, as `opentinker why` finds it in leases, heartbeats and the timeline."""

from __future__ import annotations

import json
import time
from typing import Any

from opentinker.client import AsyncClient
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import read_stored
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.telemetry import Segment, TimelinePart
from opentinker.shared.types.trainer_group import RankShare
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import until
from tests.support.scheduling import new_job
from tests.unit.shared.spec.signalling_job import BASE, refused


class HeldJob:
    """A job that has begun, whose workers are heartbeats and reports of the test."""

    def __init__(self, ctx: Context, store: Store, job: str) -> None:
        self.ctx, self.store, self.job = ctx, store, job

    @classmethod
    async def begun(cls, ctx: Context, store: Store, state: JobState) -> HeldJob:
        """One that began hours ago."""
        job = await new_job(store, state=state)
        await store.redis.hset(f"job:{job}", "since", time.time() - 20_000)
        return cls(ctx, store, job)

    async def hold(self, name: str, pool: Pool, status: str = "ready", group: tuple[RankShare, ...] = ()) -> None:
        info = WorkerInfo(id=name, incarnation="i", pool=pool, host="h", pid=1, job=self.job, epoch=1, status=status)
        await self.store.beat(info, 60)
        lease = Lease(job=self.job, worker=name, incarnation="i", epoch=1, pool=pool, group=group)
        await self.store.grant(lease)

    async def report(self, worker: str, lane: str, kind: str, start: float, end: float) -> None:
        """Activity between these times, in seconds before now."""
        now = time.time()
        segments = [Segment(lane=lane, kind=kind, start=now - start, end=now - end)]
        part = TimelinePart(job=self.job, worker=worker, incarnation="i", seq=0, segments=segments)
        await self.ctx.bus.emit(TIMELINE, part, job=self.job, worker=worker)


async def test_members_of_a_trainer_group_are_not_silent_and_hung_workers_have_their_age(
    client: AsyncClient, ctx: Context, store: Store
) -> None:
    held = await HeldJob.begun(ctx, store, JobState.RUNNING)
    group = (RankShare("trainer-0", "i", 1), RankShare("trainer-1", "i", 1))
    for name in ("trainer-0", "trainer-1"):
        await held.hold(name, Pool.TRAINER, group=group)
    for name in ("rollout-0", "rollout-1"):
        await held.hold(name, Pool.ROLLOUT)
    await held.report("rollout-1", "generation", "rollout", 9010.0, 9000.0)
    await held.report("rollout-0", "generation", "rollout", 30.0, 2.0)
    await held.report("trainer-0", "training", "wait", 30.0, 2.0)

    async def answer() -> Any:
        return await client.why(held.job, last_s=20)

    found = await until(
        answer, lambda one: any("silent while" in said["what"] for said in one["findings"]), timeout_s=10
    )
    silent = {one["worker"]: one["seconds"] for one in found["silent"]}
    assert silent.keys() == {"trainer-0", "rollout-0", "rollout-1"}
    assert silent["trainer-0"] < 10 and 8990 < silent["rollout-1"] < 9100
    (said,) = [one["what"] for one in found["findings"] if "silent" in one["what"]]
    assert said.startswith("silent while others work: rollout-1 for ") and "rollout-0" not in said


async def test_workers_that_load_are_named_with_their_time(client: AsyncClient, ctx: Context, store: Store) -> None:
    held = await HeldJob.begun(ctx, store, JobState.STARTING)
    await held.hold("rollout-0", Pool.ROLLOUT, status="loading")
    for second in range(20, 2, -1):
        await held.report("rollout-0", "loading", "loading", second, second - 1)

    async def answer() -> Any:
        return await client.why(held.job, last_s=15)

    found = await until(answer, lambda one: any("loading" in said["what"] for said in one["findings"]), timeout_s=10)
    assert found["silent"] == []
    (said,) = [one for one in found["findings"] if "loading" in one["what"]]
    assert "rollout-0 for 1" in said["what"] and "opentinker logs JOB -f" in said["advice"]


async def test_a_worker_without_episodes_says_what_it_waits_for(
    client: AsyncClient, ctx: Context, store: Store
) -> None:
    held = await HeldJob.begun(ctx, store, JobState.RUNNING)
    await held.hold("trainer-0", Pool.TRAINER)
    for name in ("rollout-0", "rollout-1"):
        await held.hold(name, Pool.ROLLOUT)
    await held.report("trainer-0", "training", "wait", 40.0, -30.0)
    await held.report("rollout-0", "env", "rollout", 40.0, -30.0)
    await held.report("rollout-1", "generation", "tickets", 35.0, -30.0)  # it still waits when that is read

    async def answer() -> Any:
        return await client.why(held.job, last_s=30)

    found = await until(answer, lambda one: len(one["waits"]) == 2, timeout_s=10)
    assert [(one["worker"], one["what"]) for one in found["waits"]] == [
        ("trainer-0", "groups, other policies or an evaluation"), ("rollout-1", "tickets"),
    ]  # fmt: skip
    assert all(30 < one["seconds"] < 600 for one in found["waits"])
    said = [one["what"] for one in found["findings"]]
    assert any("the last episodes are played by rollout-0" in one for one in said)
    assert not any("silent" in one for one in said)


async def told_of(held: HeldJob, client: AsyncClient, spec: dict[str, Any]) -> list[str]:
    """What is found where this is the stored spec and a trainer does nothing."""
    await held.hold("trainer-0", Pool.TRAINER)
    await held.store.redis.hset(f"job:{held.job}", "spec", json.dumps(spec))
    return [one["what"] for one in (await client.why(held.job))["findings"]]


async def test_a_spec_of_another_release_is_said(client: AsyncClient, ctx: Context, store: Store) -> None:
    held = await HeldJob.begun(ctx, store, JobState.RUNNING)
    told = await told_of(held, client, (await store.job(held.job)).spec | {"from_another_release": 1})
    assert any("not valid here" in one for one in told)
    assert any("silent: trainer-0" in one for one in told), "what needs no spec is said all the same"


async def test_a_spec_that_would_be_refused_now_hides_nothing(client: AsyncClient, ctx: Context, store: Store) -> None:
    held = await HeldJob.begun(ctx, store, JobState.RUNNING)
    kept = {"keep_best": 1, "best_metric": "val/winrate/speaker/random"}
    against = {"every": 5, "episodes": 4, "against": [{"bot": "random"}]}
    assert refused(artifacts=kept, validation=against).keys() == {"artifacts.best_metric"}
    stored = read_stored({**BASE, "artifacts": kept, "validation": against})
    told = await told_of(held, client, stored.model_dump(mode="json"))
    assert any("silent: trainer-0" in one for one in told) and not any("not valid" in one for one in told)
