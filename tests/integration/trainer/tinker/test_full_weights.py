"""Models of which all weights are trained: kills change nothing, they take turns, and checkpoints go in and out."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.tinker import model_files, model_runner, sampler_files
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.state.store import Store
from opentinker.shared.types.tinker import Failed, Load, Loaded, LoraShape, Save, Saved, TinkerSession, tinker_place
from tests.conftest import until
from tests.integration.trainer.tinker.conftest import (
    STEP,
    Client,
    Server,
    forward_backward,
    fresh_server,
)

FULL = LoraShape(rank=0)
MODELS = ("s:train:0", "s:train:1")
VECTORS = ("weights", "exp_avg", "exp_avg_sq", "gradient")


@pytest.fixture(scope="module")
def whole(small: Path) -> BaseModel:
    """A base of its own: adapters change the layers of theirs."""
    return BaseModel(str(small))


@pytest.fixture
async def server(bus: Bus, store: Store, whole: BaseModel, tmp_path: Path) -> AsyncIterator[Server]:
    server = await fresh_server(bus, store, whole, tmp_path / "data", full=True)
    yield server
    await server.kill()


async def run(server: Server, kills: int) -> dict[str, torch.Tensor]:
    """Train two models that take turns; kill the trainer at random moments. Returns their vectors."""
    rng, clients = np.random.default_rng(kills), [Client(server, model) for model in MODELS]
    requests = []
    for client in clients:
        await client.create(FULL)
    for step in range(6):
        for number, client in enumerate(clients):
            requests += [await client.send(forward_backward(10 * step + number)), await client.send(STEP)]
        if step == 3:
            requests.append(await clients[0].send(Save(kind="weights", name="a")))
    await server.kill_at_random(requests, kills, rng)
    assert not [one for one in [await client.result(name) for name in requests] if isinstance(one, Failed)]
    found: dict[str, torch.Tensor] = {}
    for client in clients:
        await client.call(forward_backward(99, backward=False))
        found |= {f"{client.model} {name}": await server.adapter(client.model, name) for name in VECTORS}
    return found


async def test_kills_change_no_bit_of_models_that_take_turns(
    bus: Bus, store: Store, whole: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = await fresh_server(bus, store, whole, tmp_path / "undisturbed", full=True)
    expected = await run(undisturbed, 0)
    await undisturbed.kill()
    for store_s in (0.0, 30.0):
        monkeypatch.setattr(model_runner, "STORE_S", store_s)
        killed = await fresh_server(bus, store, whole, tmp_path / f"killed-{store_s}", full=True)
        found = await run(killed, 5)
        await killed.kill()
        assert killed.epoch == 6
        for name, vector in expected.items():
            assert torch.equal(found[name], vector), name


async def test_a_checkpoint_is_a_directory_of_transformers_and_the_start_of_another_model(server: Server) -> None:
    first, second, third = Client(server, MODELS[0]), Client(server, MODELS[1]), Client(server, "s:train:2")
    await first.create(FULL)
    for body in (forward_backward(0), STEP):
        await first.call(body)
    saved = await first.call(Save(kind="weights", name="a"))
    assert saved.path == f"tinker://{MODELS[0]}/weights/a"
    assert (await first.call(Save(kind="sampler_weights", name="b"))).path.endswith("/sampler_weights/b")
    checkpoints = {one.kind: one for one in await server.records.checkpoints(MODELS[0])}
    places = {kind: tinker_place(server.data_dir, MODELS[0]) / kind / one.place for kind, one in checkpoints.items()}
    sizes = {kind: sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) for kind, place in places.items()}
    assert {kind: one.size for kind, one in checkpoints.items()} == sizes
    assert {one.lora for one in checkpoints.values()} == {FULL}
    loaded = AutoModelForCausalLM.from_pretrained(places["sampler_weights"], dtype=torch.float32)
    weights = await server.adapter(MODELS[0], "weights")
    assert torch.equal(torch.cat([one.detach().flatten() for one in loaded.parameters()]), weights)

    await second.create(FULL, start=str(places["weights"]), optimizer=True)
    for name in VECTORS:
        assert torch.equal(await server.adapter(MODELS[1], name), await server.adapter(MODELS[0], name)), name
    await third.create(FULL, start=str(places["sampler_weights"]))
    assert torch.equal(await server.adapter("s:train:2", "weights"), weights)
    assert not (await server.adapter("s:train:2", "exp_avg")).any()

    for body in (forward_backward(1), STEP):
        await first.call(body)
    assert not torch.equal(await server.adapter(MODELS[0], "weights"), weights)
    await first.call(Load(path=saved.path, directory=str(places["weights"]), optimizer=True))
    assert torch.equal(await server.adapter(MODELS[0], "weights"), weights)
    refused = await third.call(Load(path="p", directory=str(places["sampler_weights"]), optimizer=True))
    assert isinstance(refused, Failed) and "no optimizer state" in refused.error


async def test_few_weights_of_samplers_are_kept_for_each_is_as_large_as_the_base(server: Server) -> None:
    client = Client(server, MODELS[0])
    await client.create(FULL)
    await server.records.open_session(TinkerSession(id="s", tenant="acme", created=1.0))
    root = tinker_place(server.data_dir, MODELS[0]) / "samplers"
    count = sampler_files.FULL_MOST_KEPT + 3
    for number in range(count):
        await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}"))
        sampler = await server.records.sampler("acme", f"s:sampler:{number}")
        await server.records.used_sampler(sampler, sampler)
    for path in root.iterdir():
        os.utime(path, (time.time() - sampler_files.FULL_KEPT_S - 1,) * 2)
    await server.job._tidy()
    last = [f"s:sampler:{number}@{number + 1}" for number in range(3, count)]
    assert sorted(path.name for path in root.iterdir()) == last


async def test_replaced_weights_are_bounded_in_number_whatever_their_age(server: Server) -> None:
    client, most = Client(server, MODELS[0]), sampler_files.FULL_MOST_KEPT
    await client.create(FULL)
    for number in range(most + 3):
        await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}"))
        for kind in ("weights", "sampler_weights", "external_weights"):
            assert isinstance(await client.call(Save(kind=kind, name="a", overwrite=True)), Saved)
    await server.records.finish("s", "{}")
    place = tinker_place(server.data_dir, MODELS[0])
    roots = [place / name for name in ("samplers", "weights", "sampler_weights", "external_weights")]
    numbers = [sorted(int(path.name.rpartition("@")[2]) for path in root.iterdir()) for root in roots]
    await server.job._tidy()
    left = [sorted(int(path.name.rpartition("@")[2]) for path in root.iterdir()) for root in roots]
    assert left == [found[-1 - most :] for found in numbers], "the newest, and the last that it replaced"
    for root in roots:
        for path in root.iterdir():
            os.utime(path, (time.time() - sampler_files.FULL_KEPT_S - 1,) * 2)
    await server.job._tidy()
    assert [len(list(root.iterdir())) for root in roots] == [1] * 4


async def test_one_copy_of_a_model_is_held_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all models: by saves, stored states, what is restored after a kill, and what is loaded."""
    held, most, reads = set[object](), [0], []

    def watch(owner: object, name: str, copy_in: Callable[[Any], Any]) -> None:
        function = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            reads.append(name)
            if (copy := copy_in(found)) is not None:
                held.add(mark := object())
                weakref.finalize(copy, held.discard, mark)
            end = time.monotonic() + 1.0  # the thread that had the copy before may be about to drop it
            while len(held) > 1 and time.monotonic() < end:
                time.sleep(0.001)
            most.append(len(held))
            return found

        monkeypatch.setattr(owner, name, wrapper)

    watch(AdapterBank, "read", lambda found: found)
    watch(model_files, "read_state", lambda found: found[0] if isinstance(found, tuple) else None)
    watch(model_files, "read_vectors", lambda found: found[0]["weights"])
    watch(model_files, "write_checkpoint", lambda _: None)
    clients = [Client(server, f"s:train:{number}") for number in range(3)]
    for client in clients:
        await client.create(FULL)
    assert reads.count("read") == len(clients), "one each, for the stored state"
    monkeypatch.setattr(model_runner, "STORE_S", 0.0)
    requests = [
        await client.send(body)
        for number in range(3)
        for client in clients
        for body in (forward_backward(number), STEP, Save(kind="weights", name=f"w{number}"))
    ]
    assert not [one for one in [await clients[0].result(name) for name in requests] if isinstance(one, Failed)]
    monkeypatch.setattr(model_runner, "STORE_S", 30.0)
    await until(lambda: asyncio.sleep(0.0, not any(one._storing for one, _ in server.job._models.values())))
    await server.kill()
    await server.start()
    places = [tinker_place(server.data_dir, client.model) / "weights" / "w0@3" for client in clients]
    loads = [
        await client.send(Load(path="p", directory=str(place))) for client, place in zip(clients, places, strict=True)
    ]
    assert [await clients[0].result(name) for name in loads] == [Loaded(path="p")] * len(clients)
    assert reads.count("read_vectors") == len(clients) and max(most) == 1


async def test_an_adapter_is_refused_here_and_all_weights_elsewhere(
    bus: Bus, store: Store, whole: BaseModel, server: Server, tmp_path: Path
) -> None:
    refused = await Client(server, MODELS[0]).create(LoraShape(rank=4))
    assert isinstance(refused, Failed) and "trains all weights, and no adapters" in refused.error
    await server.kill()
    other = await fresh_server(bus, store, whole, tmp_path / "other")
    refused = await Client(other, MODELS[0]).create(FULL)
    assert isinstance(refused, Failed) and "trains adapters, and not all weights" in refused.error
    await other.kill()
