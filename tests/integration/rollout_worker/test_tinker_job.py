"""A rollout worker that draws samples for the Tinker API, over real servers, with a simulated engine."""

from __future__ import annotations

import asyncio
import operator
import shutil
import time
from collections.abc import AsyncIterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from redis.exceptions import ResponseError

from opentinker.services.rollout_worker.engines.base import Completion, EngineLost
from opentinker.services.rollout_worker.tinker.adapter_cache import AdapterCache
from opentinker.services.rollout_worker.tinker.tinker_job import MAX_LOSSES_ALONE, SUSPECT_LOSSES, TinkerJob
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC, SAMPLE, Subject
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.billing import HOUR_S, TinkerSpent
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.telemetry import MetricPoint
from opentinker.shared.types.tinker import Answer, Sampled, SampleParams, SampleRequest
from tests.conftest import soon, until
from tests.support.adapters import write_adapter
from tests.support.tinker.tinker_bench import PROMPT, Bench, Gated, bench_of


@pytest.fixture
async def bench(bus: Bus, store: Store) -> AsyncIterator[Bench]:
    async with bench_of(bus, store) as bench:
        yield bench


class Slow(Gated):
    async def generate(self, request: str, prompt_ids: list[int], sampling: Any, *rest: Any) -> Completion:
        await asyncio.sleep(0.05)
        return await super().generate(request, prompt_ids, sampling, *rest)


def tokens(result: Sampled) -> list[list[int]]:
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in result.sequences]


async def test_samples_are_drawn_side_by_side_and_seeds_repeat_them(bench: Bench) -> None:
    engine = Gated()
    async with bench.serving(engine) as job:
        first = await bench.sampled(await bench.ask("1", count=6))
        again = await bench.sampled(await bench.ask("2", count=6))
        (third,) = tokens(await bench.sampled(await bench.ask("3", params=SampleParams(max_tokens=4, seed=3))))
        await until(bench.waiting, lambda found: found == 0)
        await until(lambda: len(bench.announced) == 3)
    assert tokens(first) == tokens(again) and len({*map(tuple, tokens(first))}) == 6 and engine.most == 6
    assert tokens(first)[2] == third, "seed 1, sample 2"
    drawn = sum(map(len, [*tokens(first), *tokens(again), third]))
    assert job.worker.spent["tokens_generated"] == drawn == job.meter.counts["serving/tokens"]
    hour = int(time.time()) // HOUR_S
    spent = await TinkerSpent(bench.store.redis).between("t", hour - 1, hour + 1)
    counted = {
        kind: sum(one.amount for one in spent if one.kind == kind) for kind in ("sampling_prefill", "sampling_sample")
    }
    assert counted == {"sampling_prefill": 3 * len(PROMPT), "sampling_sample": drawn}
    one = first.sequences[0]
    assert np.allclose(np.frombuffer(one.logprobs, "<f4"), -np.log(128)) and one.stop in ("stop", "length")


