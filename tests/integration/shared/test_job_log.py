"""A job's log and the leases that go with its states, over a real Valkey."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import Conflict, Fenced
from tests.conftest import until
from tests.integration.shared.test_store import create


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    state: JobState
    version: int
    epoch: int = 0
    reason: str = ""
    finished: float = 0.0


def replay(events: Iterable[Mapping[str, Any]]) -> Replayed:
    """What the log says of the state, from its first event on. Raises Conflict if one is missing."""
    now: Replayed | None = None
    for event in events:
        before = -1 if now is None else now.version
        if event["version"] != before + 1:
            raise Conflict(f"the log goes from version {before} to {event['version']}")
        last = now or Replayed(state=JobState.QUEUED, version=0)
        now = Replayed(
            state=JobState(event["state"]),
            version=event["version"],
            epoch=max(last.epoch, event.get("epoch", 0)),
            reason=event.get("reason", last.reason),
            finished=event.get("finished", last.finished),
        )
    if now is None:
        raise Conflict("the log is empty")
    return now


# --- the log ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_log_that_is_replayed_gives_the_state(store: Store, seed: int) -> None:
    """Whatever was tried, allowed or not, in whatever order."""
    chance = random.Random(seed)
    id = await create(store, f"j-replay{seed}")
    for number in range(60):
        new = chance.choice([state for state in JobState if not state.final])
        allowed = chance.sample(list(JobState), 3)
        with contextlib.suppress(Conflict, Fenced):
            epoch = chance.choice([-1, number // 10, number // 5])
            await store.transition(id, new, allowed=allowed, epoch=epoch, reason=f"r{number}")
        with contextlib.suppress(Conflict, Fenced):
            await store.update(id, event="noise", step=number)
    await store.transition(id, JobState.CANCELLED, reason="the end")
    record, told = await store.job(id), replay(await store.states(id))
    assert (told.state, told.version, told.epoch, told.reason, told.finished) == (
        record.state,
        record.version,
        record.epoch,
        record.reason,
        record.finished,
    )


async def test_changes_of_the_state_stay_in_a_log_that_was_cut(store: Store) -> None:
    id = await create(store, "j-cut")
    await store.transition(id, JobState.STARTING, epoch=1)
    await store.redis.xtrim(f"job:{id}:events", maxlen=0, approximate=False)
    await store.update(id, event="checkpoint", detail={"step": 1})
    await store.transition(id, JobState.PAUSED)
    events = await store.events(id)
    assert [event["event"] for event in events] == ["queued", "starting", "checkpoint", "paused"]
    assert await store.events(id, after=events[1]["id"]) == events[2:]
    assert replay(await store.states(id)).state == JobState.PAUSED
    with pytest.raises(Conflict, match="from version -1 to 1"):
        replay((await store.states(id))[1:])


async def test_job_and_its_workers_are_granted_in_one_act_or_not_at_all(store: Store) -> None:
    id = await create(store, "j-ranks")
    leases = [Lease(job=id, worker=name, pool=Pool.ROLLOUT, incarnation="1", epoch=1) for name in ("w-1", "w-2")]
    await store.grant(Lease(job="other", worker="w-2", pool=Pool.ROLLOUT, incarnation="1", epoch=1), tenant="t")
    with pytest.raises(Conflict, match="another job holds one of w-2"):
        await store.transition(id, JobState.STARTING, epoch=1, leases=leases)
    assert (await store.job(id)).state == JobState.QUEUED
    assert [lease.worker for lease in await store.leases()] == ["w-2"]
    await store.revoke("w-2")
    await store.transition(id, JobState.STARTING, epoch=1, leases=leases)
    assert sorted(lease.worker for lease in await store.leases()) == ["w-1", "w-2"]


async def test_only_the_scheduler_that_leads_writes_leases(store: Store) -> None:
    id = await create(store, "j-led")
    first = await store.lead("s-1", "one", 60.0)
    assert first is not None
    assert await store.lead("s-2", "two", 60.0) is None
    assert await store.lead("s-1", "one", 60.0) == first, "it stays"
    await store.resign("one")
    second = await store.lead("s-2", "two", 60.0)
    assert second == first + 1
    lease = Lease(job=id, worker="w", pool=Pool.TRAINER, incarnation="1", epoch=1)
    for refused in (
        store.grant(lease, leader=first),
        store.revoke("w", leader=first),
        store.start_drain(lease, leader=first),
        store.transition(id, JobState.STARTING, epoch=1, leader=first, leases=[lease]),
        store.transition(id, JobState.FAILED, leader=first),
        store.update(id, leader=first, event="trainer_lost"),
        store.update(id, leader=first, event="exam_failed", failure=True),
        store.require_leadership(first),
    ):
        with pytest.raises(Fenced, match="another scheduler leads"):
            await refused
    assert await store.leases() == [] and (await store.job(id)).state == JobState.QUEUED
    await store.require_leadership(second)
    await store.update(id, leader=second, event="exam_failed", failure=True, detail={"episode": 3})
    assert [failure["episode"] for failure in await store.failures(id, 10)] == [3]
    await store.transition(id, JobState.STARTING, epoch=1, leader=second, leases=[lease])
    assert await store.leases() == [lease]
    assert await store.lead("s-2", "three", 60.0) == second + 1, "its own next process need not wait"


async def test_what_leases_hold_is_counted_by_day_and_job(store: Store) -> None:
    lease = Lease(job="j-paid", worker="w-paid", pool=Pool.ROLLOUT, incarnation="1", epoch=1)
    await store.grant(lease, tenant="payer", gpus=2)
    await until(lambda: _charged(store))
    await store.grant(msgspec.structs.replace(lease, epoch=2), tenant="payer", gpus=2)
    await store.revoke("w-paid")
    usage = UsageStore(store.redis)
    spent = (await usage.today(["payer", "nobody"]))["payer"]
    assert [spent] == await usage.of_jobs(["j-paid"])
    assert spent["gpu_s"] == pytest.approx(2 * spent["worker_s"], abs=1e-5)
    await store.charge()
    assert (await usage.today(["payer"]))["payer"] == spent, "after its end nothing is counted"


async def _charged(store: Store) -> bool:
    await store.charge()
    return (await UsageStore(store.redis).of_jobs(["j-paid"]))[0]["worker_s"] > 0.01
