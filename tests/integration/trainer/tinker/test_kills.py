"""A trainer of a Tinker server that is killed at any moment: its models continue bit for bit, and every command has one
answer."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.bank import adapter_files
from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.tinker import model_files, model_runner
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import COMMAND
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.billing import HOUR_S, TinkerSpent
from opentinker.shared.types.tinker import Forwarded, Load, Save, Unload, tinker_place
from tests.conftest import until
from tests.integration.trainer.tinker import conftest
from tests.integration.trainer.tinker.conftest import JOB, STEP, Client, Server, forward_backward, fresh_server

MODEL = "s:train:0"


def program(directory: Path) -> list[Any]:
    """A run of a client: several passes before a step, saves that are refused or not, a state that is loaded again."""
    found: list[Any] = []
    for step in range(8):
        found += [forward_backward(3 * step + part) for part in range(1 + step % 3)]
        found += [forward_backward(step, backward=False), STEP]
        if step in (2, 5):
            found.append(Save(kind="weights", name="a"))  # the second one is refused
        if step == 6:
            found.append(Load(path=f"tinker://{MODEL}/weights/a", directory=str(directory), optimizer=True))
        found.append(Save(kind="sampler_weights", sampler=f"s:sampler:{step}"))
    return found


async def run(server: Server, kills: int, seed: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Send the program as fast as an asynchronous client, and kill the trainer at random moments."""
    rng, client = np.random.default_rng(seed), Client(server, MODEL)
    directory = tinker_place(server.data_dir, MODEL) / "weights" / "a"
    await client.create()
    requests = [await client.send(body) for body in program(directory)]
    await server.kill_at_random(requests, kills, rng)
    results = [await client.result(request) for request in requests]
    passed = sum(len(logprobs) // 4 for one in results if isinstance(one, Forwarded) for logprobs in one.logprobs)
    trained = await trained_tokens(server)
    # an answer that was kept in the moment of a kill is not counted, and none twice
    assert 0 < trained <= passed if kills else trained == passed
    await client.call(forward_backward(99, backward=False))  # which brings the model back, if it was covered
    vectors = {name: await server.adapter(MODEL, name) for name in ("weights", "exp_avg", "exp_avg_sq", "gradient")}
    return results, vectors


async def trained_tokens(server: Server) -> int:
    """Return what was counted for the tenant in the last hours."""
    hour = int(time.time()) // HOUR_S
    spent = await TinkerSpent(server.ctx.store.redis).between("acme", hour - 1, hour + 1)
    return sum(one.amount for one in spent if one.kind == "training")


async def test_kills_at_random_moments_change_nothing(
    bus: Bus, store: Store, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = await fresh_server(bus, store, base, tmp_path / "undisturbed")
    expected, weights = await run(undisturbed, 0, 0)
    await undisturbed.kill()
    for seed, store_s in enumerate((0.0, 0.1, 30.0)):
        monkeypatch.setattr(model_runner, "STORE_S", store_s)
        server = await fresh_server(bus, store, base, tmp_path / f"killed-{seed}")
        found, vectors = await run(server, 10, seed)
        await server.kill()
        assert server.epoch == 11
        assert found == expected
        for name, vector in weights.items():
            assert torch.equal(vectors[name], vector), name


async def test_a_stopped_trainer_stores_its_models_and_the_stream_is_empty(server: Server) -> None:
    client = Client(server, MODEL)
    await client.create()
    for body in (forward_backward(0), STEP, forward_backward(1)):
        await client.call(body)
    weights, gradient = [(await server.adapter(MODEL, name)).clone() for name in ("weights", "gradient")]
    consumer = server.job._intake._consumer
    assert consumer is not None
    await until(consumer.settled, lambda place: place >= 4)
    await server.stop()
    assert await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB)) == 0
    await server.start()
    assert (await client.call(STEP)).metrics["steps"] == 2.0
    adapter = adapter_files.restore("x", server.state(MODEL) / model_files.STATE)
    assert torch.equal(adapter.weights, weights) and torch.equal(adapter.gradient, gradient)


