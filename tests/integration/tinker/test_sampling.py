"""Samplers, requests for samples, their answers in both forms, and those that wait."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import zstandard

from opentinker.services.scheduler.tinker import sampling_api
from opentinker.services.scheduler.tinker.bodies import SMALL, SampleBody
from opentinker.services.scheduler.tinker.large_bodies import LARGE_OF_TENANT
from opentinker.services.scheduler.tinker.sampling_api import JSON, PIECE
from opentinker.services.scheduler.tinker.schema import SampleResponse
from opentinker.shared.messaging.subjects import SAMPLE
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.tinker import (
    Failed,
    Likely,
    Sampled,
    Sampler,
    SampleRequest,
    SampleSequence,
)
from tests.conftest import until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, start_server
from tests.support.api import Http, new_key_of


def asked(sampler: str, seq: int = 0, **changes: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {}, **changes}


async def sampler_of(user: Client, **body: Any) -> str:
    made = {"session_id": await user.session(), "sampling_session_seq_id": 1, "base_model": BASE} | body
    return str((await user.ok("create_sampling_session", **made))["sampling_session_id"])


async def test_samples_of_a_base_model_in_both_forms(user: Client, workers: FakeWorkers) -> None:
    sampler = await sampler_of(user)
    promise = await user.ok("asample", **asked(sampler, num_samples=2, prompt_logprobs=True))
    assert len(set(promise["sample_sequence_ids"])) == 2
    json, raw = await user.result(promise), await user.result(promise, protobuf=True)
    assert [one["tokens"] for one in json["sequences"]] == [[0, 1, 2]] * 2
    assert json["sequences"][0]["stop_reason"] == "stop" and json["prompt_logprobs"] == [None, -2.0, -2.0]
    message = SampleResponse.FromString(raw)
    assert [np.frombuffer(one.tokens, "<i4").tolist() for one in message.sequences] == [[0, 1, 2]] * 2
    assert np.frombuffer(message.sequences[0].logprobs, "<f4").tolist() == [-1.0] * 3
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")).tolist() == [True, False, False]
    assert not message.HasField("topk_prompt_logprobs")
    (sent,) = workers.samples
    assert (sent.directory, sent.params.max_tokens, sent.params.stop, sent.params.stop_ids) == ("", None, None, None)
    status, found = await user.get(f"samplers/{sampler}")
    assert status == 200 and found == {"sampler_id": sampler, "base_model": BASE, "model_path": None}


@pytest.mark.parametrize("seq", [3 * 10**17 + 1, 2**63 - 1])
async def test_a_number_as_copies_of_a_client_use_it(user: Client, workers: FakeWorkers, seq: int) -> None:
    """A client that was pickled begins at a random multiple of a billion, up to 10**18. Seeds may be as large."""
    sampler = await sampler_of(user)
    body = asked(sampler, seq, sampling_params={"seed": seq})
    promise = await user.ok("asample", **body)
    assert promise["request_id"] == f"{sampler}#{seq}" and await user.ok("asample", **body) == promise
    assert len((await user.result(promise))["sequences"]) == len(workers.samples) == 1
    assert workers.samples[0].params.seed == seq
    workers.answers = False
    promise = await user.ok("asample", **asked(sampler, seq - 1))
    await user.ok("cancel_future", request_id=promise["request_id"])
    assert "cancelled" in (await user.result(promise))["error"]


async def test_likeliest_tokens_in_both_forms(user: Client, workers: FakeWorkers) -> None:
    workers.answers = False
    ids, logprobs = np.array([[0, 0], [4, 9]], "<i4"), np.array([[-99999.0] * 2, [-0.5, -1.5]], "<f4")
    likely = Likely(ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=2, length=2)
    one = SampleSequence(stop="length", tokens=ids[1].tobytes(), logprobs=logprobs[1].tobytes(), likely=likely)
    promise = await user.ok("asample", **asked(await sampler_of(user), topk_prompt_logprobs=2))
    await workers.say(promise["request_id"], Sampled(sequences=[one], likely_prompt=likely))
    json = await user.result(promise)
    assert json["topk_prompt_logprobs"] == [None, [[4, -0.5], [9, -1.5]]]
    message = SampleResponse.FromString(await user.result(promise, protobuf=True))
    assert (message.topk_prompt_logprobs.k, message.topk_prompt_logprobs.length) == (2, 2)
    assert message.sequences[0].stop_reason == 1
    assert np.frombuffer(message.sequences[0].topk_sampled_logprobs.token_ids, "<i4").tolist() == [0, 0, 4, 9]


@pytest.mark.parametrize(
    ("stop", "texts", "ids"),
    [(None, None, None), ([], None, []), ("x", ["x"], None), (["x", "y"], ["x", "y"], None), ([1, 2], None, [1, 2])],
)
async def test_what_ends_a_sample(
    user: Client, workers: FakeWorkers, stop: Any, texts: list[str] | None, ids: list[int] | None
) -> None:
    await user.result(await user.ok("asample", **asked(await sampler_of(user), sampling_params={"stop": stop})))
    params = workers.samples[0].params
    assert (params.stop, params.stop_ids) == (texts, ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": 2.1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"stop": [1, "x"]}}, "stop"),
        ({"prompt": {"chunks": []}}, "has 0 tokens"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "token ids"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "not served"),
        ({"prompt_alt_tokens_k": 2}, "not served"),
        ({"record_stability_info": True}, "importance_sampling"),
        ({"target_prompt_logprobs": {"data": [1]}}, "not served"),
        ({"prompt_logprobs_last_n": 9, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"seq_id": None}, "0.13"),
        ({"seq_id": "x"}, "Expected"),
        ({"seq_id": 2**63}, "9223372036854775807"),
        ({"sampling_session_id": None}, "sampling client"),
        ({"topk_sample_logprobs": 21}, "0 to 20"),
        (
            {"num_samples": 256, "topk_sample_logprobs": 20, "sampling_params": {"max_tokens": 1000}},
            "fewer samples at a time",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(user: Client, change: dict[str, Any], said: str) -> None:
    status, answer = await user.post("asample", **asked(await sampler_of(user), **change))
    assert status == 422 and said in answer["detail"], answer


async def test_large_prompts_of_a_tenant_wait_for_its_places(
    user: Client, workers: FakeWorkers, api: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are parsed before the tenant's bounds are known, and take ten times their bytes."""
    blue, end = Client(api, await new_key_of(ctx.store, "blue")), threading.Event()
    parse, begun = sampling_api.sample_of, list[bool]()

    def held(body: SampleBody, *of: str) -> SampleRequest:
        if len(body.prompt.chunks[0].tokens) > 10:
            begun.append(threading.current_thread() is threading.main_thread())
            end.wait(60.0)
        return parse(body, *of)

    monkeypatch.setattr(sampling_api, "sample_of", held)
    large = asked("s-00000000000000000000:sampler:1", prompt={"chunks": [{"tokens": [1] * SMALL}]})
    sampler = await sampler_of(user)
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(blue.post("asample", **large)) for _ in range(3 * LARGE_OF_TENANT)]
        try:
            await until(lambda: len(begun) >= LARGE_OF_TENANT)
            async with asyncio.timeout(20.0):
                await user.result(await user.ok("asample", **asked(sampler)))
            assert begun == [False] * LARGE_OF_TENANT
        finally:
            end.set()
    assert {task.result()[0] for task in sent} == {404} and len(begun) == len(sent)


