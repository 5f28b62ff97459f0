"""Redis as the owner of job state, over a real Valkey, also one that is killed and comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import Conflict, Fenced, NotFound
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, start_valkey, until

SPEC: dict[str, Any] = {"name": "n", "kind": "rl", "model": {"base": "m"}, "train": {"steps": 3}}


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    server = start_valkey(tmp_path, appendfsync="always")
    yield server
    server.kill()


async def create(store: Store, id: str = "j", **more: Any) -> str:
    return await store.create_job(id=id, spec=SPEC, tenant="t", **more)


def replayed(events: list[dict[str, Any]]) -> str:
    """The state that the log tells."""
    return [str(event["state"]) for event in events if "state" in event][-1]


# --- jobs ---------------------------------------------------------------------------------------------------------


async def test_new_job_is_queued_and_listed(store: Store) -> None:
    await create(store, "a")
    await create(store, "b")
    record = await store.job("a")
    assert (record.state, record.epoch, record.version, record.steps) == (JobState.QUEUED, 0, 0, 3)
    assert record.spec == SPEC
    assert [job.id for job in await store.jobs_of("t", 10)] == ["b", "a"]
    assert [job.id for job in await store.active_jobs()] == ["a", "b"]
    with pytest.raises(NotFound):
        await store.job("c")


async def test_another_key_of_a_job_is_no_job(store: Store) -> None:
    """A directory that a submission names may be called anything."""
    await create(store)
    assert [job.id for job in await store.jobs(["j:events", "j", "j:failures~a", "j~", "j~a"])] == ["j", "j"]


async def test_jobs_of_a_tenant_come_page_by_page(store: Store) -> None:
    for number in range(5):
        await create(store, f"j{number}")
    await store.create_job(id="other", spec=SPEC, tenant="u")
    pages: list[list[str]] = [[]]
    while page := await store.jobs_of("t", 2, before=pages[-1][-1] if pages[-1] else ""):
        pages.append([job.id for job in page])
        if len(pages) == 2:
            await create(store, "new")  # what is made meanwhile moves nothing
    assert pages[1:] == [["j4", "j3"], ["j2", "j1"], ["j0"]]
    for unknown in ("other", "none"):
        with pytest.raises(NotFound):
            await store.jobs_of("t", 2, before=unknown)


async def test_equal_request_with_a_key_gives_the_first_job(store: Store) -> None:
    assert await create(store, "a", idempotency="k", body_hash="h") == "a"
    assert await create(store, "b", idempotency="k", body_hash="h") == "a"
    with pytest.raises(Conflict, match="job a"):
        await create(store, "c", idempotency="k", body_hash="other")
    assert [job.id for job in await store.jobs_of("t", 10)] == ["a"]
    with pytest.raises(ValueError, match="hash"):
        await create(store, "d", idempotency="k2")


async def test_creating_twice_changes_nothing(store: Store) -> None:
    """The client repeats a creation whose reply it lost, when the scheduler may have started the job already."""
    await create(store)
    await store.transition("j", JobState.STARTING)
    assert await create(store) == "j"
    assert (await store.job("j")).state == JobState.STARTING
    assert len(await store.events("j")) == 2


async def test_transition_checks_state_and_appends_the_event(store: Store) -> None:
    await create(store)
    assert await store.transition("j", JobState.STARTING, allowed=[JobState.QUEUED], epoch=1) == JobState.QUEUED
    with pytest.raises(Conflict, match="starting"):
        await store.transition("j", JobState.STARTING, allowed=[JobState.QUEUED], epoch=1)
    await store.transition("j", JobState.SUCCEEDED, epoch=1, step=3, reason="done", detail={"why": "x"})
    for late in (JobState.FAILED, JobState.RUNNING):
        with pytest.raises(Conflict, match="succeeded"):
            await store.transition("j", late)
    with pytest.raises(NotFound):
        await store.transition("none", JobState.FAILED)
    record = await store.job("j")
    assert (record.state, record.epoch, record.version, record.step, record.reason) == ("succeeded", 1, 2, 3, "done")
    assert record.finished >= record.created
    assert await store.active_jobs() == []
    assert await store.ending_jobs() == ["j"]
    events = await store.events("j")
    assert [event["event"] for event in events] == ["queued", "starting", "succeeded"]
    assert events[-1]["why"] == "x"
    assert replayed(events) == record.state


async def test_old_epoch_is_fenced_and_changes_nothing(store: Store) -> None:
    await create(store)
    await store.transition("j", JobState.RUNNING, epoch=3)
    before = await store.job("j"), await store.events("j")
    with pytest.raises(Fenced, match="epoch 3"):
        await store.transition("j", JobState.FAILED, epoch=2)
    with pytest.raises(Fenced):
        await store.update("j", epoch=2, step=9, event="step")
    assert (await store.job("j"), await store.events("j")) == before
    await store.update("j", epoch=3, step=9)
    await store.update("j", reason="anyone")
    assert (await store.job("j")).step == 9


@pytest.mark.parametrize("value", [None, {"a": 1}, float("nan"), [1]])
async def test_field_that_redis_cannot_hold_changes_nothing(store: Store, value: Any) -> None:
    await create(store)
    with pytest.raises(TypeError, match="reason"):
        await store.transition("j", JobState.FAILED, reason=value)
    assert (await store.job("j")).state == JobState.QUEUED


async def test_concurrent_transitions_have_one_winner(store: Store) -> None:
    await create(store)

    async def start(number: int) -> bool:
        try:
            await store.transition("j", JobState.STARTING, allowed=[JobState.QUEUED], reason=str(number))
        except Conflict:
            return False
        return True

    won = await asyncio.gather(*(start(i) for i in range(50)))
    assert sum(won) == 1
    assert (await store.job("j")).reason == str(won.index(True))
    assert len(await store.events("j")) == 2


async def test_a_lost_reply_repeats_no_change(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await create(store)
    for name in ("_transition", "_update"):
        once = getattr(store, name)

        async def twice(once: Any = once, **call: Any) -> Any:
            await once(**call)
            return await once(**call)

        monkeypatch.setattr(store, name, twice)
    assert await store.transition("j", JobState.STARTING, allowed=[JobState.QUEUED]) == JobState.QUEUED
    await store.update("j", event="note", step=1)
    assert [event["event"] for event in await store.events("j")] == ["queued", "starting", "note"]
    assert (await store.job("j")).version == 1


async def test_forgotten_scripts_are_loaded_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that starts anew again and again, because its disk is full."""
    evalsha = store.redis.evalsha

    async def after_a_restart(*args: Any) -> Any:
        await store.redis.script_flush()
        return await evalsha(*args)

    monkeypatch.setattr(store.redis, "evalsha", after_a_restart)
    await create(store)
    await store.update("j", step=1)
    await store.transition("j", JobState.STARTING, epoch=1)
    assert (await store.job("j")).step == 1
    admission = Admission(store.redis, "j", epoch=1)
    await admission.restore(step=0, max_staleness=0, groups_per_batch=1, total=1, discarded={})
    assert (await admission.issue(1))[1] == [0]


