"""A worker follows its lease: taken, moved to another job, taken away, and what the job's ending does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import Fenced, JobFailed, OpenTinkerError
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, soon, until
from tests.integration.shared.lease_bench import Bench, at_the_bench
from tests.support.factories import make_spec, refusals
from tests.support.scheduling import messages


@pytest.fixture
async def bench(bus: Bus, store: Store) -> AsyncIterator[Bench]:
    async with at_the_bench(bus, store, drain_s=0.1) as bench:
        yield bench


async def test_lease_is_taken_and_left(bench: Bench) -> None:
    await bench.status("idle")
    await bench.begin()
    await bench.status("loading")
    await bench.revoke()
    await bench.seen(("began", "a", 1), ("left", "a", 1))
    await bench.status("idle")
    assert bench.worker.info.job is None


async def test_a_job_of_an_earlier_release_begins_with_names_that_are_refused_now(bench: Bench) -> None:
    plain = make_spec(policies={"p": {}}, seats={"*": "p"}).model_dump(mode="json")
    plain["train"]["target"] = {"p/reward/mean": 1.0}
    assert "train.target.p/reward/mean" in refusals(parse_spec, plain)
    await bench.ctx.store.create_job(id="c", spec=plain, tenant="t")
    await bench.ctx.store.transition("c", JobState.STARTING)
    await bench.begin("c")


async def test_the_time_until_it_is_ready_is_on_the_timeline(bench: Bench) -> None:
    parts = await messages(bench.ctx.bus, TIMELINE, job="a", worker="w-0")
    may_be_ready = asyncio.Event()

    async def load(lease: Lease) -> None:
        await may_be_ready.wait()
        await bench.worker.status("ready", job=lease.job, epoch=lease.epoch)
        await bench.forever(lease)

    bench.behaviour = load
    began = time.time()
    await bench.begin()
    await until(lambda: parts)  # while it loads
    may_be_ready.set()
    await bench.status("ready")
    ready = time.time()
    await until(lambda: len(parts) > 1 and parts[-1].segments[-1].end)
    await bench.revoke()
    await bench.status("idle")
    segments = [segment for part in parts for segment in part.segments]
    assert {(one.lane, one.kind) for one in segments} == {("loading", "loading")}
    assert began <= segments[0].start and segments[-1].end <= ready


async def test_an_unused_worker_says_so_and_ends(bus: Bus, store: Store) -> None:
    async with at_the_bench(bus, store, timing={"grant_s": 0.05}, heartbeat_s=0.05, idle_exit_s=0.2) as bench:
        await bench.begin()
        await bench.revoke()
        await bench.seen(("began", "a", 1), ("left", "a", 1))
        await soon(bench.ctx.stopping.wait())


async def test_a_late_lease_is_served(bus: Bus, store: Store) -> None:
    settings: dict[str, Any] = {"heartbeat_s": 0.05, "idle_exit_s": 0.05, "drain_s": 0.1}
    async with at_the_bench(bus, store, timing={"grant_s": WAIT_S}, **settings) as bench:
        await bench.status("draining")
        await bench.begin()
        await bench.status("loading")
        assert not bench.ctx.stopping.is_set()


async def test_lease_that_is_taken_back_ends_when_its_work_has_ended(bench: Bench) -> None:
    done = asyncio.Event()

    async def until_taken_back(_: Lease) -> None:
        await bench.worker.ended()
        await done.wait()

    bench.behaviour = until_taken_back
    await bench.begin()
    assert not bench.worker.ending
    lease = await bench.ctx.store.lease(bench.ctx.worker)
    assert lease is not None
    await bench.ctx.store.start_drain(msgspec.structs.replace(lease, leaves_by=time.time() + 600))
    await bench.wake()
    await until(lambda: bench.worker.ending)
    assert bench.log == [("began", "a", 1)], "it may end what it has begun"
    done.set()
    await bench.seen(("began", "a", 1), ("left", "a", 1))
    await bench.status("idle")
    await bench.revoke()
    await bench.grant("b", 1)
    await bench.seen(("began", "a", 1), ("left", "a", 1), ("began", "b", 1))
    assert not bench.worker.ending


async def test_lease_that_is_taken_back_before_it_is_seen_is_not_begun(bench: Bench) -> None:
    await bench.ctx.store.grant(bench.lease("a", leaves_by=9e9))
    await bench.wake()
    await bench.grant("b", 1)
    await bench.seen(("began", "b", 1))


async def test_new_epoch_ends_the_old_life_first(bench: Bench) -> None:
    await bench.begin()
    await bench.grant("a", 2)
    await bench.seen(("began", "a", 1), ("left", "a", 1), ("began", "a", 2))
    await bench.grant("b", 1)
    await bench.seen(
        ("began", "a", 1), ("left", "a", 1), ("began", "a", 2), ("left", "a", 2), ("began", "b", 1)
    )  # fmt: skip


async def test_lease_is_found_without_a_wake(bus: Bus, store: Store) -> None:
    async with at_the_bench(bus, store, heartbeat_s=0.05) as bench:
        await store.grant(bench.lease("a"))
        await bench.seen(("began", "a", 1))
        await store.revoke("w-0")
        await bench.seen(("began", "a", 1), ("left", "a", 1))


async def test_lease_of_an_earlier_process_is_ignored(bus: Bus, store: Store) -> None:
    async with at_the_bench(bus, store, heartbeat_s=0.02) as bench:
        await bench.grant("a", 1, incarnation="earlier")
        await bench.grant("b", 1)
        await bench.seen(("began", "b", 1))
        await bench.grant("b", 2, incarnation="earlier")
        await bench.seen(("began", "b", 1), ("left", "b", 1))


async def out_of_memory(lease: Lease) -> None:
    raise JobFailed("not enough memory")


async def test_job_that_cannot_go_on_fails_with_its_reason(bench: Bench) -> None:
    bench.behaviour = out_of_memory
    await bench.works_in_vain()
    record = await bench.ctx.store.job("a")
    assert (record.state, record.reason) == (JobState.FAILED, "rollout: not enough memory")
    bench.behaviour = bench.forever
    await bench.grant("b", 1)
    await bench.seen(("began", "a", 1), ("left", "a", 1), ("began", "b", 1))


async def test_failure_of_a_job_that_has_ended_is_no_failure_of_the_worker(bench: Bench) -> None:
    async def fail(lease: Lease) -> None:
        await bench.ctx.store.transition("a", JobState.CANCELLED, step=3)
        raise JobFailed("too late")

    bench.behaviour = fail
    await bench.works_in_vain()
    assert (await bench.ctx.store.job("a")).state == JobState.CANCELLED


async def test_worker_that_cannot_load_a_job_that_another_serves_ends_alone(bench: Bench) -> None:
    bench.behaviour = out_of_memory
    await bench.ctx.store.transition("a", JobState.RUNNING)
    other = WorkerInfo(id="w-1", incarnation="i", pool=Pool.ROLLOUT, host="h", pid=1, job="a", status="ready")
    await bench.ctx.store.beat(other, 30.0)
    await bench.grant("a", 1)
    with pytest.raises(OpenTinkerError, match="which others serve: not enough memory"):
        await bench.serving
    assert (await bench.ctx.store.job("a")).state == JobState.RUNNING


@pytest.mark.parametrize("has_served", [False, True])
async def test_a_worker_fails_a_running_job_that_no_other_serves(bench: Bench, has_served: bool) -> None:
    """Or it would be loaded again without end."""

    async def fail(lease: Lease) -> None:
        if has_served:
            await bench.worker.status("ready", job=lease.job, epoch=lease.epoch)
        raise JobFailed("a group does not fit into a message")

    bench.behaviour = fail
    await bench.ctx.store.transition("a", JobState.RUNNING)
    await bench.works_in_vain()
    assert (await bench.ctx.store.job("a")).state == JobState.FAILED


@pytest.mark.parametrize(("pool", "then"), [(Pool.TRAINER, JobState.RUNNING), (Pool.ROLLOUT, JobState.FAILED)])
async def test_failure_of_an_old_epoch(bus: Bus, store: Store, pool: Pool, then: JobState) -> None:
    """A trainer of the past fails nothing; a rollout lease outlives trainers, so its failure counts."""
    async with at_the_bench(bus, store, pool) as bench:

        async def fail(lease: Lease) -> None:
            await store.transition("a", JobState.RUNNING, epoch=9)
            await bench.worker.status("ready", job="a", epoch=1)
            raise JobFailed("of the past")

        bench.behaviour = fail
        await bench.works_in_vain()
        assert (await store.job("a")).state == then


async def test_fenced_work_ends_quietly(bench: Bench) -> None:
    async def fenced(lease: Lease) -> None:
        raise Fenced("epoch 2 owns the job")

    bench.behaviour = fenced
    await bench.works_in_vain()
    assert not bench.serving.done()


async def test_lease_for_a_job_that_is_gone_is_left_alone(bench: Bench) -> None:
    await bench.grant("none", 1)
    await bench.begin()


async def test_spec_of_another_release_fails_the_job(bench: Bench) -> None:
    spec: dict[str, Any] = {**make_spec().model_dump(mode="json"), "gone": 1}
    await bench.ctx.store.create_job(id="old", spec=spec, tenant="t")
    await bench.grant("old", 1)
    await until(lambda: bench.ctx.store.job("old"), lambda found: "gone" in found.reason)
    await bench.status("idle")


async def test_anything_else_ends_the_service(bench: Bench) -> None:
    async def crash(lease: Lease) -> None:
        raise RuntimeError("planted failure")

    bench.behaviour = crash
    await bench.grant("a", 1)
    with pytest.raises(RuntimeError, match="planted failure"):
        await bench.serving
    assert await bench.ctx.store.workers() == []


async def test_failure_while_the_lease_is_left_ends_the_service(bench: Bench) -> None:
    async def crash(lease: Lease) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("could not let go")

    bench.behaviour = crash
    await bench.begin()
    await bench.revoke()
    with pytest.raises(RuntimeError, match="could not let go"):
        await bench.serving


@pytest.mark.parametrize("idle", [False, True])
async def test_stopping_lets_the_job_finish(bus: Bus, store: Store, idle: bool) -> None:
    async with at_the_bench(bus, store, drain_s=2 * WAIT_S, heartbeat_s=2 * WAIT_S, worker_ttl_s=4 * WAIT_S) as bench:
        finished = asyncio.Event()

        async def finish(lease: Lease) -> None:
            if not idle:
                await bench.ctx.stopping.wait()
                await bench.status("draining")
            finished.set()

        bench.behaviour = finish
        await bench.grant("a", 1)
        if idle:  # the job has ended, its lease is still there
            await soon(finished.wait())
            await bench.status("idle")
        else:
            await bench.seen(("began", "a", 1))
        bench.ctx.stopping.set()
        await soon(bench.serving)
        assert finished.is_set()
    assert await store.workers() == []


async def test_stopping_cuts_a_job_that_does_not_finish(bench: Bench) -> None:
    await bench.begin()
    bench.ctx.stopping.set()
    await soon(bench.serving)
    assert bench.log[-1] == ("left", "a", 1)
