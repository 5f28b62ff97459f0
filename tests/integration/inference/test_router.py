"""Requests of inference jobs when messages, workers or the message server are lost, and while none is ready."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from opentinker.client import AsyncClient
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.services.rollout_worker.inference_request import RequestState
from opentinker.services.scheduler.inference import router
from opentinker.services.scheduler.inference.router import POLL_S, InferenceRouter, ReadyWorkers
from opentinker.shared.messaging.streaming import Send
from opentinker.shared.openai.inference import GenerateChunk, GenerateRequest
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobRecord, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, soon, until
from tests.support.inference import HELLO, Site, collected, site_of
from tests.support.scheduling import context, scheduler


async def test_a_lost_chunk_is_requested_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    say, dropped = RequestState.say, asyncio.Event()

    async def lossy(talk: RequestState, **parts: object) -> None:
        if dropped.is_set():
            await say(talk, **parts)
        else:
            talk._seq += 1
            dropped.set()

    monkeypatch.setattr(RequestState, "say", lossy)
    job = await site.job()
    async with site.openai(job) as model:
        text, _ = await collected(await model.chat.completions.create(model=job, messages=HELLO, stream=True))
    assert text == "Hello there." and dropped.is_set()
    speaker = site.speakers["rollout-0"]
    await until(lambda: len(speaker.asked) == 2 and not speaker.running)


async def test_a_worker_that_loses_answers_is_named(
    ctx: Context, nats_server: Server, valkey_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mute(talk: RequestState, **parts: object) -> None:
        pass

    begin, begun = InferenceJob._begin, list[str]()

    def counted(job: InferenceJob, ask: GenerateRequest, send: Send[GenerateChunk]) -> None:
        begun.append(ask.id)
        begin(job, ask, send)

    monkeypatch.setattr(InferenceJob, "_begin", counted)
    monkeypatch.setattr(RequestState, "say", mute)
    async with (
        scheduler(ctx, replicas=InferenceRouter(ctx, silence_s=0.2)) as url,
        AsyncClient(url, wait_s=WAIT_S) as client,
        site_of(client, nats_server, valkey_server, ctx.settings.data_dir) as site,
    ):
        job = await site.job()
        async with site.openai(job) as model:
            with pytest.raises(openai.InternalServerError, match="was answering is gone"):
                await model.chat.completions.create(model=job, messages=HELLO)
        await until(lambda: len(begun) == router.MAX_TRIES)
    assert len(set(begun)) == router.MAX_TRIES, "each has an id of its own: an earlier one may still be at work"


async def test_requests_survive_a_restart_of_the_message_server(
    own_server: Server, valkey_server: Server, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    async with (
        context(own_server, valkey_server, "scheduler-0", data) as ctx,
        scheduler(ctx, replicas=InferenceRouter(ctx, silence_s=3.0)) as url,
        AsyncClient(url, wait_s=WAIT_S) as client,
        site_of(client, own_server, valkey_server, data) as site,
    ):
        site.beat_s = 0.3
        job = await site.job()
        speaker = site.speakers["rollout-0"]
        speaker.gate = asyncio.Event()
        async with site.openai(job) as model:
            before = asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO))
            await until(lambda: speaker.running)
            own_server.kill()
            meanwhile = asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO))
            speaker.gate.set()
            await until(lambda: not speaker.running)
            own_server.start()
            for asking in (before, meanwhile):
                assert (await soon(asking)).choices[0].message.content == "Hello there."


async def test_waiting_requests_poll_together_up_to_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await site.job(serving={"max_concurrent": 2, "max_waiting": 3})
    await site.kill("rollout-0")
    look, looks, waiting = ReadyWorkers._find, list[float](), Counter[str]()

    async def counted(lookout: ReadyWorkers, id: str) -> tuple[JobRecord, list[WorkerInfo]]:
        nonlocal waiting
        looks.append(time.monotonic())
        waiting = lookout._waiting
        return await look(lookout, id)

    monkeypatch.setattr(ReadyWorkers, "_find", counted)
    async with site.openai(job) as model:
        five = [asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO)) for _ in range(5)]
        await until(lambda: waiting[job] == 5)
        looks.clear()
        with pytest.raises(openai.RateLimitError, match="5 requests wait for a rollout worker") as refused:
            await model.chat.completions.create(model=job, messages=HELLO)
        assert refused.value.code == "overloaded"
        await until(lambda: len(looks) > 3)
        assert min(after - before for before, after in pairwise(looks)) > 0.9 * POLL_S
        await site.worker("rollout-0")
        for asking in five:
            assert (await soon(asking)).choices
        assert not waiting


def test_requests_of_other_schedulers_count_too(ctx: Context) -> None:
    def worker(name: str, requests: int) -> WorkerInfo:
        return WorkerInfo(
            id=name, pool=Pool.ROLLOUT, host="h", pid=1, incarnation="i", address=name, detail={"requests": requests}
        )

    asks = [
        GenerateRequest(id=str(number), asker="s", job="j", model="m", text=f"prompt {number}") for number in range(50)
    ]
    ours = InferenceRouter(ctx)
    chosen = Counter(ours._best([worker("a", 9), worker("b", 2)], ask).id for ask in asks)
    assert chosen == {"b": 50}, "another scheduler has given a more than enough"
    assert Counter(ours._best([worker("a", 3), worker("b", 2)], ask).id for ask in asks).keys() == {"a", "b"}
    ours._busy["b"] = 20
    assert Counter(ours._best([worker("a", 9), worker("b", 2)], ask).id for ask in asks) == {"a": 50}