async def test_events_are_read_from_where_one_was(store: Store) -> None:
    await create(store)
    first = (await store.events("j"))[0]["id"]
    waiting = asyncio.create_task(store.events("j", after=first, block_ms=int(1000 * WAIT_S)))
    await until(lambda: store.redis.info("clients"), lambda found: found["blocked_clients"])
    await store.update("j", event="note", detail={"n": 1})
    assert [event["n"] for event in await waiting] == [1]
    assert (await store.latest_event("j", "note") or {})["n"] == 1
    assert await store.latest_event("j", "none") is None


# --- workers and leases -------------------------------------------------------------------------------------------


def worker(incarnation: str = "1") -> WorkerInfo:
    return WorkerInfo(id="w", incarnation=incarnation, pool=Pool.ROLLOUT, host="h", pid=1, detail={"a": 1})


async def test_worker_is_there_until_the_scheduler_that_leads_finds_it_silent(store: Store) -> None:
    """No clock of the Redis server takes it away."""
    await store.beat(worker(), ttl_s=0.2)
    assert await store.redis.pttl("worker:w") == -1, "nothing there expires"
    (first,) = await store.beats()
    assert (first.incarnation, first.ttl_s) == ("1", 0.2)
    await store.beat(worker(), ttl_s=0.2)
    (second,) = await store.beats()
    assert second.number > first.number
    assert not await store.remove_dead(first), "it has beaten since"
    assert await store.workers() == [worker()]
    leader = await store.lead("s-1", "one", 60.0)
    assert leader is not None
    with pytest.raises(Fenced):
        await store.remove_dead(second, leader=leader + 1)
    assert await store.lives("w", "1")
    assert await store.remove_dead(second, leader=leader)
    assert await store.workers() == [] and not await store.lives("w", "1")
    await store.beat(worker("2"), ttl_s=0.2)
    assert not await store.remove_dead(second), "another process by now"


