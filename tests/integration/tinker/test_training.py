"""Commands: created models, forward passes in both forms, steps, saves and loads, their order and their repetition."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import zstandard

from opentinker.services.scheduler.tinker import bodies
from opentinker.services.scheduler.tinker.large_bodies import LARGE_OF_TENANT
from opentinker.services.scheduler.tinker.schema import ForwardBackwardOutput
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.tinker import (
    Create,
    ForwardBackward,
    Forwarded,
    OptimStep,
    Save,
    Skip,
)
from tests.conftest import until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, fill, passes
from tests.support.api import Http, new_key_of

DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0.0, 1.0, 1.0], "dtype": "float32"},
    },
}


async def test_a_model_is_created_trained_and_saved_in_the_order_of_its_numbers(
    user: Client, workers: FakeWorkers
) -> None:
    model = await user.model(seed=7)
    both = [
        await user.raw("forward_backward", passes(model, 1)),
        await user.post("optim_step", model_id=model, seq_id=2),
    ]
    assert [status for status, _ in both] == [200, 200]
    raw = await user.result(both[0][1], protobuf=True)
    output = ForwardBackwardOutput.FromString(raw)
    assert dict(output.metrics) == {"loss:sum": 1.5} and output.loss_fn_outputs[0].num_datums == 1
    tensor = output.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(tensor.data, "<f4").tolist() == [-0.5] * 3
    assert np.frombuffer(tensor.offsets, "<i8").tolist() == [0, 12] and list(tensor.trailing_shape) == []
    assert await user.result(both[1][1]) == {"type": "optim_step", "metrics": {"grad_norm": 2.0}}
    saved = await user.result(await user.ok("save_weights", model_id=model, seq_id=3, path="a.b-1", ttl_seconds=3600))
    assert saved["path"] == f"tinker://{model}/weights/a.b-1"
    created, forward, step, save = (command.body for command in workers.commands)
    assert isinstance(created, Create) and (created.lora.rank, created.lora.seed) == (8, 7)
    assert isinstance(forward, ForwardBackward) and forward.backward and forward.loss == "cross_entropy"
    (datum,) = forward.data
    assert np.frombuffer(datum.tokens, "<i4").tolist() == [1, 2, 3] and datum.width == 1
    assert np.frombuffer(datum.targets, "<i4").tolist() == [2, 3, 4]
    assert isinstance(step, OptimStep) and (step.lr, step.beta2, step.eps) == (1e-4, 0.95, 1e-12)
    assert isinstance(save, Save) and (save.name, save.ttl_s, save.overwrite) == ("a.b-1", 3600, False)
    assert [command.seq for command in workers.commands] == [0, 1, 2, 3]


@pytest.mark.parametrize("seconds", [0, -1, 1e12])
async def test_a_time_to_live_of_a_save_is_a_second_or_more(user: Client, workers: FakeWorkers, seconds: float) -> None:
    """As it is when it is set later: 0 meant for ever here, and now there."""
    model = await user.model()
    promise = await user.ok("save_weights", model_id=model, seq_id=1, path="a", ttl_seconds=seconds)
    assert "ttl_seconds" in (await user.result(promise))["error"]


async def test_both_forms_of_a_forward_pass_make_the_same_command(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}}
    result = await user.result(await user.ok("forward_backward", **body))
    assert result["loss_fn_outputs"] == [{"logprobs": {"data": [-0.5] * 3, "dtype": "float32", "shape": [3]}}]

    def weigh(message: Any) -> None:
        fill(message.data[0].loss_fn_inputs["weights"], np.array([0, 1, 1], "<f4"), 1)
        message.forward_only = True

    compressed = zstandard.ZstdCompressor().compress(passes(model, 2, change=weigh))
    status, promise = await user.raw("forward_backward", compressed, **{"Content-Encoding": "zstd"})
    assert status == 200 and (await user.result(promise))["metrics"] == {"loss:sum": 1.5}
    forward = {"model_id": model, "seq_id": 3, "forward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}}
    await user.result(await user.ok("forward", **forward))
    _, first, second, third = (command.body for command in workers.commands)
    assert isinstance(first, ForwardBackward) and isinstance(second, ForwardBackward)
    assert first.data == second.data and second == third and (first.backward, second.backward) == (True, False)


async def test_sparse_targets_and_several_widths(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()

    def widen(message: Any) -> None:
        wide = message.data.add()
        wide.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        for name, values, dtype in (
            ("target_tokens", np.array([5, 6, 7], "<i8"), 2),
            ("weights", np.ones(3, "<f4"), 1),
        ):
            tensor = wide.loss_fn_inputs[name]
            tensor.sparse_csr.values, tensor.dtype = values.tobytes(), dtype
            tensor.sparse_csr.crow_indices = np.array([0, 1, 3], "<i8").tobytes()
            tensor.sparse_csr.col_indices = np.array([1, 0, 1], "<i8").tobytes()
            tensor.shape.extend([2, 2])

    _, promise = await user.raw("forward_backward", passes(model, 1, change=widen))
    output = ForwardBackwardOutput.FromString(await user.result(promise, protobuf=True))
    assert [list(one.fields["logprobs"].trailing_shape) for one in output.loss_fn_outputs] == [[], [2]]
    body = workers.commands[-1].body
    assert isinstance(body, ForwardBackward) and body.data[1].width == 2
    assert np.frombuffer(body.data[1].targets, "<i4").tolist() == [0, 5, 6, 7]
    assert np.frombuffer(body.data[1].weights, "<f4").tolist() == [0, 1, 1, 1]


def short(message: Any) -> None:
    fill(message.data[0].loss_fn_inputs["target_tokens"], np.array([2, 3], "<i8"), 2)


def negative(message: Any) -> None:
    fill(message.data[0].loss_fn_inputs["target_tokens"], np.array([2, 3, -4], "<i8"), 2)


def not_a_number(message: Any) -> None:
    fill(message.data[0].loss_fn_inputs["weights"], np.array([1, np.nan, 1], "<f4"), 1)


def empty(message: Any) -> None:
    del message.data[:]


def picture(message: Any) -> None:
    message.data[0].model_input.add().image.data = b"x"


def odd_input(message: Any) -> None:
    fill(message.data[0].loss_fn_inputs["logprobs"], np.ones(3, "<f4"), 1)


def huge(message: Any) -> None:
    message.data[0].loss_fn_inputs["weights"].shape[:] = [2**40, 2**40]


def setting(message: Any) -> None:
    message.loss_fn_config["beta"] = 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (short, "has 2 rows, and the input has 3 tokens"),
        (negative, "must be token ids"),
        (not_a_number, "must be finite"),
        (empty, "at least one datum"),
        (picture, "images and audio are not served"),
        (odd_input, "is no input of cross_entropy"),
        (huge, "it must be N or N x K"),
        (setting, "is no setting of cross_entropy"),
    ],
)
async def test_wrong_data_are_the_answer_of_the_command_and_the_model_stays_usable(
    user: Client, workers: FakeWorkers, change: Any, said: str
) -> None:
    model = await user.model()
    status, promise = await user.raw("forward_backward", passes(model, 1, change=change))
    assert status == 200
    failed = await user.result(promise, protobuf=True)
    assert said in failed["error"] and failed["category"] == "user"
    assert "metrics" in await user.result(await user.ok("optim_step", model_id=model, seq_id=2))
    assert isinstance(workers.commands[1].body, Skip) and isinstance(workers.commands[2].body, OptimStep)


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [("eps", 0.0, "1e-30 to 1e+06"), ("eps", 1e-46, "1e-30 to 1e+06"), ("learning_rate", -1.0, "0 to 1e+06")],
)
async def test_settings_of_a_step_have_bounds(
    user: Client, workers: FakeWorkers, name: str, value: float, bounds: str
) -> None:
    """With eps = 0 the first step would make NaN of every weight that has no gradient yet."""
    model = await user.model()
    failed = await user.result(await user.ok("optim_step", model_id=model, seq_id=1, adam_params={name: value}))
    assert name in failed["error"] and f"must be a finite number, {bounds}" in failed["error"]
    assert isinstance(workers.commands[1].body, Skip)


@pytest.mark.parametrize(
    ("loss", "said"), [("stable_reinforce", "pass loss_fn=importance_sampling"), ("gspo", "cross_entropy, importance")]
)
async def test_a_loss_that_is_not_served_is_refused_with_advice(user: Client, loss: str, said: str) -> None:
    model = await user.model()
    _, promise = await user.raw("forward_backward", passes(model, 1, loss))
    assert said in (await user.result(promise))["error"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
async def test_losses_of_reinforcement_learning_take_logprobs_and_advantages(
    user: Client, workers: FakeWorkers, loss: str
) -> None:
    model = await user.model()
    _, promise = await user.raw("forward_backward", passes(model, 1, loss))
    assert "error" not in await user.result(promise)
    body = workers.commands[-1].body
    assert isinstance(body, ForwardBackward) and np.frombuffer(body.data[0].advantages, "<f4").tolist() == [0.5] * 3


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 100, b"\x0a\x05ab", b"\x1a\x00" * 300_000, b"\x1a\xfe\xff\xff\xff\x0f", b"{}"],
    ids=["noise", "cut", "many", "long", "json"],
)
async def test_what_is_no_request_is_refused_at_once(user: Client, raw: bytes) -> None:
    status, answer = await user.raw("forward_backward", raw)
    assert status in (404, 422) and answer["detail"]


async def test_a_small_body_that_is_a_large_one_is_refused(user: Client) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    status, answer = await user.raw("forward_backward", bomb, **{"Content-Encoding": "zstd"})
    assert len(bomb) < 1 << 16 and status == 413, answer
    status, _ = await user.raw("forward_backward", bytes(9 << 20))
    assert status == 413


async def test_uploads_of_a_tenant_that_stall_do_not_delay_large_ones_of_others(
    user: Client, workers: FakeWorkers, api: Http, ctx: Context
) -> None:
    model, blue = await user.model(), Client(api, await new_key_of(ctx.store, "blue"))
    reading, stalls = asyncio.Semaphore(0), asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        reading.release()
        await stalls.wait()

    async def upload() -> AsyncIterator[bytes]:  # without a Content-Length it may be large
        yield passes(model, 1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2 * LARGE_OF_TENANT):
            tasks.create_task(blue.raw("forward_backward", stalled()))
        for _ in range(2 * LARGE_OF_TENANT):
            await reading.acquire()
        async with asyncio.timeout(5.0):
            status, promise = await user.raw("forward_backward", upload())
        assert status == 200 and (await user.result(promise))["metrics"] == {"loss:sum": 1.5}
        stalls.set()


async def test_compressed_bodies_of_a_tenant_wait_for_its_places_before_they_are_decompressed(
    user: Client, workers: FakeWorkers, api: Http, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kB of zstd may be megabytes: with nothing to stop it, a tenant filled the memory with those that waited."""
    model, blue = await user.model(), Client(api, await new_key_of(ctx.store, "blue"))
    compress, zstd = zstandard.ZstdCompressor().compress, {"Content-Encoding": "zstd"}
    large, decompressed, end = compress(bytes(3 << 20)), bodies._decompressed, threading.Event()
    begun: list[int] = []

    def held(raw: bytes, limit: int) -> bytes:
        if raw == large:
            begun.append(len(raw))
            end.wait(20.0)
        return decompressed(raw, limit)

    monkeypatch.setattr(bodies, "_decompressed", held)
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(blue.raw("forward_backward", large, **zstd)) for _ in range(5 * LARGE_OF_TENANT)]
        try:
            await until(lambda: len(begun) >= LARGE_OF_TENANT)
            async with asyncio.timeout(5.0):
                status, promise = await user.raw("forward_backward", compress(passes(model, 1)), **zstd)
                assert status == 200 and (await user.result(promise))["metrics"] == {"loss:sum": 1.5}
            assert len(begun) == LARGE_OF_TENANT and len(large) < bodies.SMALL
        finally:
            end.set()
    assert {task.result()[0] for task in sent} == {422} and len(begun) == len(sent)