async def test_a_long_prompt_is_sent_as_it_is(user: Client, workers: FakeWorkers) -> None:
    tokens = np.arange(PIECE + 3, dtype="<i4")
    chunks = [{"tokens": part.tolist()} for part in (tokens, tokens[:2], tokens[:0])]
    await user.result(await user.ok("asample", **asked(await sampler_of(user), prompt={"chunks": chunks})))
    assert workers.samples[0].prompt == tokens.tobytes() + tokens[:2].tobytes()


async def test_compressed_prompts_are_not_taken(user: Client) -> None:
    """200 bytes may be a million tokens; the SDK compresses passes alone."""
    body = zstandard.ZstdCompressor().compress(orjson.dumps(asked(await sampler_of(user))))
    for route in ("asample", "telemetry", "optim_step"):
        status, answer = await user.raw(route, body, **{"Content-Type": JSON, "Content-Encoding": "zstd"})
        assert status == 415 and "zstd" in answer["detail"], answer


async def test_a_prompt_beyond_the_known_context_is_refused_at_once(user: Client, ctx: Context) -> None:
    job = await start_server(ctx, base="other/model", context=8)
    sampler = await sampler_of(user, base_model=job)
    body = asked(sampler, prompt={"chunks": [{"tokens": [1] * 8}]})
    status, answer = await user.post("asample", **body)
    assert status == 422 and "has 8 tokens, and the context of 8" in answer["detail"]
    assert await ctx.bus.count("SAMPLES", SAMPLE.at(job=job, tenant="*")) == 0
    await user.ok("asample", **asked(sampler, prompt={"chunks": [{"tokens": [1] * 7}]}))
    assert await ctx.bus.count("SAMPLES", SAMPLE.at(job=job, tenant="*")) == 1