async def test_looking_for_workers_and_leases_reads_no_other_key(store: Store) -> None:
    """Both are looked at about twice a second by every process, among as many keys as there are jobs and operations."""
    await store.beat(worker(), 60)
    await store.grant(Lease(job="j", worker="w", pool=Pool.ROLLOUT, incarnation="1", epoch=1))
    await store.redis.config_resetstat()
    assert len(await store.workers()) == len(await store.leases()) == 1
    calls = await store.redis.info("commandstats")
    assert not {"cmdstat_scan", "cmdstat_keys"} & calls.keys()


async def test_lost_worker_leaves_nothing_and_may_come_back(store: Store) -> None:
    await store.beat(worker(), ttl_s=60)
    await store.beat(msgspec.structs.replace(worker(), id="v"), ttl_s=60)
    assert await store.remove_dead((await store.beats())[1])
    assert [info.id for info in await store.workers()] == ["v"]
    assert await store.redis.smembers("workers") == {"v"}
    await store.beat(worker(), ttl_s=60)
    assert [info.id for info in await store.workers()] == ["v", "w"]


async def test_leaving_does_not_remove_the_next_process_of_the_slot(store: Store) -> None:
    await store.beat(worker("1"), 5)
    await store.beat(worker("2"), 5)
    await store.leave(worker("1"))
    assert await store.workers() == [worker("2")]
    await store.leave(worker("2"))
    assert await store.workers() == []


async def test_lease_is_granted_and_revoked(store: Store) -> None:
    lease = Lease(job="j", worker="w", pool=Pool.ROLLOUT, incarnation="1", epoch=2)
    assert await store.lease("w") is None
    await store.grant(lease)
    assert await store.lease("w") == lease
    assert await store.leases() == [lease]
    await store.revoke("w")
    assert await store.leases() == []


async def test_cancelled_calls_end_and_leave_no_reply_behind(store: Store) -> None:
    """At whatever moment a call is cancelled: its task ends, and no other call gets its reply."""
    for n in range(40):
        await store.redis.set(f"k{n}", n)
    dice = random.Random(3)

    async def read(n: int) -> None:
        while True:
            assert await store.redis.get(f"k{n}") == str(n)

    for _ in range(25):
        await store.redis.connection_pool.disconnect()
        tasks = [asyncio.create_task(read(n)) for n in range(40)]
        await asyncio.sleep(dice.uniform(0.0, 0.01))
        for task in tasks:
            task.cancel()
        ended, going_on = await asyncio.wait(tasks, timeout=WAIT_S)
        assert not going_on
        assert all(task.cancelled() for task in ended)


# --- a server that goes away --------------------------------------------------------------------------------------


async def test_connect_waits_for_a_server_that_comes_later(own_server: Server) -> None:
    own_server.kill()

    async def later() -> None:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_server.start)

    back = asyncio.create_task(later())
    async with Store.connect(own_server.url, "test") as store:
        await create(store)
    await back


async def test_calls_in_flight_succeed_after_a_restart_and_nothing_acked_is_lost(own_server: Server) -> None:
    async with Store.connect(own_server.url, "test") as store:
        await create(store)
        await store.transition("j", JobState.RUNNING)
        trainer = Admission(store.redis, "j", 1)
        await trainer.restore(step=0, max_staleness=9, groups_per_batch=1000, total=10_000, discarded={})
        issued: list[int] = []
        accepted: list[int] = []
        steps = 0
        stop = asyncio.Event()

        async def roll() -> None:
            while not stop.is_set():
                _, seqs = await trainer.issue(2)
                issued.extend(seqs)
                for seq in seqs:
                    assert await trainer.accept(seq) == "ok"
                    accepted.append(seq)
                await asyncio.sleep(0.001)

        async def log_steps() -> None:
            nonlocal steps
            while not stop.is_set():
                await store.update("j", step=steps + 1, event="step", detail={"n": steps + 1})
                steps += 1
                await asyncio.sleep(0.001)

        tasks = [asyncio.create_task(roll()) for _ in range(4)] + [asyncio.create_task(log_steps())]
        for away_s in (0.0, 1.5):
            await until(lambda: len(accepted) > 50)
            own_server.kill()
            await asyncio.sleep(away_s)
            await asyncio.to_thread(own_server.start)
            before = len(accepted)
            await until(lambda before=before: len(accepted) > before + 20)  # type: ignore[misc]
        stop.set()
        await asyncio.gather(*tasks)
        ledger = await trainer.ledger()
        assert ledger.balanced and ledger.running == 0
        assert sorted(issued) == list(range(ledger.issued)), "a number was lost or given twice"
        assert ledger.accepted == len(accepted) == len(set(accepted))
        assert (await store.job("j")).step == steps
        noted = [event["n"] for event in await store.events("j") if event["event"] == "step"]
        assert noted == list(range(1, min(steps, 499) + 1))
