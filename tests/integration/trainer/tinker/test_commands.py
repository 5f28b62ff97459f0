"""Answers to clients of a Tinker server: order, losses, refusals."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from opentinker.services.trainer.tinker import command_intake, model_files, model_runner
from opentinker.shared.messaging.subjects import ANSWERED, COMMAND, METRIC
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.tinker import (
    Answered,
    Create,
    Datum,
    Failed,
    ForwardBackward,
    Forwarded,
    Load,
    Loaded,
    LoraShape,
    Save,
    Skip,
    Stepped,
    Unload,
    tinker_place,
)
from tests.conftest import WAIT_S, until
from tests.integration.trainer.tinker.conftest import (
    JOB,
    LIMITS,
    LORA,
    STEP,
    Client,
    Server,
    f32,
    forward_backward,
    i32,
    some_data,
)


def floats(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, "<f4")


async def test_commands_are_carried_out_in_the_order_of_their_numbers(server: Server) -> None:
    told = list[str]()

    async def tell(answered: Answered) -> None:
        told.append(answered.request)

    await server.ctx.bus.listen(ANSWERED, tell, job="*")
    first, second = Client(server, "s:train:0"), Client(server, "s:train:1")
    for client in (first, second):
        assert await client.create() == Loaded()
    bodies = [forward_backward(1), forward_backward(2), STEP, forward_backward(3), STEP]
    expected = [await first.call(body) for body in bodies]
    for number in (4, 0, 3, 2, 1):
        await second.send(bodies[number], seq=number + 1)
    await second.send(bodies[1], seq=2, copy=" again")
    found = [await second.result(f"{second.model}#{number + 1}") for number in range(5)]
    assert found == expected
    losses = [one.metrics["loss:sum"] for one in found if isinstance(one, Forwarded)]
    assert len(losses) == 3 and all(loss is not None and math.isfinite(loss) for loss in losses)
    assert isinstance(found[2], Stepped) and found[2].metrics["steps"] == 1.0
    assert (found[2].metrics["grad_norm"] or 0.0) > 0
    data, result = some_data(1), found[0]
    assert isinstance(result, Forwarded) and result.widths == [1] * 5
    weighted = sum(float(floats(one.weights) @ floats(got)) for one, got in zip(data, result.logprobs, strict=True))
    assert losses[0] == pytest.approx(-weighted, rel=1e-5)
    assert torch.equal(await server.adapter(first.model, "weights"), await server.adapter(second.model, "weights"))
    await until(lambda: len(set(told)), lambda count: count == 12)


async def test_several_targets_of_a_token_have_their_weights(server: Server) -> None:
    """As a distillation sends them: the gradient of two targets is the sum of those of each."""
    both, apart = Client(server, "s:train:0"), Client(server, "s:train:1")
    ids, targets = [5, 6, 7, 8], np.array([[6, 9], [7, 9], [8, 10], [11, 12]])
    shares = np.array([[0.7, 0.3]] * 4)

    def body(columns: list[int]) -> ForwardBackward:
        datum = Datum(
            tokens=i32(ids), targets=i32(targets[:, columns]), weights=f32(shares[:, columns]), width=len(columns)
        )
        return ForwardBackward(data=[datum], loss="cross_entropy")

    for client in (both, apart):
        await client.create()
    together = await both.call(body([0, 1]))
    alone = [await apart.call(body([column])) for column in (0, 1)]
    assert together.widths == [2]
    assert together.metrics["loss:sum"] == pytest.approx(sum(one.metrics["loss:sum"] for one in alone), rel=1e-6)
    found = floats(together.logprobs[0]).reshape(4, 2)
    for column, one in enumerate(alone):
        np.testing.assert_allclose(found[:, column], floats(one.logprobs[0]), rtol=1e-6)
    first, second = [await server.adapter(client.model, "gradient") for client in (both, apart)]
    assert 0 < (first - second).norm() + first.norm() < (1 + 1e-5) * first.norm()


async def test_a_refused_command_is_named_and_the_model_stays_usable(server: Server) -> None:
    client, other = Client(server, "s:train:0"), Client(server, "s:train:0", tenant="other")
    await client.create()
    good = some_data(0)
    short = [good[0], msgspec.structs.replace(good[1], targets=i32([5]))]
    sampled = {"logprobs": f32([0.0] * 2), "advantages": f32([1e38] * 2), "weights": b""}
    huge = [msgspec.structs.replace(good[0], tokens=i32([5, 6]), targets=i32([6, 7]), **sampled)]
    for body, problem in (
        (forward_backward(0, options={"beta": 1.0}), "no option 'beta'"),
        (msgspec.structs.replace(forward_backward(0), data=short), "datum 1 has 1 targets"),
        (msgspec.structs.replace(forward_backward(0), data=huge * 4, loss="dro"), "is not finite"),
        (msgspec.structs.replace(STEP, beta1=1.0), "beta1"),
        (Skip(error="no such loss"), "no such loss"),
        (Save(kind="weights", name="../x"), "checkpoint name"),
        (Load(path="tinker://x", directory="/nowhere"), "does not exist any more"),
        (Create(lora=LORA), "the first request of a model"),
    ):
        failed = await client.call(body)
        assert isinstance(failed, Failed) and failed.category == "user" and problem in failed.error
    other.seq = client.seq
    assert "does not exist" in (await other.call(STEP)).error
    client.seq = other.seq
    assert not (await server.adapter(client.model, "gradient")).any()
    forward = await client.call(forward_backward(0, backward=False))
    assert isinstance(forward, Forwarded) and not (await server.adapter(client.model, "gradient")).any()
    assert (await client.call(forward_backward(0))).metrics == forward.metrics
    assert (await client.call(STEP)).metrics["steps"] == 1.0


async def test_a_model_that_cannot_be_created_says_so_to_every_later_command(server: Server) -> None:
    for number, lora in enumerate((LoraShape(rank=9), LoraShape(rank=4, train_mlp=False, train_attn=False))):
        client = Client(server, f"s:train:{number}")
        assert isinstance(await client.create(lora), Failed)
        assert await server.records.live_models(client.tenant) == [], "it does not count"
        assert f"{client.model} was not created" in (await client.call(STEP)).error
        await server.stop()
        await server.start()
        assert f"{client.model} was not created" in (await client.call(STEP)).error


@pytest.mark.parametrize(("mlp", "attention"), [(True, False), (False, True)])
async def test_layers_are_chosen_by_their_kind(server: Server, mlp: bool, attention: bool) -> None:
    client = Client(server, "s:train:0")
    await client.create(LoraShape(rank=2, train_mlp=mlp, train_attn=attention))
    saved = await client.call(Save(kind="sampler_weights", name="a"))
    assert saved.path == "tinker://s:train:0/sampler_weights/a"
    directory = tinker_place(server.data_dir, client.model) / "sampler_weights" / "a@1"
    names = load_file(directory / "adapter_model.safetensors")
    assert any(".mlp." in name for name in names) == mlp and any(".self_attn." in name for name in names) == attention
    config = PeftConfig.from_pretrained(str(directory))
    assert config.r == 2 and config.lora_alpha == 32


async def test_an_unloaded_model_refuses_later_commands_and_its_checkpoints_stay(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    await client.call(Save(kind="weights", name="a"))
    assert await client.call(Unload()) == Loaded()
    assert not server.bank.bank.residency.places["slot"]
    for _ in range(2):
        assert "was unloaded" in (await client.call(STEP)).error
        await server.stop()
        await server.start()
    assert [one.name for one in await server.records.checkpoints(client.model)] == ["a"]


async def test_an_idle_model_leaves_and_comes_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CHORES_S", 0.05)
    monkeypatch.setattr(model_runner, "STORE_S", 0.05)
    monkeypatch.setattr(model_runner, "RESIDENT_S", 0.2)
    client = Client(server, "s:train:0")
    await client.create()
    for step in range(1, 4):
        await client.call(forward_backward(step))
        assert (await client.call(STEP)).metrics["steps"] == step
        await until(lambda: len(server.job._models), lambda count: count == 0)
        assert not server.bank.bank.residency.owners

    async def left() -> int:
        await server.job._purge()
        return await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB))

    await until(left, lambda count: count == 0)


async def test_commands_without_a_predecessor_are_given_up_and_never_carried_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the missing one comes, when they are sent again, or after a restart; the model continues after them."""
    monkeypatch.setattr(model_runner, "CHORES_S", 0.05)
    client = Client(server, "s:train:0")
    await client.create()
    late = [await client.send(STEP, seq=seq) for seq in (3, 4)]
    assert (await client.call(STEP)).metrics["steps"] == 1
    assert await server.records.answered(late[0]) is None
    monkeypatch.setattr(model_runner, "GAP_S", 0.2)
    for request in late:
        failed = await client.result(request)
        assert isinstance(failed, Failed) and failed.lost and "request 2 of model s:train:0" in failed.error
    monkeypatch.setattr(model_runner, "GAP_S", 600.0)
    client.seq = 5
    assert (await client.call(STEP)).metrics["steps"] == 2
    missing = await client.result(await client.send(Load(path="p", directory="d"), seq=2))
    assert isinstance(missing, Failed) and missing.lost
    for restart in (server.kill, server.stop):
        await client.send(STEP, seq=3, copy=f" again before {restart.__name__}")
        steps = (await client.call(STEP)).metrics["steps"]
        await restart()
        await server.start()
        await client.send(STEP, seq=4, copy=f" again after {restart.__name__}")
        await server.records._redis.delete("tinker:answer:s:train:0#2")
        again = await client.result(await client.send(Load(path="p", directory="d"), seq=2, copy=restart.__name__))
        assert isinstance(again, Failed) and again.lost
        assert (await client.call(STEP)).metrics["steps"] == steps + 1
    assert steps == 5