async def test_lines_about_requests_of_other_tenants_are_not_in_the_log_of_the_servers_job(
    bench: Bench, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = []

    def keep(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        lines.append(dict(line))
        raise structlog.DropEvent

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    try:
        with structlog.contextvars.bound_contextvars(job=bench.job):  # as a worker's lease does
            async with bench.serving(Gated()) as job:
                job.worker.tenant = "t"
                for tenant in ("t", "other"):
                    place = str(write_adapter(tmp_path / tenant))
                    await bench.sampled(
                        await bench.ask(f"{tenant}-0", tenant=tenant, directory=place, version=f"of-{tenant}", rank=4)
                    )
                    await bench.failed(await bench.ask(f"{tenant}-1", tenant=tenant, prompt=[10**6]))
    finally:
        structlog.configure(processors=before)
    found = [line for line in lines if line["event"] in ("adapter_loaded", "sample_failed")]
    assert [line["job"] for line in found] == [bench.job] * 2 + [None] * 2
    assert all(line["server"] == bench.job for line in found[2:])


async def test_adapters_are_loaded_on_demand_and_logprobs_of_prompts_are_told(bench: Bench, tmp_path: Path) -> None:
    engine = Gated()
    places = [str(write_adapter(tmp_path / name)) for name in "abc"]
    async with bench.serving(engine) as job:
        for number, place in enumerate([*places, "", places[0]]):
            request = await bench.ask(str(number), directory=place, version="1", rank=4, prompt_logprobs=True)
            prompt = np.frombuffer((await bench.sampled(request)).prompt_logprobs, "<f4")
            assert np.isnan(prompt[0]) and np.allclose(prompt[1:], -np.log(128)) and len(prompt) == len(PROMPT)
        assert isinstance(job.adapters, AdapterCache)
        assert len(job.adapters) == 2 and job.adapters.loads == 4, "the first one was evicted and came back"
    assert len(engine.adapters) == 4 and "" in engine.adapters


async def test_failures_name_their_cause_and_leave_the_job_serving(bench: Bench, tmp_path: Path) -> None:
    gone = write_adapter(tmp_path / "gone")
    shutil.rmtree(gone)
    spoiled = write_adapter(tmp_path / "spoiled", value=float("nan"))
    async with bench.serving(Gated()) as job:
        lost = await bench.failed(await bench.ask("1", directory=str(gone), version="1", follows=True))
        assert lost.lost and "were removed" in lost.error
        over = await bench.failed(await bench.ask("6", directory=str(gone), version="1"))
        assert (over.category, over.lost) == ("user", False) and "make a sampler from newer weights" in over.error
        refused = await bench.failed(await bench.ask("2", directory=str(spoiled), version="1"))
        assert (refused.category, refused.lost) == ("user", False) and "not finite" in refused.error
        long = await bench.failed(await bench.ask("3", [5] * 64))
        assert long.category == "user" and "the prompt has 64 tokens" in long.error
        foreign = await bench.failed(await bench.ask("4", [5, 128]))
        assert foreign.category == "user" and "not 128" in foreign.error
        unread = f"{bench.job}#unread"
        await bench.bus.publish(Subject(SAMPLE.pattern, dict), {"prompt": 3}, unread, job=bench.job, tenant="t")
        assert (await bench.failed(unread)).category == "server"
        assert (await bench.sampled(await bench.ask("5"))).sequences
        await until(bench.waiting, lambda found: found == 0)
        assert job.meter.counts["serving/refused"] == 6 and job.meter.counts["serving/answers"] == 1


async def test_an_answer_that_redis_does_not_take_fails_and_the_job_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = TinkerStore.answer

    async def limited(store: TinkerStore, answer: Answer) -> bool:
        if isinstance(answer.result, Sampled) and len(answer.result.sequences) > 2:
            raise ResponseError("Protocol error: invalid bulk length")
        return await keep(store, answer)

    monkeypatch.setattr(TinkerStore, "answer", limited)
    async with bench.serving(Gated()):
        failed = await bench.failed(await bench.ask("1", count=3))
        assert failed.category == "server" and "fewer samples" in failed.error
        assert (await bench.sampled(await bench.ask("2"))).sequences


async def test_no_more_samples_than_allowed_are_in_the_engine(bench: Bench) -> None:
    bench.settings["max_concurrent"] = 3
    engine = Gated(is_open=False)
    async with bench.serving(engine) as job:
        requests = [await bench.ask(str(number), count=2) for number in range(5)]
        await until(lambda: engine.inside == 3)
        assert job.turns.open == 4
        taken = await bench.bus.js.consumer_info("SAMPLES", f"sample-{bench.job}-t")
        assert taken.num_ack_pending == 2, "the others are left to other workers"
        engine.gate.set()
        for request in requests:
            assert len((await bench.sampled(request)).sequences) == 2
        one = await bench.sampled(await bench.ask("many", count=20))
        assert len(one.sequences) == 20
    assert engine.most == 3


async def test_requests_of_a_lost_engine_are_answered_by_the_next_worker(bench: Bench) -> None:
    bench.ack_wait_s = 0.5
    engine = Gated()
    engine.poison = [9]
    request = await bench.ask("1", [9])
    with pytest.raises(EngineLost):
        await soon(bench.work(engine).run())
    async with bench.serving(Gated()):
        assert (await bench.sampled(request)).sequences
        await until(bench.waiting, lambda found: found == 0)


async def test_a_request_that_kills_every_engine_is_answered_in_the_end_and_those_beside_it_are_drawn(
    bench: Bench,
) -> None:
    bench.ack_wait_s = 0.3
    innocent, poison, deaths = await bench.ask("1"), await bench.ask("2", [9]), 0
    while await bench.waiting():
        engine = Gated(is_open=deaths >= SUSPECT_LOSSES)
        engine.poison = [9]
        life = asyncio.create_task(bench.work(engine).run())

        async def over(life: asyncio.Task[None] = life) -> bool:
            return life.done() or not await bench.waiting()

        await until(over)
        if life.done():
            deaths += isinstance(life.exception(), EngineLost)
        await cancel_and_wait(life)
        assert deaths <= SUSPECT_LOSSES + MAX_LOSSES_ALONE
    assert deaths == SUSPECT_LOSSES + MAX_LOSSES_ALONE
    failed = await bench.failed(poison)
    assert failed.category == "server" and f"the last {MAX_LOSSES_ALONE} while" in failed.error
    assert (await bench.sampled(innocent)).sequences


async def test_a_suspect_is_drawn_without_others(bench: Bench) -> None:
    engine = Gated(is_open=False)
    first, suspect = await bench.ask("1"), f"{bench.job}#suspect"
    for _ in range(SUSPECT_LOSSES):
        await bench.answers.begin_draw(suspect, alone=False)
    async with bench.serving(Gated(is_open=False)) as job:  # it comes a second time: an earlier worker has had it
        await bench.ask("suspect")
        await until(lambda: job.turns.open == 2)
    async with bench.serving(engine) as job:
        await until(lambda: job.turns.open == 2)
        later = await bench.ask("3")
        await until(lambda: job.turns.open == 3)
        await asyncio.sleep(0.1)
        assert engine.inside == 1, "either the suspect, or those that came before it"
        engine.gate.set()
        for request in (first, suspect, later):
            assert (await bench.sampled(request)).sequences
    assert engine.asked == 3


async def test_workers_that_end_in_good_order_are_no_losses(bench: Bench) -> None:
    """As in rolling restarts that leave no time to end what is in progress."""
    request = await bench.ask("1", count=2)
    for _ in range(SUSPECT_LOSSES + MAX_LOSSES_ALONE + 1):
        stuck = Gated(is_open=False)
        async with bench.serving(stuck):
            await until(partial(getattr, stuck, "inside"), lambda inside: inside == 2)
    assert sum(await bench.answers.losses(request)) == 0
    async with bench.serving(Gated()):
        assert len((await bench.sampled(request)).sequences) == 2


async def test_a_worker_that_is_taken_back_answers_what_it_has_taken_and_leaves_the_rest(bench: Bench) -> None:
    bench.settings["max_concurrent"] = 2
    engine = Gated(is_open=False)
    job = bench.work(engine)
    life = asyncio.create_task(job.run())
    requests = [await bench.ask(str(number)) for number in range(5)]
    await until(lambda: engine.inside == 2)
    job.worker._leaving.set()  # as when its lease says by when it must leave
    engine.gate.set()
    await soon(life)
    answered = [request for request in requests if await bench.answers.answered(request)]
    assert len(answered) == 2 and await bench.waiting() == 3
    async with bench.serving(Gated()):
        for request in requests:
            assert (await bench.sampled(request)).sequences


async def test_what_a_worker_is_cut_off_from_goes_to_another_at_once(bench: Bench) -> None:
    stuck = Gated(is_open=False)
    async with bench.serving(stuck):
        request = await bench.ask("1", count=3)
        await until(lambda: stuck.inside == 3)
    assert stuck.inside == 0 and await bench.answers.answered(request) is None
    async with bench.serving(Gated()):
        assert len((await bench.sampled(request)).sequences) == 3


async def test_a_rolling_restart_loses_and_repeats_no_samples(bench: Bench) -> None:
    """Of two workers that clients keep busy, each is replaced twice; every sample is drawn once."""
    engines = [Slow() for _ in range(6)]
    lives: list[tuple[TinkerJob, asyncio.Task[None]]] = []

    def begin(number: int) -> None:
        job = bench.work(engines[number], f"rollout-{number}")
        lives.append((job, asyncio.create_task(job.run())))

    async def client(tenant: str, asked: list[str]) -> None:
        for number in range(12):
            asked.append(await bench.ask(f"{tenant}-{number}", tenant=tenant, count=2))
            await bench.sampled(asked[-1])

    begin(0)
    begin(1)
    asked: list[str] = []
    in_progress = 0
    clients = [asyncio.create_task(client(f"t{number}", asked)) for number in range(4)]
    for number in range(2, 6):
        job, life = lives[number - 2]
        await until(partial(len, asked), partial(operator.lt, len(asked) + 3))
        begin(number)
        in_progress += len(job.tasks)
        job.worker.ctx.stopping.set()  # SIGTERM
        await soon(life)
    await soon(asyncio.gather(*clients))
    assert len(asked) == 48 and sum(engine.asked for engine in engines) == 96
    assert in_progress, "workers were stopped while they drew"
    for _, life in lives[4:]:
        await cancel_and_wait(life)


async def test_a_request_that_has_an_answer_is_not_drawn_again(bench: Bench) -> None:
    engine = Gated()
    async with bench.serving(engine):
        request = await bench.ask("1")
        first = await bench.sampled(request)
        await until(bench.waiting, lambda found: found == 0)
        copy = SampleRequest(request=request, tenant="t", prompt=np.asarray([8, 8], "<i4").tobytes())
        await bench.bus.publish(SAMPLE, copy, f"{request} again", job=bench.job, tenant="t")
        await until(bench.waiting, lambda found: found == 0)
        assert await bench.sampled(request) == first and engine.asked == 1


async def test_a_copy_of_what_is_being_drawn_waits_for_the_answer(bench: Bench) -> None:
    bench.ack_wait_s = 0.5
    engine = Gated(is_open=False)
    async with bench.serving(engine) as job:
        request = await bench.ask("1")
        await until(lambda: engine.inside == 1)
        copy = SampleRequest(request=request, tenant="t", prompt=np.asarray(PROMPT, "<i4").tobytes())
        await bench.bus.publish(SAMPLE, copy, f"{request} again", job=bench.job, tenant="t")
        consumer = f"sample-{bench.job}-t"
        await until(lambda: bench.bus.js.consumer_info("SAMPLES", consumer), lambda info: info.num_ack_pending == 2)
        await until(lambda: job.turns.open == 1)
        engine.gate.set()
        await bench.sampled(request)
        await until(bench.waiting, lambda found: found == 0)
        assert engine.asked == 1


async def test_it_reports_what_it_does(bench: Bench) -> None:
    points: list[MetricPoint] = []

    async def note(point: MetricPoint) -> None:
        points.append(point)

    heard = await bench.bus.listen(METRIC, note, job=bench.job, source="*")
    async with bench.serving(Gated()) as job:
        await until(lambda: job.worker.info.status == "ready")
        await bench.sampled(await bench.ask("1", count=2))
        await until(lambda: any(point.values.get("serving/answers") == 1 for point in points))
        await until(lambda: job.worker.info.detail["requests"] == 0)
    await heard.unsubscribe()
    last = points[-1].values
    assert last["serving/requests"] == 1 and last["serving/prompt_tokens"] == len(PROMPT)
