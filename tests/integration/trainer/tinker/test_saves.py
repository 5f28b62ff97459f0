"""Checkpoints and weights for samplers: what is written, replaced, loaded and removed."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.adapter_bank import AdapterBank
from opentinker.services.trainer.bank.copies import TENANT_COPIES
from opentinker.services.trainer.tinker import model_files, sampler_files
from opentinker.shared.types.tinker import (
    Failed,
    Load,
    Loaded,
    LoraShape,
    Sampler,
    Save,
    Saved,
    TinkerSession,
    Unload,
    tinker_place,
)
from tests.conftest import WAIT_S, until
from tests.integration.trainer.tinker.conftest import (
    JOB,
    LORA,
    STEP,
    Client,
    Server,
    forward_backward,
)


async def test_a_save_that_waited_is_refused_where_others_have_filled_the_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_CHECKPOINT_BYTES", 1)
    client = Client(server, "s:train:0")
    await client.create()
    sent = [await client.send(Save(kind="weights", name=name)) for name in ("a", "b")]
    first, second = [await client.result(request) for request in sent]
    assert first == Saved(path="tinker://s:train:0/weights/a")
    assert "b cannot be saved" in second.error and "may have 1" in second.error
    assert [path.name for path in (tinker_place(server.data_dir, client.model) / "weights").iterdir()] == ["a@1"]


async def test_a_tenant_has_a_bounded_number_of_checkpoints(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_CHECKPOINTS", 2)
    client = Client(server, "s:train:0")
    await client.create()
    for name in ("a", "b"):
        await client.call(Save(kind="weights", name=name))
    refused = await client.call(Save(kind="sampler_weights", name="c"))
    assert "c cannot be saved" in refused.error and "has 2 checkpoints" in refused.error
    assert isinstance(await client.call(Save(kind="weights", name="a", overwrite=True)), Saved)
    assert isinstance(await client.call(Save(kind="sampler_weights", sampler="s:sampler:0")), Saved)


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
    assert await begun["whole"].create(start=str(directory), optimizer=True) == Loaded()
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


async def test_many_saves_of_a_client_hold_few_copies_and_delay_no_other_tenant(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = Client(server, "s:train:0"), Client(server, "t:train:0", tenant="beta")
    for one in (client, other):
        await one.create()
    made, may_write = list[weakref.ref[Adapter]](), threading.Event()
    read, write = AdapterBank.read, model_files.write_checkpoint

    def counted(bank: AdapterBank, name: str) -> Adapter:
        made.append(weakref.ref(copy := read(bank, name)))
        return copy

    def held(*args: Any, **options: Any) -> int:
        may_write.wait(WAIT_S)
        return write(*args, **options)

    monkeypatch.setattr(AdapterBank, "read", counted)
    monkeypatch.setattr(model_files, "write_checkpoint", held)
    sent = [await client.send(Save(kind="weights", name=f"n{number}")) for number in range(8)]
    try:
        await until(lambda: len(made) >= TENANT_COPIES)
        for seed in range(3):
            await other.call(forward_backward(seed))
        assert sum(one() is not None for one in made) == TENANT_COPIES
    finally:
        may_write.set()
    assert all([isinstance(await client.result(request), Saved) for request in sent])
    assert len(made) == 8 and server.bank.copies._bytes == 0


async def test_a_disk_error_is_answered_without_the_place_of_the_file(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, "s:train:0")
    await client.create()

    def refuse(directory: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(model_files, "write_checkpoint", refuse)
    failed = await client.call(Save(kind="weights", name="a"))
    assert failed == Failed(error="the request failed: No space left on device", category="server")


async def test_replaced_and_unnamed_weights_are_bounded_in_number_and_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2
    monkeypatch.setattr(sampler_files, "MOST_KEPT", most)
    client = Client(server, "s:train:0")
    await client.create()
    for number in range(most + 3):
        assert isinstance(await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}")), Saved)
        assert isinstance(await client.call(Save(kind="weights", name="a", overwrite=True)), Saved)
    await server.records.finish("s", "{}")
    await server.job._tidy()
    place = tinker_place(server.data_dir, client.model)
    (record,) = await server.records.checkpoints(client.model)
    left = [path for kind in ("samplers", "weights") for path in (place / kind).iterdir()]
    assert len(left) == 2 * (1 + most), "the newest, and the last that it replaced"
    unlisted = sum(file.stat().st_size for path in left if path.name != record.place for file in path.iterdir())
    stored = await server.records.stored_bytes("acme")
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_CHECKPOINT_BYTES", stored + unlisted + 1)
    assert isinstance(await client.call(Save(kind="sampler_weights", sampler="s:sampler:8")), Saved)
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_CHECKPOINT_BYTES", stored + unlisted)
    for save in (Save(kind="sampler_weights", sampler="s:sampler:9"), Save(kind="weights", name="b")):
        refused = await client.call(save)
        assert isinstance(refused, Failed) and f"{unlisted} bytes of weights on {JOB}" in refused.error


async def test_what_a_killed_trainer_has_not_finished_is_removed(server: Server) -> None:
    client = Client(server, "s:train:0")
    await client.create()
    place, long_ago = tinker_place(server.data_dir, client.model), time.time() - sampler_files.UNFINISHED_S - 1
    under_way = place / "weights" / ".b@5-1-1-new"
    left = [place / "weights" / ".a@3-1-1-new", place / "weights" / ".a@3-1-1-old", place / "samplers" / ".c@4-1-1-new"]
    for path in (*left, under_way):
        (path / "trainer").mkdir(parents=True)
        (file := path / "trainer" / "state.safetensors").write_bytes(bytes(8))
        for one in (path / "trainer", path) if path == under_way else (file, path / "trainer", path):
            os.utime(one, (long_ago, long_ago))

    async def unlisted() -> dict[str, str]:
        await server.job._tidy()
        found: dict[str, str] = await server.ctx.store.redis.hgetall(f"tinker:unlisted:{JOB}")
        return found

    assert await unlisted() == {"acme": "8"}
    assert under_way.exists() and not any(path.exists() for path in left)
    os.utime(under_way / "trainer" / "state.safetensors", (long_ago, long_ago))
    assert await unlisted() == {"acme": "0"} and not under_way.exists()


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
    await server.records.open_session(TinkerSession(id="dead", tenant="acme", created=1.0))
    await server.records.finish("dead", "{}")
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
    server: Server,
) -> None:
    await server.records.open_session(TinkerSession(id="s", tenant="acme", created=1.0))
    client = Client(server, "s:train:0")
    await client.create()
    for number in range(3):
        await client.call(Save(kind="sampler_weights", sampler=f"s:sampler:{number}"))
    first, _, third = [await server.records.sampler("acme", f"s:sampler:{number}") for number in range(3)]
    await server.records.used_sampler(first, first)
    assert await sampler_files.kept_for_clients(server.records, client.model, most=2) == {
        first.directory,
        third.directory,
    }
