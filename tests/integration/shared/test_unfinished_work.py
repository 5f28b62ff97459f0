"""A worker that loses its lease while its work cannot be interrupted: it waits, or begins as a new process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest

from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import RestartNeeded
from opentinker.shared.types.trainer_group import RankShare
from tests.conftest import soon, until
from tests.integration.shared.lease_bench import Bench, at_the_bench


class Anew(Exception):
    """In the place of a process that begins anew."""


@asynccontextmanager
async def held(
    bus: Bus, store: Store, pool: Pool, status: str, drain_s: float = 20.0, **timing: Any
) -> AsyncIterator[tuple[Bench, asyncio.Event]]:
    """A worker that has said `status` of job a and lets go of it when the event is set, whatever else happens."""
    let_go = asyncio.Event()

    async def begin_anew(left: Sequence[str]) -> NoReturn:
        let_go.set()
        raise Anew(*left)

    async with at_the_bench(bus, store, pool, timing, heartbeat_s=0.05, cancel_grace_s=0.05, drain_s=drain_s) as bench:
        bench.ctx.begin_anew = begin_anew

        async def save(lease: Lease) -> None:
            bench.worker.leftovers.append("what was half written")
            await bench.worker.status(status, job=lease.job, epoch=lease.epoch)
            await finish_uncancelled(let_go.wait())

        bench.behaviour = save
        await bench.grant("a", 1)
        await bench.status(status)
        yield bench, let_go


async def test_trainer_saves_for_a_paused_job_however_long_that_takes(bus: Bus, store: Store) -> None:
    async with held(bus, store, Pool.TRAINER, "ready") as (bench, let_go):
        await store.transition("a", JobState.PAUSED)
        await bench.revoke()
        await asyncio.sleep(20 * bench.ctx.settings.cancel_grace_s)
        assert not bench.serving.done() and bench.log == [("began", "a", 1)]
        let_go.set()
        await bench.seen(("began", "a", 1), ("left", "a", 1))
        await bench.status("idle")


async def test_the_lead_of_a_group_that_is_told_to_stop_saves_however_long_that_takes(bus: Bus, store: Store) -> None:
    async with held(bus, store, Pool.TRAINER, "ready", drain_s=0.05) as (bench, let_go):
        group = (RankShare("w-0", bench.worker.info.incarnation, 1), RankShare("w-1", "i", 1))
        let_go.set()
        await bench.seen(("began", "a", 1), ("left", "a", 1))
        let_go.clear()
        await bench.grant("a", 2, group=group)
        await bench.seen(("began", "a", 1), ("left", "a", 1), ("began", "a", 2))
        await bench.status("ready")
        bench.ctx.stopping.set()
        await asyncio.sleep(20 * bench.ctx.settings.cancel_grace_s)
        assert not bench.serving.done() and bench.log[-1] == ("began", "a", 2)
        let_go.set()
        await soon(bench.serving)
        assert bench.log[-1] == ("left", "a", 2)


@pytest.mark.parametrize("states", [[JobState.CANCELLED], [JobState.PAUSED, JobState.CANCELLED]])
@pytest.mark.parametrize("pool", [Pool.TRAINER, Pool.ROLLOUT])
async def test_cancelled_work_is_given_up(bus: Bus, store: Store, pool: Pool, states: list[JobState]) -> None:
    async with held(bus, store, pool, "ready") as (bench, _):
        for state in states:
            await store.transition("a", state)
            await bench.revoke()
        with pytest.raises(Anew, match="what was half written"):
            await soon(bench.serving)
        assert await store.workers() == [], "nobody counts on it until it beats again"


async def test_load_for_a_job_that_lost_its_lease_is_given_up(bus: Bus, store: Store) -> None:
    async with held(bus, store, Pool.TRAINER, "loading") as (bench, _):
        await bench.revoke()
        with pytest.raises(Anew):
            await soon(bench.serving)


@pytest.mark.parametrize(
    ("pool", "state"),
    [(Pool.ROLLOUT, state) for state in (JobState.SUCCEEDED, JobState.FAILED, JobState.PAUSED, JobState.QUEUED)]
    + [(Pool.TRAINER, JobState.SUCCEEDED), (Pool.TRAINER, JobState.FAILED)],
)
async def test_who_does_not_let_go_of_what_nobody_wants_begins_anew(
    bus: Bus, store: Store, pool: Pool, state: JobState
) -> None:
    """An engine that hangs when it is closed, a save that never ends."""
    async with held(bus, store, pool, "ready", close_s=0.05, release_timeout_s=0.05) as (bench, _):
        if state == JobState.SUCCEEDED:
            await store.transition("a", JobState.RUNNING)
        await store.transition("a", state)
        await bench.revoke()
        with pytest.raises(Anew):
            await soon(bench.serving)
        assert await store.workers() == []


@pytest.mark.parametrize(("pool", "state"), [(Pool.ROLLOUT, JobState.PAUSED), (Pool.TRAINER, JobState.FAILED)])
async def test_who_lets_go_in_time_goes_on(bus: Bus, store: Store, pool: Pool, state: JobState) -> None:
    """Well after `cancel_grace_s`."""
    async with held(bus, store, pool, "ready") as (bench, let_go):
        await store.transition("a", state)
        await bench.revoke()
        await asyncio.sleep(4 * bench.ctx.settings.cancel_grace_s)
        let_go.set()
        await bench.seen(("began", "a", 1), ("left", "a", 1))
        await bench.status("idle")


async def test_a_worker_of_a_shared_process_waits_for_cancelled_work_instead_of_ending_that_of_others(
    bus: Bus, store: Store
) -> None:
    async with held(bus, store, Pool.TRAINER, "ready", bank="trainer-0") as (bench, let_go):
        await store.transition("a", JobState.CANCELLED)
        await bench.revoke()
        await asyncio.sleep(20 * bench.ctx.settings.cancel_grace_s)
        assert not bench.serving.done() and bench.log == [("began", "a", 1)]
        let_go.set()
        await bench.status("idle")


@pytest.mark.parametrize("error", [RestartNeeded("it goes back to step 3"), RuntimeError("a bug of this job")])
async def test_a_job_that_must_start_again_finds_a_new_worker_in_a_shared_process(
    bus: Bus, store: Store, error: Exception
) -> None:
    settings = {"heartbeat_s": 0.05, "drain_s": 0.05}
    async with at_the_bench(bus, store, Pool.TRAINER, {"bank": "trainer-0"}, **settings) as bench:

        async def goes_back(lease: Lease) -> None:
            raise error

        bench.behaviour, before = goes_back, bench.worker.info.incarnation
        await bench.grant("a", 1)
        (worker,) = await until(store.workers, lambda found: [w.incarnation for w in found] != [before] and found)
        assert (worker.bank, worker.job) == ("trainer-0", None)
        await bench.status("idle")
        bench.behaviour = bench.forever
        await bench.grant("b", 1)
        await bench.seen(("began", "a", 1), ("left", "a", 1), ("began", "b", 1))