async def test_a_repeated_request_is_carried_out_once_and_another_under_its_number_is_refused(
    user: Client, workers: FakeWorkers
) -> None:
    model = await user.model()
    first, again = [await user.raw("forward_backward", passes(model, 1)) for _ in range(2)]
    assert first == again and first[0] == 200
    status, answer = await user.raw("forward_backward", passes(model, 1, "ppo"))
    assert status == 409 and "seq_id 1" in answer["detail"]
    await user.result(first[1])
    assert [command.seq for command in workers.commands] == [0, 1]
    session = model.partition(":")[0]
    for rank, expected in ((8, 200), (4, 409)):
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": rank}}
        status, _ = await user.post("create_model", **body)
        assert status == expected


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", "a" * 129, "-a", "a\n"])
async def test_a_checkpoint_has_a_name_and_no_path(user: Client, workers: FakeWorkers, name: str) -> None:
    model = await user.model()
    failed = await user.result(await user.ok("save_weights", model_id=model, seq_id=1, path=name))
    assert "letters, digits" in failed["error"] and isinstance(workers.commands[-1].body, Skip)


async def test_samplers_without_a_name(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 4, "kind": "inflight"}
    saved = await user.result(await user.ok("save_weights_for_sampler", **body))
    assert saved["sampling_session_id"] == f"{model.partition(':')[0]}:sampler:4"
    save = workers.commands[-1].body
    assert isinstance(save, Save) and save.follows and save.name == ""


async def test_a_loss_that_is_not_a_number_reaches_the_client(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    workers.answers = False
    _, promise = await user.raw("forward_backward", passes(model, 1))
    metrics = {"loss:sum": math.nan, "tokens:sum": 3.0}
    await workers.say(promise["request_id"], Forwarded(logprobs=[bytes(12)], widths=[1], metrics=metrics))
    found = ForwardBackwardOutput.FromString(await user.result(promise, protobuf=True)).metrics
    assert math.isnan(found["loss:sum"]) and found["tokens:sum"] == 3.0
    assert (await user.result(promise))["metrics"] == {"tokens:sum": 3.0}