async def test_a_model_whose_first_command_does_not_come_is_not_created(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "CHORES_S", 0.05)
    monkeypatch.setattr(model_runner, "GAP_S", 0.2)
    client = Client(server, "s:train:0")
    assert "first request has not come" in (await client.result(await client.send(STEP, seq=1))).error
    assert "first request has not come" in (await client.create()).error


async def test_a_model_is_unloaded_though_a_command_before_has_not_come(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "CHORES_S", 0.05)
    client = Client(server, "s:train:0")
    await client.create()
    late, unload = await client.send(STEP, seq=3), await client.send(Unload(), seq=4)
    await client.call(STEP)
    assert await server.records.answered(unload) is None
    monkeypatch.setattr(model_runner, "GAP_S", 0.2)
    assert isinstance(await client.result(unload), Loaded)
    assert isinstance(await client.result(late), Failed)
    assert "was unloaded" in (await client.call(STEP)).error
    assert [path.name for path in server.state(client.model).iterdir() if path.suffix == ".safetensors"] == []


async def test_commands_beyond_the_bound_of_memory_are_read_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_intake, "HELD_BYTES", 0)
    client = Client(server, "s:train:0")
    await client.create()
    requests = [await client.send(forward_backward(number)) for number in range(12)]
    results = [await client.result(request) for request in requests]
    assert all(isinstance(result, Forwarded) for result in results)
    unreadable = f"{client.model}#{client.seq}"
    await server.ctx.bus.nc.publish(COMMAND.at(job=JOB), b"\xc1", headers={"Nats-Msg-Id": unreadable})
    client.seq += 1
    assert "cannot be read" in (await client.result(unreadable)).error
    assert isinstance(await client.call(STEP), Stepped)


