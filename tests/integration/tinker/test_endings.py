"""Sessions, samplers and models end, with their client, their server or their key."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.http.errors import TooMany
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.tinker import endings
from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.services.scheduler.tinker.endings import Endings
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import parse
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import OptimStep, Sampler, TinkerModel, Unload, tinker_place
from tests.conftest import until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, passes, sampler_in
from tests.integration.tinker.test_sampling import asked
from tests.support.api import Http, new_key_of
from tests.support.scheduling import running


async def leave(ctx: Context, session: str) -> None:
    """Its last heartbeat was two days ago."""
    await ctx.store.redis.zadd("tinker:beats", {session: time.time() - 2 * 86400})
    await ctx.store.redis.delete(f"tinker:beat:{session}")


@pytest.fixture
async def closing(ctx: Context, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Access]:
    """Closes sessions that were left, round by round."""
    monkeypatch.setattr(endings, "ROUND_S", 0.02)
    monkeypatch.setattr(endings, "RECONNECT_S", 0.0)
    access = Access(ctx)
    async with running(Endings(access, Commands(access)).run()):
        yield access


async def keys_of(ctx: Context, *names: str) -> list[str]:
    """Keys of Redis that name one of these."""
    return [key async for key in ctx.store.redis.scan_iter("tinker:*") if any(name in key for name in names)]


async def test_a_model_is_unloaded_after_the_commands_that_it_has_had(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    workers.answers = False
    await user.raw("forward_backward", passes(model, 1))
    promise = await user.ok("unload_model", model_id=model, type="unload_model")
    assert promise == {"request_id": f"{model}#2", "model_id": model}
    assert await user.ok("unload_model", model_id=model) == promise, "sent again"
    assert workers.commands[-1].body == Unload() and [one.seq for one in workers.commands] == [0, 1, 2]
    for command in workers.commands[1:]:
        await workers.say(command.request, workers.result_of(command))
    assert (await user.result(promise))["model_id"] == model
    status, answer = await user.post("optim_step", model_id=model, seq_id=3)
    assert status == 410 and "was unloaded" in answer["detail"]
    assert await workers.store.live_models("default") == []
    assert (await user.get(f"training_runs/{model}"))[0] == 200
    assert (await user.post("unload_model", model_id=model.replace(":0", ":1")))[0] == 404


async def test_a_command_that_comes_before_the_unload_is_carried_out_first(user: Client, workers: FakeWorkers) -> None:
    model = await user.model()
    assert await workers.store.unload_number(model) == 1
    await user.result(await user.ok("optim_step", model_id=model, seq_id=1))
    assert (await user.ok("unload_model", model_id=model))["request_id"] == f"{model}#2"
    await until(lambda: [type(one.body) for one in workers.commands[1:]] == [OptimStep, Unload])


async def test_what_a_client_left_behind_is_removed(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    model, kept = await user.model(), await user.model()
    left, lives = model.partition(":")[0], kept.partition(":")[0]
    sampler = await sampler_in(user, left)
    place = tinker_place(ctx.settings.data_dir, model)
    (place / "state").mkdir(parents=True)
    await user.ok("session_heartbeat", session_id=lives)
    await leave(ctx, left)
    await until(lambda: keys_of(ctx, left), lambda keys: not [one for one in keys if "answer" not in one])
    assert [one.model for one in workers.commands if isinstance(one.body, Unload)] == [model]
    await until(lambda: not place.exists())
    assert (await user.get(f"training_runs/{model}"))[0] == 404
    assert (await user.post("asample", **asked(sampler)))[0] == 404
    assert (await user.post("session_heartbeat", session_id=left))[0] == 410
    assert (await user.get("sessions"))[1]["sessions"] == [lives]
    assert (await user.get(f"training_runs/{kept}"))[0] == 200


async def test_a_session_that_cannot_be_closed_keeps_no_other_one(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = await user.model(), await user.model()
    unload = Commands.unload

    async def failing(commands: Commands, model: TinkerModel) -> Any:
        if model.id == stuck:
            raise TooMany("commands wait", 1.0)
        return await unload(commands, model)

    monkeypatch.setattr(Commands, "unload", failing)
    await leave(ctx, stuck.partition(":")[0])
    await leave(ctx, session := other.partition(":")[0])
    await until(lambda: workers.store.has_session(session), lambda found: not found)
    assert await workers.store.has_session(stuck)


async def test_clients_have_time_to_come_back_after_an_outage(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "ROUND_S", 0.02)
    session = (await user.model()).partition(":")[0]
    await leave(ctx, session)
    access = Access(ctx)
    closer, rounds = Endings(access, Commands(access)), 0
    sessions_left = closer._store.sessions_left

    async def counted(before: float) -> Any:
        nonlocal rounds
        rounds += 1
        return await sessions_left(before)

    monkeypatch.setattr(closer._store, "sessions_left", counted)
    async with running(closer.run()):
        await until(lambda: rounds >= 3)
        closer._since -= 3600  # it has run for long
        closer._seen -= 3600  # and then the machine was suspended
        before = rounds
        await until(lambda: rounds >= before + 3)
        assert await workers.store.has_session(session)
        await user.ok("session_heartbeat", session_id=session)
        closer._since -= 3600
        before = rounds
        await until(lambda: rounds >= before + 3)
        assert await workers.store.has_session(session), "its client is back"
        await leave(ctx, session)
        await until(lambda: workers.store.has_session(session), lambda found: not found)


async def test_a_client_that_sends_heartbeats_stays_whatever_the_clocks_say(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    alive, left = await user.session(), await user.session()
    await leave(ctx, alive)
    await ctx.store.redis.set(f"tinker:beat:{alive}", "1", ex=300)
    await leave(ctx, left)
    await until(lambda: workers.store.has_session(left), lambda found: not found)
    await user.ok("session_heartbeat", session_id=alive)


async def test_answers_that_a_killed_client_has_not_read_make_room(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = 3 * 4
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.LARGE_ANSWER", answer - 1)
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", 1 << 20)
    killed, alive = await user.model(), await user.model()
    for model in (killed, alive):
        assert (await user.raw("forward_backward", passes(model, 1)))[0] == 200
        await until(partial(workers.store.answered, f"{model}#1"))

    async def unread() -> list[str]:
        await workers.store.drop_unread()
        names = await ctx.store.redis.zrange("tinker:kept", 0, -1)
        assert int(await ctx.store.redis.hget("tinker:bytes", "default")) == answer * len(names)
        return [name.removeprefix("tinker:answer:") for name in names]

    assert sorted(await unread()) == sorted([f"{killed}#1", f"{alive}#1"])
    await leave(ctx, killed.partition(":")[0])
    assert len(await unread()) == 2, "there is room"
    monkeypatch.setattr("opentinker.shared.state.tinker.held_bytes.MAX_HELD_BYTES", 4 * answer)
    assert await unread() == [f"{alive}#1"]
    status, gone = await user.post("retrieve_future", request_id=f"{killed}#1")
    assert status == 410 and "kept no more" in gone["detail"]
    await user.result({"request_id": f"{alive}#1"})


async def test_a_session_that_is_closing_takes_nothing_more(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    model = await user.model()
    session = model.partition(":")[0]
    assert not await workers.store.leave_session("default", session, time.time() - 10)
    assert await workers.store.live_models("default") == [model]
    await leave(ctx, session)
    assert await workers.store.leave_session("default", session, time.time() - 10) == 2
    assert await workers.store.live_models("default") == []
    assert (await user.post("session_heartbeat", session_id=session))[0] == 410
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    status, answer = await user.post("create_model", **body, model_seq_id=1)
    assert status == 404 and "has ended" in answer["detail"]
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    assert (await user.post("create_sampling_session", **made))[0] == 404
    assert await workers.store.models_in(session) == [model] and await workers.store.samplers_in(session) == []
    found = await workers.store.model("default", model)
    assert await workers.store.remove_model(found)
    await workers.store.end_model(found)  # of another scheduler
    with pytest.raises(NotFound):
        await workers.store.model("default", model)
    await workers.store.close_session(await workers.store.session("default", session))
    assert not [key for key in await keys_of(ctx, session) if model not in key]


async def test_a_session_is_closed_though_a_command_was_never_sent(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.MAX_WAITING", 3)
    model = await user.model()
    for seq in (1, 2, 3):
        await workers.store.ask(model, seq, "digest")
    assert (await user.post("optim_step", model_id=model, seq_id=4))[0] == 429
    await leave(ctx, session := model.partition(":")[0])
    await until(lambda: workers.store.has_session(session), lambda found: not found)
    assert [one.seq for one in workers.commands] == [0, 4] and workers.commands[-1].body == Unload()


async def test_sessions_that_were_left_make_room_for_new_ones(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.store.MAX_MODELS", 2)
    monkeypatch.setattr("opentinker.shared.state.tinker.sessions.MAX_SESSIONS", 3)
    first, second = await user.model(), await user.model()
    session = await user.session()
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    for finished in (first, second):
        assert (await user.post("create_session", tags=[]))[0] == 422
        assert (await user.post("create_model", **body, model_seq_id=0))[0] == 422
        if finished == first:
            reason = {"reason": {"type": "success"}}
            status, _ = await user.send("POST", f"sessions/{finished.partition(':')[0]}/finish", reason)
            assert status == 200
            assert (await user.post("session_heartbeat", session_id=finished.partition(":")[0]))[0] == 410
        else:
            await leave(ctx, finished.partition(":")[0])
        assert (await user.post("create_session", tags=[]))[0] == 422, "clients may come back after a restart"
    monkeypatch.setattr(endings, "RECONNECT_S", 0.0)
    kept = await user.model(session, 0)
    assert await workers.store.live_models("default") == sorted([first, kept]), "the one that was left first"
    assert len((await user.get("sessions"))[1]["sessions"]) == 2
    await user.session(), await user.session()
    assert await workers.store.live_models("default") == [kept]
    assert (await user.post("create_session", tags=[]))[0] == 422


async def test_records_of_earlier_versions_are_entered_once(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    model, ended = await user.model(), await user.model()
    await user.ok("unload_model", model_id=ended)
    session, redis = model.partition(":")[0], ctx.store.redis
    for saved in (checkpoint_of(ctx, model), checkpoint_of(ctx, model, name="second", size=5)):
        await workers.store.add_checkpoint(saved)
    indexes = ("tinker:beats", f"tinker:trained:{session}", "tinker:live:default", "tinker:stored")
    await redis.delete(*indexes, "tinker:indexed")
    before = time.time()
    await workers.store.complete_indexes()
    assert await workers.store.models_in(session) == [model] == await workers.store.live_models("default")
    assert await workers.store.stored_bytes("default") == 12
    assert float(await redis.zscore("tinker:beats", session)) >= before
    await redis.delete(*indexes)
    await workers.store.complete_indexes()
    assert await workers.store.stored_bytes("default") == 0


async def test_a_sampler_whose_weights_another_one_follows_is_in_use(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.sessions.MAX_SAMPLERS", 3)
    model = await user.model()
    session = model.partition(":")[0]
    made: dict[str, Any] = {"tenant": "default", "session": session, "job": workers.job, "base": BASE, "model": model}
    for seq, follows in enumerate((True, False)):
        sampler = Sampler(id=f"{session}:sampler:{seq}", version=f"{model}@{seq}", follows=follows, **made)
        await workers.store.add_sampler(sampler)
    idle = await sampler_in(user, session, 2)
    for seq in range(3):
        await ctx.store.redis.zadd("tinker:samplers:default", {f"{session}:sampler:{seq}": time.time() - 7200})
    await user.result(await user.ok("asample", **asked(f"{session}:sampler:0")))
    assert workers.samples[-1].version == f"{model}@1"
    kept = await sampler_in(user, session, 3)
    left = [f"{session}:sampler:0", f"{session}:sampler:1", kept]
    assert idle not in left and await workers.store.samplers_in(session) == left


async def test_the_record_of_a_model_stays_while_it_has_checkpoints(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    saved = checkpoint_of(ctx, model := await user.model())
    await workers.store.add_checkpoint(saved)
    made = {"session_id": await user.session(), "sampling_session_seq_id": 0, "model_path": saved.path}
    sampler = (await user.ok("create_sampling_session", **made))["sampling_session_id"]
    await leave(ctx, session := model.partition(":")[0])
    await until(lambda: workers.store.has_session(session), lambda found: not found)
    await until(lambda: keys_of(ctx, f"asked:{model}"), lambda keys: not keys)
    status, run = await user.get(f"training_runs/{model}")
    assert status == 200 and run["last_checkpoint"]["tinker_path"] == saved.path
    assert [one.id for one in await workers.store.samplers_of(model)] == [sampler], "its files stay"
    assert (await user.post("optim_step", model_id=model, seq_id=2))[0] == 410
    assert (await user.send("DELETE", f"training_runs/{model}/checkpoints/weights/first"))[0] == 200
    assert (await user.get(f"training_runs/{model}"))[0] == 404
    assert not [key for key in await keys_of(ctx, model) if "answer" not in key]


async def test_models_of_a_server_that_has_ended_are_removed_with_their_session(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    model = await user.model()
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    await leave(ctx, model.partition(":")[0])

    async def gone() -> bool:
        try:
            await workers.store.model("default", model)
        except NotFound:
            return True
        return False

    await until(gone)


async def test_a_server_that_has_ended_leaves_nothing_but_checkpoints(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    models = [await user.model() for _ in range(2)]
    places = [tinker_place(ctx.settings.data_dir, model) for model in models]
    await workers.store.add_checkpoint(msgspec.structs.replace(
        checkpoint_of(ctx, models[0], name="last@4"), name="last", place_name="last@4", seq=4
    ))  # fmt: skip

    def write(place: Path) -> None:
        for name in ("weights/last@3", "weights/.last@5-1-1-new", "sampler_weights/last@2", "external_weights/a@1"):
            (place / name).mkdir(parents=True, exist_ok=True)

    def left() -> list[str]:
        return [str(path.relative_to(place)) for place in places for path in place.glob("*/*")]

    for place in places:
        write(place)
        for name in ("state/model.safetensors", "samplers/s:sampler:0@3/adapter_model.safetensors"):
            (place / name).parent.mkdir(parents=True)
            (place / name).write_bytes(b"weights")
    await leave(ctx, models[0].partition(":")[0])
    await until(lambda: workers.store.has_session(models[0].partition(":")[0]), lambda found: not found)
    assert (places[0] / "weights/last@3").is_dir(), "samplers may use it while the server runs"
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    await JobCleaner(ctx, UNFENCED).clean()
    assert left() == ["weights/last@4"]
    write(places[0])  # the end of a save that was under way
    await until(lambda: closing.server_or_ended(workers.job), lambda job: job.state.final)
    await closing.forget_model(await workers.store.model("default", models[0]))
    assert left() == ["weights/last@4"]


async def test_a_url_ends_with_its_key(user: Client, api: Http, ctx: Context, workers: FakeWorkers) -> None:
    saved = checkpoint_of(ctx, await user.model())
    await workers.store.add_checkpoint(saved)
    mine, keys = Client(api, key := await new_key_of(ctx.store, "default")), KeyStore(ctx.store.redis)
    _, found = await mine.get(f"training_runs/{saved.model}/checkpoints/weights/first/external_weights_urls")
    url = found["urls"]["adapter_model.safetensors"].removeprefix(api.url)
    assert (await api("GET", url))[0] == 200
    assert (await api("GET", url.replace("by=", "by=x")))[0] == 404
    parsed = parse(key)
    assert parsed is not None
    await keys.revoke(parsed[1], now=time.time())
    status, answer = await api("GET", url)
    assert status == 404 and "no longer valid" in answer["detail"]
