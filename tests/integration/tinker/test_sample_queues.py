"""Queues of tenants that rollout workers draw samples from, over real servers, with a simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from opentinker.services.rollout_worker.engines.base import EngineLost
from opentinker.services.rollout_worker.tinker.tinker_job import SUSPECT_LOSSES
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.state.store import Store
from opentinker.shared.types.tinker import Answer, Failed
from tests.conftest import until
from tests.support.adapters import write_adapter
from tests.support.tinker.tinker_bench import Bench, Gated, OneByOne, bench_of


@pytest.fixture
async def bench(bus: Bus, store: Store) -> AsyncIterator[Bench]:
    async with bench_of(bus, store) as bench:
        yield bench


@pytest.mark.parametrize("count", [1, 8])
async def test_the_flood_of_one_tenant_does_not_delay_others(bench: Bench, count: int, tmp_path: Path) -> None:
    bench.settings["max_concurrent"] = 4
    engine, flood = OneByOne(), 240 // count
    loud, quiet = [str(write_adapter(tmp_path / name)) for name in "ab"]
    for number in range(flood):
        await bench.ask(f"flood{number}", [9], tenant="loud", count=count, directory=loud, version="1", rank=4)
    async with bench.serving(engine) as job:
        await until(lambda: engine.inside == 4)
        for number in range(3):
            request = await bench.ask(str(number), [8], directory=quiet, version="1", rank=4)
            await bench.sampled(request)
        assert engine.asked == 3, "none of the flood"
        many = await bench.ask("many", [8], directory=quiet, version="1", rank=4, count=3)
        await bench.sampled(many)
        assert engine.asked == 3 + 3, "none of the flood; one after another"
        for _ in range(flood * count):
            engine.permits.release()
        for number in range(flood):
            await bench.sampled(f"{bench.job}#flood{number}")
        await until(bench.waiting, lambda found: found == 0)
        await until(lambda: not (job.turns.begun or job.turns.drawn or job.turns._waiting))
    assert engine.asked == 3 + 3 + flood * count


async def test_a_full_worker_leaves_requests_to_another_that_has_places(bench: Bench) -> None:
    bench.settings["max_concurrent"] = 2
    full, free = Gated(is_open=False), OneByOne()
    await bench.ask("0", [9], tenant="quiet")
    async with bench.serving(free) as second:
        await until(lambda: free.inside == 1)
        requests = [await bench.ask(f"flood{number}", tenant="loud") for number in range(40)]
        for request in requests[:20]:  # all of them are drawn here: one place is free
            await bench.sampled(request)
        async with bench.serving(full) as first:
            await until(lambda: full.inside == 2)
            more = [await bench.ask(f"more{number}", tenant="loud") for number in range(40)]
            answered: set[str] = set()
            held = await until(
                lambda: _left(bench, [*requests, *more], answered), lambda found: len(found) == len(first.tasks)
            )
            assert 2 <= len(held) <= 3, "its places, and one request of a tenant at most"
            assert second.turns.begun == {"quiet": 1}
            full.gate.set()
            for request in held:
                await bench.sampled(request)
        free.permits.release()
        await until(bench.waiting, lambda found: found == 0)


async def _left(bench: Bench, requests: list[str], answered: set[str]) -> list[str]:
    answered |= await bench.answers.which_answered([one for one in requests if one not in answered])
    return [one for one in requests if one not in answered]


async def test_a_worker_holds_one_request_of_each_tenant_beyond_its_places(bench: Bench) -> None:
    bench.settings["max_concurrent"] = 2
    engine = Gated(is_open=False)
    for number in range(12):
        for tenant in ("a", "b", "c"):
            await bench.ask(f"{tenant}{number}", tenant=tenant)
    async with bench.serving(engine) as job:
        await until(lambda: set(job.turns.begun) == {"a", "b", "c"})
        for number in range(3):
            await bench.ask(f"d{number}", tenant="d")
        await until(lambda: "d" in job.turns.begun)
        assert job.turns.open <= 2 - 1 + 4
        await until(lambda: set(job.turns.drawn) == {"a", "b", "c", "d"})
        engine.gate.set()
        await until(bench.waiting, lambda found: found == 0)
    assert 4 <= engine.most <= 2 - 1 + 4


def _inside(engine: Gated) -> int:
    return engine.inside


async def test_requests_that_wait_are_no_suspects_of_workers_that_were_lost(bench: Bench) -> None:
    bench.settings["max_concurrent"] = 1
    requests = [await bench.ask(str(number), tenant="loud") for number in range(5)] + [await bench.ask("5")]
    for _ in range(SUSPECT_LOSSES):
        stuck = Gated(is_open=False)
        job = bench.work(stuck)
        life = asyncio.create_task(job.run())
        await until(partial(_inside, stuck), lambda found: found == 2)  # one of each tenant
        job.broken.set_exception(EngineLost("killed"))
        with pytest.raises(EngineLost):
            await life
    losses = [await bench.answers.losses(request) for request in requests]
    assert [lost.beside for lost in losses] == [SUSPECT_LOSSES, 0, 0, 0, 0, SUSPECT_LOSSES]
    async with bench.serving(Gated()):
        for request in requests:
            assert (await bench.sampled(request)).sequences


async def test_the_queue_of_a_tenant_that_was_idle_is_looked_at_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.services.rollout_worker.tinker.intake.IDLE_S", 0.1)
    async with bench.serving(Gated()) as job:
        for number in range(3):
            await bench.sampled(await bench.ask(str(number)))
            await until(lambda: not job.intake.loops)


async def test_a_request_that_was_given_up_waits_until_it_is_taken(bench: Bench) -> None:
    engine = Gated()
    request = await bench.ask("1")
    await bench.answers.answer(Answer(request=request, result=Failed(error="given up")), cancelled=True)
    waiting = f"tinker:waiting:{bench.job}:t"
    assert await bench.store.redis.zcard(waiting) == 1
    async with bench.serving(engine):
        await until(bench.waiting, lambda found: found == 0)
    assert await bench.store.redis.zcard(waiting) == engine.asked == 0
