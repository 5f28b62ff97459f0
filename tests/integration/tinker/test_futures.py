"""Answers to requests: waited for, expired, cancelled, large ones."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from opentinker.services.scheduler.tinker import answers, futures_api
from opentinker.services.scheduler.tinker.large_bodies import LARGE_OF_TENANT
from opentinker.services.scheduler.tinker.schema import SampleResponse
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker.requests import LARGE_ANSWER, READ_KEPT_S, TinkerRequests
from opentinker.shared.types import codec
from opentinker.shared.types.core import JobState
from opentinker.shared.types.tinker import SMALL_RESULT, Answer, Failed, Forwarded, Sampled, SampleSequence, Stepped
from tests.conftest import until
from tests.integration.tinker.site import Client, FakeWorkers, passes, start_server
from tests.integration.tinker.test_sampling import asked, sampler_of
from tests.support.api import OPERATOR, Http, new_key_of


async def test_a_request_waits_for_its_answer_and_is_told_to_try_again(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    workers.answers = False
    promise = await user.ok("asample", **asked(await sampler_of(user)))
    status, body = await user.post("retrieve_future", request_id=promise["request_id"])
    assert status == 408 and body["type"] == "try_again" and body["request_id"] == promise["request_id"]
    assert body["queue_state"] == "paused_capacity" and workers.job in body["queue_state_reason"]
    waiting = asyncio.create_task(user.result(promise))
    await asyncio.sleep(0.1)
    await workers.say(promise["request_id"], Failed(error="no", category="server"))
    assert await waiting == {"error": "no", "category": "server"}


async def test_an_answer_that_was_not_announced_is_found(user: Client, workers: FakeWorkers) -> None:
    workers.answers = False
    promise = await user.ok("asample", **asked(await sampler_of(user)))
    waiting = asyncio.create_task(user.post("retrieve_future", request_id=promise["request_id"]))
    await workers.store.answer(Answer(request=promise["request_id"], result=Stepped(metrics={"x": math.inf})))
    status, body = await waiting
    assert (status, body) == (200, {"type": "optim_step", "metrics": {}})


@pytest.mark.parametrize("id", ["", "x", "a#b", "s-00000000000000000000:train:0#0", "s-0#1", "#", "x" * 1000])
async def test_what_was_never_asked_is_not_found(user: Client, id: str) -> None:
    assert (await user.post("retrieve_future", request_id=id))[0] == 404


async def test_another_number_of_ones_own_model_is_not_found(user: Client) -> None:
    model = await user.model()
    assert (await user.post("retrieve_future", request_id=f"{model}#5"))[0] == 404


async def test_a_cancelled_request_is_answered(user: Client, workers: FakeWorkers) -> None:
    workers.answers = False
    promise = await user.ok("asample", **asked(await sampler_of(user)))
    await user.ok("cancel_future", request_id=promise["request_id"])
    assert "cancelled" in (await user.result(promise))["error"]


async def test_what_waits_for_a_server_that_has_ended_fails(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    model = await user.model()
    workers.answers = False
    _, promise = await user.raw("forward_backward", passes(model, 1))
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    failed = await user.result(promise)
    assert failed["category"] == "server" and "cancelled: over" in failed["error"]

    async def gone() -> bool:
        status, body = await user.post("optim_step", model_id=model, seq_id=2)
        return status == 410 and "load a checkpoint" in body["detail"]

    await until(gone)


async def test_a_large_answer_is_kept_for_a_while_after_it_was_read(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    workers.answers = False
    sampler = await sampler_of(user)
    redis, promises = workers.ctx.store.redis, {}
    tokens = np.arange(LARGE_ANSWER // 4, dtype="<i4")
    one = SampleSequence(stop="length", tokens=tokens.tobytes(), logprobs=np.full(tokens.size, -0.5, "<f4").tobytes())
    logprobs = [np.full(LARGE_ANSWER, -0.5, "<f4").tobytes()]
    for name, result in (
        ("small", Stepped(metrics={})),
        ("pass", Forwarded(logprobs=logprobs, widths=[1], metrics={"loss:sum": 1.0})),
        ("sample", Sampled(sequences=[one])),
    ):
        if name == "sample":
            promises[name] = await user.ok("asample", **asked(sampler))
        else:
            promises[name] = await user.ok("optim_step", model_id=model, seq_id=len(promises) + 1)
        await workers.say(promises[name]["request_id"], result)
    for name, promise in promises.items():
        key = f"tinker:answer:{promise['request_id']}"
        assert await redis.ttl(key) > READ_KEPT_S
        first = await user.result(promise)
        assert (await redis.ttl(key) <= READ_KEPT_S) == (name != "small")
        assert await user.result(promise) == first, "the client's connection broke before it had it"
        await redis.delete(key)  # its time is over
        status, answer = await user.post("retrieve_future", request_id=promise["request_id"])
        assert status == 410 and "kept no more" in answer["detail"]
    workers.answers = True
    again = await user.ok("asample", **asked(sampler))  # as the SDK does then
    assert again == promises["sample"]


@pytest.mark.parametrize("protobuf", [True, False])
async def test_a_large_answer_is_encoded_while_others_are_answered(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch, protobuf: bool
) -> None:
    threads: dict[str, set[bool]] = {"answers": set(), "store": set()}

    def noted(where: str, call: Any) -> Any:
        def run(*of: Any, **more: Any) -> Any:
            threads[where].add(threading.current_thread() is threading.main_thread())
            return call(*of, **more)

        return run

    monkeypatch.setattr(answers, "_encoded", noted("answers", answers._encoded))
    noting = SimpleNamespace(to_json=noted("store", codec.to_json), from_json=codec.from_json)
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.codec", noting)
    workers.answers = False
    sampler = await sampler_of(user)
    for seq, (length, in_loop) in enumerate([(3, True), (100_000, False)]):
        tokens, logprobs = np.arange(length, dtype="<i4"), np.full(length, -0.5, "<f4")
        one = SampleSequence(stop="length", tokens=tokens.tobytes(), logprobs=logprobs.tobytes())
        promise = await user.ok("asample", **asked(sampler, seq))
        for found in threads.values():
            found.clear()
        await workers.say(promise["request_id"], Sampled(sequences=[one]))
        found = await user.result(promise, protobuf=protobuf)
        assert threads == {"answers": {in_loop}, "store": {in_loop}}
        if protobuf:
            assert SampleResponse.FromString(found).sequences[0].tokens == tokens.tobytes()
        else:
            assert found["sequences"][0]["tokens"] == tokens.tolist()
            assert found["sequences"][0]["logprobs"] == logprobs.tolist()


def large(cells: int) -> Sampled:
    zeros = bytes(4 * cells)
    return Sampled(sequences=[SampleSequence(stop="length", tokens=zeros, logprobs=zeros)])


async def test_large_answers_of_a_tenant_are_read_in_its_places(
    user: Client, workers: FakeWorkers, api: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, workers.answers = await sampler_of(user), False
    promise = await user.ok("asample", **asked(sampler))
    await workers.say(promise["request_id"], large(SMALL_RESULT // 4))
    read, begun, end = TinkerRequests.answered, list[str](), asyncio.Event()

    async def held(store: TinkerRequests, request: str) -> Answer | None:
        if request == promise["request_id"]:
            begun.append(request)
            await end.wait()
        return await read(store, request)

    monkeypatch.setattr(TinkerRequests, "answered", held)
    await start_server(ctx, tenant="blue", base="blue/model")
    blue = Client(api, await new_key_of(ctx.store, "blue"))
    other = await blue.ok("asample", **asked(await sampler_of(blue, base_model="blue/model")))
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(user.result(promise)) for _ in range(5 * LARGE_OF_TENANT)]
        try:
            await until(lambda: len(begun) >= LARGE_OF_TENANT)
            async with asyncio.timeout(20.0):
                await workers.say(other["request_id"], Failed(error="no"))
                assert (await blue.result(other))["error"] == "no"
                assert await user.ok("asample", **asked(sampler)) == promise, "a repeated request reads no answer"
            assert len(begun) == LARGE_OF_TENANT
        finally:
            end.set()
    assert len(begun) == len(sent) and len({len(task.result()["sequences"][0]["tokens"]) for task in sent}) == 1


async def test_clients_that_do_not_read_keep_the_places_of_their_tenant_for_a_while(
    url: str, user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do not read lies in the scheduler's memory."""
    sampler, workers.answers = await sampler_of(user), False
    promise = await user.ok("asample", **asked(sampler))
    await workers.say(promise["request_id"], large(1 << 20))
    encoded, encode = list[bool](), answers._encoded

    def noted(*of: Any, **more: Any) -> bytes:
        encoded.append(True)
        return encode(*of, **more)

    monkeypatch.setattr(answers, "_encoded", noted)
    host, _, port = url.removeprefix("http://").partition(":")
    body = orjson.dumps({"request_id": promise["request_id"]})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-{OPERATOR}\r\n"
    head += "Content-Type: application/json\r\nAccept: application/x-protobuf\r\n"
    stalled = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(LARGE_OF_TENANT)]
    for _, writer in stalled:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: len(encoded) == LARGE_OF_TENANT)
    reading = asyncio.create_task(user.result(promise, protobuf=True))
    await asyncio.sleep(0.5)
    assert len(encoded) == LARGE_OF_TENANT, "the fifth is not in memory"
    stalled[0][1].transport.abort()
    assert len(SampleResponse.FromString(await reading).sequences[0].tokens) == 4 << 20
    monkeypatch.setattr(futures_api, "SEND_S", 0.0)
    with pytest.raises(aiohttp.ClientError):
        await user.result(promise, protobuf=True)
    for _, writer in stalled:
        writer.transport.abort()