async def test_tokens_losses_and_steps_are_reported(server: Server) -> None:
    client = Client(server, "s:train:0", tenant="owner")  # other tenants have no curves
    await client.create()
    result = await client.call(forward_backward(0))
    tokens = sum(len(datum.tokens) // 4 for datum in some_data(0))
    assert server.job.tokens == tokens and server.worker.spent["tokens_trained"] == tokens
    metrics = await until(lambda: points(server), lambda found: "models/s:train:0/loss" in found)
    assert metrics["models/s:train:0/loss"] == pytest.approx(result.metrics["loss:sum"] / tokens)
    assert metrics["trainer/tokens"] == tokens and metrics["trainer/models"] == 1
    await client.call(STEP)
    await until(lambda: server.ctx.store.job(JOB), lambda job: job.step == 1)
    progress = await until(lambda: server.records.progress(client.model), lambda found: found.steps == 1)
    assert (progress.passes, progress.tokens) == (1, tokens)
    assert progress.curve == [float(f"{metrics['models/s:train:0/loss']:.4g}")]
    await server.stop()
    await server.start()
    await until(lambda: server.ctx.store.job(JOB), lambda job: job.resumed_step == 1)
    await until(lambda: server.worker.info.detail.get("queue", ""), lambda queue: queue.startswith("slots 0/3"))


async def points(server: Server) -> dict[str, float]:
    found = await server.ctx.bus.history(METRIC, 0, 1000, job=JOB, source="trainer")
    return {name: value for _, point in found for name, value in point.values.items()}


async def test_an_older_trainer_writes_no_state_and_purges_nothing(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    await client.call(forward_backward(0))
    older, runner = server.job, server.job._models[client.model][0]
    model_files.read_state(server.state(client.model), server.epoch + 1, "x")
    with pytest.raises(Fenced):
        await runner._store()
    found = model_files.read_state(server.state(client.model), server.epoch + 1, "x")
    assert isinstance(found, tuple) and found[1].seq == 0  # as its creation was stored
    await server.ctx.store.transition(JOB, JobState.STARTING, epoch=server.epoch + 1)
    with pytest.raises(Fenced):
        older._intake._purged = -1
        await older._intake.purge(list)


async def test_a_command_that_comes_while_the_stream_is_purged_stays_in_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    consumer, runner = server.job._intake._consumer, server.job._models[client.model][0]
    assert consumer is not None
    await until(lambda: len(runner.uncovered), lambda count: count == 0)
    settled, ahead = consumer.settled, list[str]()

    async def late() -> int:
        if not ahead:
            ahead.append(await client.send(STEP, seq=5))
        return await until(settled, lambda place: place >= 2)

    monkeypatch.setattr(consumer, "settled", late)
    await server.job._purge()
    assert ahead and await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB)) == 1


