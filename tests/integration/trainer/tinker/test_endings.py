"""A lease of a Tinker server that ends in the midst of commands: each is answered rightly or is the next trainer's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisLost

from opentinker.services.trainer.bank.limits import BankEnded
from opentinker.services.trainer.tinker import model_files, model_runner
from opentinker.shared.messaging.subjects import COMMAND
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.tinker import (
    Answer,
    Failed,
    Load,
    Loaded,
    Sampler,
    Save,
    Saved,
    Stepped,
    TinkerSession,
    Unload,
    tinker_place,
)
from tests.conftest import WAIT_S, until
from tests.integration.trainer.tinker.conftest import JOB, STEP, Client, Server, forward_backward

MODEL = "s:train:0"


async def test_a_trainer_that_cannot_ask_whether_the_job_is_over_stores_its_models(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()
    await client.call(STEP)

    async def fail(_: str) -> None:
        raise RedisLost("connection refused")

    with monkeypatch.context() as context:
        context.setattr(server.ctx.store, "job", fail)
        await server.stop()
    found = model_files.read_state(server.state(MODEL), server.epoch, "x")
    assert isinstance(found, tuple) and found[1].seq == 1
    await server.start()
    assert (await client.call(STEP)).metrics["steps"] == 2.0


async def test_a_state_does_not_cover_a_command_whose_answer_was_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()
    runner, records = server.job._models[MODEL][0], server.job._shared.records
    runner._broken = asyncio.get_running_loop().create_future()  # so that the lease does not end before the store
    answer = records.answer

    async def fail(one: Answer) -> bool:
        if one.request == f"{MODEL}#1":
            raise RedisLost("connection refused")
        return await answer(one)

    monkeypatch.setattr(records, "answer", fail)
    await client.send(STEP)
    await until(runner._broken.done)
    assert isinstance(runner._broken.exception(), RedisLost)
    await runner._store()
    assert runner._stored == 0 and 1 in runner.uncovered
    monkeypatch.undo()
    await server.kill()
    await server.start()
    assert isinstance(await client.result(f"{MODEL}#1"), Stepped)


@pytest.mark.parametrize("created", [True, False])
async def test_commands_of_a_bank_that_ends_are_the_next_trainers(server: Server, created: bool) -> None:
    client = Client(server, MODEL)
    expected: tuple[Any, ...] = (Loaded, Stepped)
    async with server.bank._slots:
        pass
    if created:
        await client.create()
    running = server.running
    assert running is not None
    async with server.bank._slots:  # nothing is carried out
        request = await client.send(STEP) if created else ""
        if created:
            await until(lambda: server.job._models[MODEL][0]._tasks)
        server.bank.task.cancel()
        await asyncio.wait([server.bank.task], timeout=WAIT_S)
    if not created:
        waiting = asyncio.create_task(client.create())
        request = f"{MODEL}#0"
    done, _ = await asyncio.wait([running], timeout=WAIT_S)
    assert done and isinstance(running.exception(), BankEnded)
    assert await server.records.answered(request) is None
    assert not (server.state(MODEL) / model_files.ENDED).exists()
    await server.kill()
    await server.start()
    assert isinstance(await client.result(request), expected)
    if not created:
        await waiting


@pytest.mark.parametrize("body", ["create", "load", "unload"])
async def test_a_command_whose_lease_ends_between_its_state_and_its_answer_is_answered_by_the_next_trainer(
    server: Server, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    client, records = Client(server, MODEL), server.records
    bodies: dict[str, Any] = {"unload": Unload()}
    if body != "create":
        await client.create()
        saved = await client.call(Save(kind="weights", name="a"))
        directory = tinker_place(server.data_dir, MODEL) / "weights" / (await records.checkpoints(MODEL))[0].place
        bodies["load"] = Load(path=saved.path, directory=str(directory))
    request = f"{MODEL}#{client.seq}"
    answer = server.job._shared.records.answer

    async def fail(one: Answer) -> bool:
        if one.request == request:
            await server.job._purge()  # what the stored states cover leaves the stream
            raise RedisLost("connection refused")
        return await answer(one)

    monkeypatch.setattr(server.job._shared.records, "answer", fail)
    waiting = asyncio.create_task(client.create() if body == "create" else client.call(bodies[body]))
    running = server.running
    assert running is not None
    done, _ = await asyncio.wait([running], timeout=WAIT_S)
    assert done and await records.answered(request) is None
    monkeypatch.undo()
    await server.kill()
    await server.start()
    assert isinstance(await asyncio.wait_for(waiting, WAIT_S), Loaded)

    async def left() -> int:
        await server.job._purge()
        return await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB))

    await until(left, lambda count: count == 0)


async def test_a_first_command_that_cannot_be_read_ends_its_model(server: Server) -> None:
    client = Client(server, MODEL)
    request = f"{MODEL}#0"
    await server.ctx.bus.nc.publish(COMMAND.at(job=JOB), b"\xc1", headers={"Nats-Msg-Id": request})
    client.seq = 1
    assert "cannot be read" in (await client.result(request)).error
    assert f"{MODEL} was not created" in (await client.call(STEP)).error

    async def left() -> int:
        await server.job._purge()
        return await server.ctx.bus.count("COMMANDS", COMMAND.at(job=JOB))

    await until(left, lambda count: count == 0)


async def test_a_job_that_is_over_does_not_wait_for_what_it_stores(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, MODEL)
    await client.create()
    began, ready = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        began.set()
        ready.wait(WAIT_S)

    monkeypatch.setattr(model_files, "write_state", write)
    monkeypatch.setattr(model_runner, "STORE_S", 0.0)
    try:
        await client.call(forward_backward(0))
        await until(began.is_set)
        late = await client.send(STEP, seq=7)
        runner, running = server.job._models[MODEL][0], server.running
        assert running is not None
        await until(lambda: runner.unanswered)
        await server.ctx.store.transition(JOB, JobState.CANCELLED)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=WAIT_S / 2)
        assert done
        assert isinstance(await client.result(late), Failed)
    finally:
        ready.set()


@pytest.mark.parametrize("save", [
    Save(kind="weights", name="a", overwrite=True), Save(kind="sampler_weights", sampler="s:sampler:0"),
])  # fmt: skip
async def test_an_older_trainer_replaces_no_files(server: Server, save: Save) -> None:
    client = Client(server, MODEL)
    await client.create()
    await client.call(Save(kind="weights", name="a"))
    weights = tinker_place(server.data_dir, MODEL) / "weights" / "a@1"
    before, records = weights.stat().st_ino, await server.records.checkpoints(MODEL)
    model_files.read_state(server.state(MODEL), server.epoch + 1, "x")  # as the next trainer does
    request, running = await client.send(save), server.running
    assert running is not None
    await asyncio.wait([running], timeout=WAIT_S)
    assert isinstance(running.exception(), Fenced)
    assert await server.records.answered(request) is None
    assert weights.stat().st_ino == before and await server.records.checkpoints(MODEL) == records
    samplers = weights.parents[1] / "samplers"
    assert not samplers.exists() or not list(samplers.iterdir())
    assert [path.name for path in weights.parent.iterdir()] == ["a@1"]


async def test_a_checkpoint_of_a_later_command_stays(server: Server) -> None:
    client, records = Client(server, MODEL), server.records
    await client.create()
    await client.call(Save(kind="weights", name="a"))
    weights = tinker_place(server.data_dir, MODEL) / "weights" / "a@1"
    before, (saved,) = weights.stat().st_ino, await records.checkpoints(MODEL)
    later = msgspec.structs.replace(saved, seq=99, step=7)
    assert await records.add_checkpoint(later)
    assert not await records.add_checkpoint(msgspec.structs.replace(saved, expires=5.0))
    assert await client.call(Save(kind="weights", name="a", overwrite=True)) == Saved(path=saved.path)
    assert weights.stat().st_ino == before and await records.checkpoints(MODEL) == [later]
    assert not await records.expired(10.0)


async def test_the_newest_sampler_is_that_of_the_latest_command(server: Server) -> None:
    made = Sampler(
        id="s:sampler:1", tenant="t", session="s", job=JOB, base="b", model=MODEL, version=f"{MODEL}@10", follows=True
    )
    older = msgspec.structs.replace(made, id="s:sampler:0", version=f"{MODEL}@9")
    await server.records.open_session(TinkerSession(id="s", tenant="t", created=1.0))
    for sampler in (made, older):
        await server.records.add_sampler(sampler)
    assert await server.records.newest_of(older) == made
    newer = msgspec.structs.replace(made, id="s:sampler:2", version=f"{MODEL}@11")
    await server.records.add_sampler(newer)
    assert await server.records.newest_of(older) == newer