async def test_a_repeated_request_is_sampled_once_and_a_lost_one_again(user: Client, workers: FakeWorkers) -> None:
    sampler = await sampler_of(user)
    workers.answers = False
    first, again = [await user.ok("asample", **asked(sampler, 3)) for _ in range(2)]
    assert first == again
    assert (await user.post("asample", **asked(sampler, 3, num_samples=2)))[0] == 409
    await workers.say(first["request_id"], Failed(error="its worker has left", lost=True))
    status, answer = await user.post("retrieve_future", request_id=first["request_id"])
    assert status == 410 and "send the request again" in answer["detail"]
    workers.samples.clear()
    workers.answers = True
    await user.result(await user.ok("asample", **asked(sampler, 3)))
    assert len(workers.samples) == 1


async def test_a_checkpoint_is_sampled_and_one_sampler_follows_the_weights(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    model = await user.model()
    saved = checkpoint_of(ctx, model, kind="sampler_weights")
    await workers.store.add_checkpoint(saved)
    sampler = await sampler_of(user, base_model=None, model_path=saved.path)
    await user.result(await user.ok("asample", **asked(sampler)))
    assert workers.samples[-1].directory.endswith("sampler_weights/first") and workers.samples[-1].rank == 8
    session = model.partition(":")[0]
    for number, follows in ((7, True), (8, False)):
        await workers.store.add_sampler(
            Sampler(
                id=f"{session}:sampler:{number}",
                tenant="default",
                session=session,
                job=workers.job,
                base=BASE,
                model=model,
                directory=f"/{number}",
                version=f"{model}@{number}",
                rank=8,
                follows=follows,
            )
        )
    for number in (7, 8):
        await user.result(await user.ok("asample", **asked(f"{session}:sampler:{number}")))
    assert [one.directory for one in workers.samples[-2:]] == ["/8", "/8"]


async def test_a_checkpoint_is_sampled_with_the_base_that_its_client_trained_by_whatever_name(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    """As recipes do for a teacher: with the checkpoint's path, and the name that they give all models."""
    saved = checkpoint_of(ctx, await user.model(), kind="sampler_weights")
    await workers.store.add_checkpoint(saved)
    for name in (BASE, workers.job, "tinker"):
        assert await sampler_of(user, base_model=name, model_path=saved.path)
    other = await start_server(ctx, base="other/base")
    made = {"session_id": await user.session(), "sampling_session_seq_id": 1, "model_path": saved.path}
    for name in (other, "other/base"):
        status, answer = await user.post("create_sampling_session", **made, base_model=name)
        assert status == 422 and f"is not the checkpoint's base, {BASE}" in answer["detail"]


async def test_a_checkpoint_that_is_public_no_longer_or_deleted_is_not_sampled(
    user: Client, api: Http, workers: FakeWorkers, ctx: Context
) -> None:
    saved = checkpoint_of(ctx, await user.model(), kind="sampler_weights")
    await workers.store.add_checkpoint(saved)
    path = f"training_runs/{saved.model}/checkpoints/sampler_weights/first"
    blue = Client(api, await new_key_of(ctx.store, "blue"))
    async with FakeWorkers(ctx, await start_server(ctx, open_to=["blue"])).work():
        assert (await user.send("POST", f"{path}/publish"))[0] < 300
        own, other = [await sampler_of(one, base_model=None, model_path=saved.path) for one in (user, blue)]
        await user.result(await user.ok("asample", **asked(own)))
        await blue.result(await blue.ok("asample", **asked(other)))
        assert (await user.send("DELETE", f"{path}/publish"))[0] < 300
        status, answer = await blue.post("asample", **asked(other, 1))
        assert status == 404 and saved.path in answer["detail"]
        await user.ok("asample", **asked(own, 1))
        assert (await user.send("DELETE", path))[0] < 300
        assert (await user.post("asample", **asked(own, 2)))[0] == 404


async def test_a_checkpoint_that_has_expired_is_not_sampled(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    saved = checkpoint_of(ctx, await user.model(), kind="sampler_weights")
    await workers.store.add_checkpoint(saved)
    sampler = await sampler_of(user, base_model=None, model_path=saved.path)
    await workers.store.change_checkpoint(saved, expires=1.0)
    status, answer = await user.post("asample", **asked(sampler))
    assert status == 404 and saved.path in answer["detail"]


async def test_weights_that_were_replaced_under_their_name_are_sampled_until_they_are_removed(
    user: Client, workers: FakeWorkers, ctx: Context
) -> None:
    saved = checkpoint_of(ctx, await user.model(), kind="sampler_weights")
    await workers.store.add_checkpoint(saved)
    sampler = await sampler_of(user, base_model=None, model_path=saved.path)
    await workers.store.add_checkpoint(msgspec.structs.replace(saved, seq=5, place_name="first@5"))
    await user.result(await user.ok("asample", **asked(sampler)))
    directory = Path(workers.samples[-1].directory)
    assert directory.name == "first"
    shutil.rmtree(directory)
    status, answer = await user.post("asample", **asked(sampler, 1))
    assert status == 404 and "were removed" in answer["detail"]