async def test_a_command_of_more_tokens_than_those_of_jobs_is_carried_out_as_one(server: Server) -> None:
    client, other = Client(server, "s:train:0"), Client(server, "s:train:1")
    data = some_data(0, rows=100)
    assert sum(len(datum.tokens) // 4 for datum in data) > 3 * LIMITS.waiting_tokens
    for one in (client, other):
        await one.create()
    whole = await client.call(msgspec.structs.replace(forward_backward(0), data=data))
    parts = [
        await other.call(msgspec.structs.replace(forward_backward(0), data=data[start : start + 10]))
        for start in range(0, 100, 10)
    ]
    assert isinstance(whole, Forwarded) and len(whole.logprobs) == 100
    total = sum(part.metrics["loss:sum"] for part in parts)
    assert whole.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    gradients = [await server.adapter(one.model, "gradient") for one in (client, other)]
    assert gradients[0].any() and torch.allclose(*gradients, rtol=1e-3, atol=1e-4)


async def test_the_end_of_the_job_answers_what_waits(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    waiting = await client.send(STEP, seq=5)
    runner = server.job._models[client.model][0]
    await until(lambda: runner.unanswered)
    await server.ctx.store.transition(JOB, JobState.CANCELLED)
    assert server.running is not None
    server.running.cancel()
    await asyncio.wait([server.running], timeout=WAIT_S)
    assert "has ended" in (await client.result(waiting)).error
    assert not server.bank.bank.residency.owners
