"""What clients of a Tinker server are answered: order, losses, refusals, checkpoints, samplers."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from opentinker.services.trainer.tinker import command_intake, model_files, model_runner, sampler_files
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
    Sampler,
    Save,
    Saved,
    Skip,
    Stepped,
    TinkerSession,
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


async def test_checkpoints_are_saved_refused_replaced_loaded_and_begun_with(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    for body in (forward_backward(0), STEP):
        await client.call(body)
    weights = (await server.adapter(client.model, "weights")).clone()
    assert await client.call(Save(kind="weights", name="a", ttl_s=1000.0)) == Saved(path="tinker://s:train:0/weights/a")
    (record,) = await server.records.checkpoints(client.model)
    directory = tinker_place(server.data_dir, client.model) / "weights" / record.place
    assert record.step == 1 and record.tenant == "acme" and record.lora == LORA
    assert record.size == sum(path.stat().st_size for path in directory.iterdir())
    assert record.expires == pytest.approx(time.time() + 1000.0, abs=100.0)
    for body in (forward_backward(1), STEP):
        await client.call(body)
    assert "exists" in (await client.call(Save(kind="weights", name="a"))).error
    path = "tinker://s:train:0/weights/a"
    begun = {name: Client(server, f"s:train:{number}") for number, name in enumerate(("whole", "weights", "load"), 1)}
    assert await begun["whole"].create(start=str(directory), optimizer=True) == Loaded(path=str(directory))
    await begun["weights"].create(start=str(directory))
    await begun["load"].create(LoraShape(rank=4, seed=9))
    await begun["load"].call(forward_backward(5))
    assert await begun["load"].call(Load(path=path, directory=str(directory), optimizer=True)) == Loaded(path=path)
    assert not (await server.adapter("s:train:3", "gradient")).any()
    for number, steps in ((1, 2.0), (2, 1.0), (3, 2.0)):
        model = f"s:train:{number}"
        assert torch.equal(await server.adapter(model, "weights"), weights)
        assert bool((await server.adapter(model, "exp_avg")).any()) == (steps == 2.0)
    for name, steps in (("whole", 2.0), ("weights", 1.0), ("load", 2.0)):
        await begun[name].call(forward_backward(1))
        assert (await begun[name].call(STEP)).metrics["steps"] == steps
    expected = await server.adapter(client.model, "weights")
    assert torch.equal(await server.adapter("s:train:1", "weights"), expected)
    assert torch.equal(await server.adapter("s:train:3", "weights"), expected)
    assert not torch.equal(await server.adapter("s:train:2", "weights"), expected)
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert isinstance(await client.call(Save(kind="weights", name="a", overwrite=True)), Saved)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before, "one that is being loaded"
    (record,) = await server.records.checkpoints(client.model)
    replaced, directory = directory, directory.with_name(record.place)
    assert directory.is_dir() and directory != replaced
    for age_s, is_kept in ((500.0, True), (700.0, False)):
        os.utime(replaced, (time.time() - age_s,) * 2)
        await server.job._tidy()
        assert replaced.exists() is is_kept and directory.is_dir()
    small = Client(server, "s:train:4")
    await small.create(LoraShape(rank=2))
    assert "has rank 4" in (await small.call(Load(path=path, directory=str(directory)))).error
    external = Save(kind="external_weights", name="a", metadata={"for": "download"})
    assert await client.call(external) == Saved(path="tinker://s:train:0/external_weights/a")
    kept = await server.records.checkpoint("acme", client.model, "external_weights", "a")
    assert kept.metadata == {"for": "download"} and kept.size > 0
    assert isinstance(await client.call(Save(kind="sampler_weights", name="a")), Saved)
    assert isinstance(await client.call(Save(kind="sampler_weights", name="a")), Saved)  # names may be used again
    samplers = max((directory.parents[1] / "sampler_weights").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    load = Load(path=path, directory=str(samplers))
    assert isinstance(await client.call(load), Loaded)
    assert "no optimizer state" in (await client.call(msgspec.structs.replace(load, optimizer=True))).error


async def test_weights_for_a_sampler_have_a_directory_and_a_record(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    assert await client.call(Save(kind="sampler_weights", sampler="s:sampler:0")) == Saved(sampler="s:sampler:0")
    sampler = await server.records.sampler("acme", "s:sampler:0")
    assert (sampler.session, sampler.job, sampler.rank, sampler.version) == ("s", JOB, 4, "s:train:0@1")
    root = tinker_place(server.data_dir, client.model) / "samplers"
    old = root / "s:sampler:0@1"
    assert sampler.directory == str(old)
    assert sorted(path.name for path in old.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    await client.call(Save(kind="sampler_weights", sampler="s:sampler:1", follows=True))
    newer = await server.records.sampler("acme", "s:sampler:1")
    new = root / "s:sampler:1@2"
    assert newer.follows and newer.directory == str(new)
    assert (await server.records.newest_of(newer)).directory == str(new)


async def test_replaced_files_of_samplers_stay_while_their_clients_live_and_an_hour_longer(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    root = tinker_place(server.data_dir, client.model) / "samplers"
    await server.records.open_session(TinkerSession(id="s", tenant="acme", created=1.0))
    for number in range(4):
        await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}", follows=number == 2))
    other = await server.records.sampler("acme", "s:sampler:1")
    await server.records.add_sampler(msgspec.structs.replace(other, session="dead"))

    async def left(past_s: float = sampler_files.KEPT_S + 60) -> list[str]:
        for path in root.iterdir():
            os.utime(path, (time.time() - past_s,) * 2)
        await server.job._tidy()
        return sorted(path.name for path in root.iterdir())

    assert len(await left(sampler_files.KEPT_S - 60)) == 4
    assert await left() == ["s:sampler:0@1", "s:sampler:3@4"], "those of a dead client and of a follower went"
    await client.call(Unload())
    assert len(await left()) == 2
    await server.records.finish("s", "{}")
    await server.job._tidy()
    assert len(list(root.iterdir())) == 2, "their client lived a moment ago"
    assert await left() == [] and await server.records.samplers_of(client.model) == []


async def test_sampler_weights_of_a_used_name_leave_those_of_earlier_samplers(server: Server) -> None:
    await server.records.open_session(TinkerSession(id="s", tenant="acme", created=1.0))
    client = Client(server, "s:train:0")
    await client.create()
    await client.call(Save(kind="sampler_weights", name="a"))
    root = tinker_place(server.data_dir, client.model) / "sampler_weights"
    (old,) = root.iterdir()
    before = (old / "adapter_model.safetensors").read_bytes()
    made = Sampler(id="s:sampler:0", tenant="acme", session="s", job=JOB, base="b", model=client.model, path="p")
    await server.records.add_sampler(msgspec.structs.replace(made, directory=str(old)))
    for body in (forward_backward(0), STEP, Save(kind="sampler_weights", name="a")):
        await client.call(body)
    (record,) = await server.records.checkpoints(client.model)
    new = root / record.place
    assert (old / "adapter_model.safetensors").read_bytes() == before
    assert (new / "adapter_model.safetensors").read_bytes() != before

    async def left() -> set[str]:
        for path in root.iterdir():
            os.utime(path, (1.0, 1.0))
        await server.job._tidy()
        return {path.name for path in root.iterdir()}

    assert await left() == {old.name, new.name}
    await server.records.finish("s", "{}")
    assert await left() == {new.name}


async def test_the_most_recently_used_samplers_of_a_model_keep_their_files(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_files, "MOST_KEPT", 2)
    await server.records.open_session(TinkerSession(id="s", tenant="acme", created=1.0))
    client = Client(server, "s:train:0")
    await client.create()
    for number in range(3):
        await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}"))
    first, _, third = [await server.records.sampler("acme", f"s:sampler:{number}") for number in range(3)]
    await server.records.used_sampler(first)
    assert await sampler_files.kept_for_clients(server.records, client.model) == {first.directory, third.directory}


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


async def test_commands_without_a_predecessor_are_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CHORES_S", 0.05)
    client = Client(server, "s:train:0")
    await client.create()
    late = await client.send(STEP, seq=3)
    await client.call(STEP)
    assert await server.records.answered(late) is None
    monkeypatch.setattr(model_runner, "GAP_S", 0.2)
    failed = await client.result(late)
    assert isinstance(failed, Failed) and failed.lost and "request 2 of model s:train:0" in failed.error
    assert isinstance(await client.call(STEP), Stepped)


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
