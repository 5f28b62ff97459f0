"""An inference job's life: it waits, idles, is over; workers, engines, clients and schedulers go away meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import openai
import pytest

from opentinker.client import ApiConflict
from opentinker.services.rollout_worker.inference_job import InferenceJob
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.streaming import ask
from opentinker.shared.messaging.subjects import GENERATE
from opentinker.shared.openai.inference import GenerateChunk, GenerateRequest
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Message
from tests.conftest import WAIT_S, soon, until
from tests.support.inference import HELLO, Site
from tests.support.scheduling import kinds, new_job


async def test_a_job_needs_rollout_workers_alone_and_is_completed(site: Site, store: Store, ctx: Context) -> None:
    job = await site.job()
    record = await site.client.job(job)
    assert (record["kind"], record["endpoint"]) == ("inference", f"/v1/jobs/{job}/v1")
    assert [worker["pool"] for worker in record["workers"]] == ["rollout"] and "train" not in record["spec"]
    assert await kinds(store, job) == ["queued", "starting", "running"]
    for _ in range(2):  # it may be repeated
        assert (await site.client.complete(job))["state"] == "succeeded"
    with pytest.raises(ApiConflict, match=r"has ended already \(succeeded\)"):
        await site.client.cancel(job)
    again = await site.job()  # the worker is free
    assert (await site.client.cancel(again))["state"] == "cancelled"
    with pytest.raises(ApiConflict, match=r"has ended already \(cancelled\)"):
        await site.client.complete(again)
    with pytest.raises(ApiConflict, match="kind rl, and ends by itself"):
        await site.client.complete(await new_job(store, "j-0123456789"))


async def test_a_queued_job_waits_for_a_worker_and_says_so(site: Site) -> None:
    first = await site.job()
    second = (await site.client.submit({"name": "y", "kind": "inference", "model": {"base": "m"}}))["id"]

    async def waits() -> bool:
        held = f"a free rollout worker (held by inference job {first}; cancel it or add a rollout worker; "
        lends = "an inference job lends its workers after 120 s without requests)"
        return bool((await site.client.job(second))["waiting_for"] == held + lends)

    await until(waits)
    async with site.openai(second) as model:
        with pytest.raises(openai.InternalServerError, match="is queued: it waits for a free rollout worker"):
            await model.models.list()


async def test_an_idle_job_ends(site: Site) -> None:
    job = (
        await site.client.submit({"name": "x", "kind": "inference", "model": {"base": "m"}, "serving": {"idle_s": 0.2}})
    )["id"]
    record = await site.client.wait(job, 60)
    assert (record["state"], record["reason"]) == ("succeeded", "idle for 0.2 s (serving.idle_s)")


async def test_a_worker_that_is_lost_is_replaced_and_the_request_waits_for_it(site: Site) -> None:
    job = await site.job()
    await site.kill("rollout-0")
    async with site.openai(job) as model:
        asking = asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO))
        await site.worker("rollout-1")
        assert (await soon(asking)).choices[0].message.content == "Hello there."
    assert (await site.client.job(job))["state"] == "running"


async def test_a_request_that_has_no_answer_yet_goes_to_another_worker(site: Site) -> None:
    await site.worker("rollout-1")
    job = await site.job(resources={"rollout_workers": 2})
    await until(lambda: len(site.speakers) == 2)
    for speaker in site.speakers.values():
        speaker.gate = asyncio.Event()
    async with site.openai(job) as model:
        asking = asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO))
        await until(lambda: any(speaker.running for speaker in site.speakers.values()))
        (at_it,) = [id for id, speaker in site.speakers.items() if speaker.running]
        (other,) = site.speakers.keys() - {at_it}
        gate = site.speakers[other].gate
        assert gate is not None
        gate.set()
        await site.kill(at_it)
        assert (await soon(asking)).choices[0].message.content == "Hello there."


async def test_a_stream_whose_worker_is_lost_ends_with_an_error(site: Site) -> None:
    job = await site.job()
    site.speakers["rollout-0"].gate, site.speakers["rollout-0"].at = asyncio.Event(), 4
    async with site.openai(job) as model:
        stream = await model.chat.completions.create(model=job, messages=HELLO, stream=True)
        got = ""
        with pytest.raises(openai.APIError, match="is gone"):
            async for chunk in stream:
                got += chunk.choices[0].delta.content or ""
                if got == "Hell":
                    await site.kill("rollout-0")
        assert got == "Hell"


async def test_an_engine_that_dies_ends_its_worker(site: Site) -> None:
    job = await site.job()
    site.speakers["rollout-0"].died.set_result(None)
    life = site._lives["rollout-0"]
    await until(life.done)
    with pytest.raises(Exception, match="killed by the test"):
        life.result()
    await site.worker("rollout-0")
    async with site.openai(job) as model:
        assert (await model.chat.completions.create(model=job, messages=HELLO)).choices


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_the_engine(site: Site, stream: bool) -> None:
    job = await site.job()
    speaker = site.speakers["rollout-0"]
    speaker.gate, speaker.at = asyncio.Event(), 3
    async with site.openai(job) as model:
        asking = asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO, stream=stream))
        await until(lambda: speaker.running)
        if stream:
            opened: Any = await soon(asking)
            await opened.close()
        else:
            asking.cancel()
        await until(lambda: not speaker.running)


async def test_requests_of_a_scheduler_that_is_gone_are_given_up(site: Site, bus: Bus, store: Store) -> None:
    job = await site.job()
    speaker = site.speakers["rollout-0"]
    speaker.gate = asyncio.Event()
    (worker,) = [w for w in await store.workers() if w.job == job]
    question = GenerateRequest(
        id="q", asker="nobody", job=job, model="some/model", messages=[Message(role="user", content="?")]
    )
    pieces = ask(bus, GENERATE, question, silence_s=60.0, worker=worker.address)
    waiting: asyncio.Task[GenerateChunk] = asyncio.create_task(anext(pieces))
    await until(lambda: speaker.running)
    await until(lambda: not speaker.running)
    waiting.cancel()
    await asyncio.wait([waiting])
    await pieces.aclose()


async def test_nothing_is_begun_when_the_job_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = InferenceJob._end, asyncio.get_running_loop().create_future()

    async def ended(over: InferenceJob) -> None:
        await end(over)
        late = GenerateRequest(id="q", asker="nobody", job=over.lease.job, model="some/model", text="x")
        async with aclosing(ask(over.bus, GENERATE, late, silence_s=WAIT_S, worker=over.address)) as pieces:
            said.set_result(await anext(pieces))

    monkeypatch.setattr(InferenceJob, "_end", ended)
    await site.client.cancel(await site.job())
    refusal = (await soon(said)).refusal
    assert refusal is not None and (refusal.status, refusal.elsewhere) == (503, True)


async def test_who_has_just_asked_when_the_job_ends_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = InferenceJob._end, list[tuple[str, GenerateChunk]]()

    async def ended(over: InferenceJob) -> None:
        def asks(id: str) -> None:
            async def send(piece: GenerateChunk) -> None:
                await asyncio.sleep(0)
                said.append((id, piece))

            over._begin(GenerateRequest(id=id, asker="nobody", job=over.lease.job, model="some/model", text="x"), send)

        asks("not yet begun")
        over.over = True
        asks("being refused")
        await end(over)
        said.append(("after", GenerateChunk(seq=0)))

    monkeypatch.setattr(InferenceJob, "_end", ended)
    await site.client.cancel(await site.job())
    await until(lambda: "after" in dict(said))
    assert sorted(id for id, _ in said[:2]) == ["being refused", "not yet begun"]
    assert all(piece.refusal is not None and piece.refusal.elsewhere for _, piece in said[:2])


async def test_more_than_may_wait_is_refused_for_the_moment(site: Site) -> None:
    job = await site.job(serving={"max_concurrent": 1, "max_waiting": 1})
    speaker = site.speakers["rollout-0"]
    speaker.gate = asyncio.Event()
    async with site.openai(job) as model:
        two = [asyncio.create_task(model.chat.completions.create(model=job, messages=HELLO)) for _ in range(2)]

        async def both() -> bool:
            (worker,) = (await site.client.job(job))["workers"]
            return bool(worker["detail"]["requests"] == 2)

        await until(both)
        with pytest.raises(openai.RateLimitError, match="2 requests are being answered or wait") as refused:
            await model.chat.completions.create(model=job, messages=HELLO)
        assert refused.value.code == "overloaded" and refused.value.response.headers["Retry-After"]
        assert len(speaker.running) == 1
        speaker.gate.set()
        for asking in two:
            assert (await soon(asking)).choices


async def test_a_request_has_its_time(site: Site) -> None:
    job = await site.job(serving={"request_timeout_s": 0.2})
    site.speakers["rollout-0"].gate = asyncio.Event()
    async with site.openai(job) as model:
        with pytest.raises(openai.InternalServerError, match=r"no answer within 0.2 s \(serving.request_timeout_s\)"):
            await model.chat.completions.create(model=job, messages=HELLO)