async def test_answers_are_written_once_and_covered_commands_are_not_repeated(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()
    first = await client.call(forward_backward(0))
    stepped = await client.call(STEP)
    await server.kill()
    await server.start()
    assert (await client.call(STEP)).metrics["steps"] == 2.0  # after the replay of the first three
    assert await client.result(f"{MODEL}#1") == first and await client.result(f"{MODEL}#2") == stepped
    await server.stop()
    await server.start()
    await client.send(STEP, seq=2, copy=" again")  # beyond the stream's memory of what it has
    assert (await client.call(STEP)).metrics["steps"] == 3.0
    assert await client.result(f"{MODEL}#2") == stepped
    await server.ctx.store.redis.delete(f"tinker:answer:{MODEL}#2")
    await client.send(STEP, seq=2, copy=" once more")
    assert "not kept any more" in (await client.result(f"{MODEL}#2")).error


async def test_a_disk_that_refuses_the_state_costs_nothing_but_repetitions(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(model_runner, "STORE_S", 0.0)
        context.setattr(model_files, "write_state", refuse)
        for number in range(3):
            await client.call(forward_backward(number))
            await client.call(STEP)
    await server.kill()
    await server.start()
    assert (await client.call(STEP)).metrics["steps"] == 4.0
    await client.call(Unload())


async def test_a_disk_that_fails_when_a_model_comes_back_delays_its_commands(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "RETRY_S", 0.05)
    client = Client(server, MODEL)
    await client.create()
    for body in (forward_backward(0), STEP, forward_backward(1)):
        await client.call(body)
    weights, gradient = [(await server.adapter(MODEL, name)).clone() for name in ("weights", "gradient")]
    await server.kill()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(checkpoint, "replace_durably", refuse)
        await server.start()
        sent = await client.send(forward_backward(2, backward=False))

        async def told() -> object:
            await server.job._report()
            return server.worker.info.detail.get("queue")

        await until(told, lambda queue: "1 waiting for disk" in str(queue))
        await server.job._purge()
        assert await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB)) >= 4
        assert await server.records.answered(sent) is None
    assert isinstance(await client.result(sent), Forwarded)
    assert server.job._shared.stuck == set()
    for name, vector in (("weights", weights), ("gradient", gradient)):
        assert torch.equal(await server.adapter(MODEL, name), vector), name
    assert (await client.call(STEP)).metrics["steps"] == 2.0


async def test_a_state_that_cannot_be_opened_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "RETRY_S", 0.05)
    client = Client(server, MODEL)
    await client.create()
    await client.call(STEP)
    await server.stop()
    state = server.state(MODEL) / model_files.STATE
    state.rename(state.with_suffix(".aside"))
    state.symlink_to(state)  # opening it fails, and safetensors calls that missing
    await server.start()
    sent = await client.send(STEP)
    await until(lambda: _is_stuck(server))
    state.with_suffix(".aside").rename(state)
    assert (await client.result(sent)).metrics["steps"] == 2.0


async def test_a_repetition_that_is_refused_ends_the_model_and_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()
    first = await client.call(forward_backward(0))
    stepped = await client.call(STEP)
    await server.kill()
    with monkeypatch.context() as context:
        context.setattr(conftest, "LIMITS", replace(conftest.LIMITS, datum_tokens=3))
        await server.start()
        failed = await client.call(STEP)
        assert "request 1" in failed.error and "cannot be any more" in failed.error and "at most 3" in failed.error
        assert [await client.result(f"{MODEL}#{seq}") for seq in (1, 2)] == [first, stepped]
        await server.stop()
    await server.start()
    assert await client.call(STEP) == failed, "the end is kept"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
async def test_a_repetition_that_the_machine_prevents_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(model_runner, "RETRY_S", 0.05)
    client = Client(server, MODEL)
    await client.create()
    for body in (forward_backward(0), STEP, forward_backward(1)):
        await client.call(body)
    weights, gradient = [(await server.adapter(MODEL, name)).clone() for name in ("weights", "gradient")]
    await server.kill()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as context:
        context.setattr(AdapterBank, "run_pass", fail)
        await server.start()
        sent = await client.send(STEP)
        await until(lambda: _is_stuck(server))
        assert await server.records.answered(sent) is None
    assert (await client.result(sent)).metrics["steps"] == 2.0
    await server.kill()
    await server.start()
    await client.call(forward_backward(2, backward=False))
    undisturbed = Client(server, "s:train:1")
    await undisturbed.create()
    for body in (forward_backward(0), STEP, forward_backward(1)):
        await undisturbed.call(body)
    for name, vector in (("weights", weights), ("gradient", gradient)):
        assert torch.equal(await server.adapter(undisturbed.model, name), vector), name
    await undisturbed.call(STEP)
    assert torch.equal(await server.adapter(MODEL, "weights"), await server.adapter(undisturbed.model, "weights"))


async def _is_stuck(server: Server) -> bool:
    return server.job._shared.stuck == {MODEL}


async def test_a_damaged_state_is_said_and_other_models_go_on(server: Server) -> None:
    broken, fine = Client(server, MODEL), Client(server, "s:train:1")
    for client in (broken, fine):
        await client.create()
        await client.call(STEP)
    await server.stop()
    (server.state(MODEL) / model_files.STATE).write_bytes(b"spoiled")
    await server.start()
    failed = await broken.call(STEP)
    assert failed.category == "server" and f"model {MODEL} cannot be read" in failed.error
    assert str(server.data_dir) not in failed.error
    assert (await fine.call(STEP)).metrics["steps"] == 2.0
