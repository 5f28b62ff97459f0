"""Sessions, samplers and models end, their number is bounded, and lists come in pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from opentinker.services.scheduler.http.errors import TooMany
from opentinker.services.scheduler.tinker import endings, sessions_api
from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import parse
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import NotFound
from opentinker.shared.types.tinker import OptimStep, TinkerModel, TinkerSession, Unload, tinker_place
from tests.conftest import until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, passes, start_server
from tests.integration.tinker.test_sampling import asked
from tests.support.api import Http, new_key_of
from tests.support.scheduling import running


async def leave(ctx: Context, session: str) -> None:
    """Its last heartbeat was two days ago."""
    await ctx.store.redis.zadd("tinker:beats", {session: time.time() - 2 * 86400})


@pytest.fixture
async def closing(ctx: Context, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Access]:
    """Closes sessions that were left, round by round."""
    monkeypatch.setattr(endings, "ROUND_S", 0.02)
    access = Access(ctx)
    async with running(endings.close_left_sessions(access, Commands(access))):
        yield access


async def sampler_in(user: Client, session: str, number: int = 0) -> str:
    made = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
    return str((await user.ok("create_sampling_session", **made))["sampling_session_id"])


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


async def test_the_record_of_a_model_stays_while_it_has_checkpoints(
    user: Client, workers: FakeWorkers, ctx: Context, closing: Access
) -> None:
    saved = checkpoint_of(ctx, model := await user.model())
    await workers.store.add_checkpoint(saved)
    await leave(ctx, session := model.partition(":")[0])
    await until(lambda: workers.store.has_session(session), lambda found: not found)
    await until(lambda: keys_of(ctx, f"asked:{model}"), lambda keys: not keys)
    status, run = await user.get(f"training_runs/{model}")
    assert status == 200 and run["last_checkpoint"]["tinker_path"] == saved.path
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


async def test_models_sessions_samplers_and_bytes_of_a_tenant_are_bounded(
    user: Client, workers: FakeWorkers, ctx: Context, api: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = "opentinker.shared.state"
    monkeypatch.setattr(f"{state}.tinker.MAX_MODELS", 2)
    monkeypatch.setattr(f"{state}.tinker_sessions.MAX_SESSIONS", 3)
    monkeypatch.setattr(f"{state}.tinker_sessions.MAX_SAMPLERS", 2)
    monkeypatch.setattr("opentinker.services.scheduler.tinker.training_api.MAX_CHECKPOINT_BYTES", 10)
    session = await user.session()
    first, _ = await user.model(session, 0), await user.model(session, 1)
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    status, answer = await user.post("create_model", **body, model_seq_id=2)
    assert status == 422 and "2 models" in answer["detail"] and "unload" in answer["detail"]
    await user.ok("unload_model", model_id=first)
    second = await user.model(session, 2)
    await user.ok("create_model", **body, model_seq_id=2)  # sent again
    for number in range(2):
        await sampler_in(user, session, number)
    made = {"session_id": session, "sampling_session_seq_id": 2, "base_model": BASE}
    status, answer = await user.post("create_sampling_session", **made)
    assert status == 422 and "2 samplers" in answer["detail"]
    save = {"model_id": second, "sampling_session_seq_id": 3}
    failed = await user.result(await user.ok("save_weights_for_sampler", **save, seq_id=1))
    assert failed["category"] == "user" and "2 samplers" in failed["error"]
    await ctx.store.redis.zadd("tinker:samplers:default", {f"{session}:sampler:0": time.time() - 7200})
    await user.ok("create_sampling_session", **made)
    assert (await user.get(f"samplers/{session}:sampler:0"))[0] == 404, "it was idle, and made room"
    for name in ("a", "b"):
        await workers.store.add_checkpoint(checkpoint_of(ctx, second, name=name))
    assert await workers.store.stored_bytes("default") == 14
    failed = await user.result(await user.ok("save_weights", model_id=second, seq_id=2, path="c"))
    assert failed["category"] == "user" and "14 bytes" in failed["error"] and "delete" in failed["error"]
    assert (await user.send("DELETE", f"training_runs/{second}/checkpoints/weights/a"))[0] == 200
    assert "path" in await user.result(await user.ok("save_weights", model_id=second, seq_id=3, path="c"))
    await user.session(), await user.session()
    status, answer = await user.post("create_session", tags=[])
    assert status == 422 and "3 sessions" in answer["detail"]
    await Client(api, await new_key_of(ctx.store, "blue")).session()


async def test_parallel_clients_do_not_exceed_the_bound(
    user: Client, workers: FakeWorkers, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.MAX_MODELS", 3)
    session = await user.session()
    body: dict[str, Any] = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 8}}
    calls = [user.post("create_model", **body, model_seq_id=number) for number in range(9)]
    statuses = sorted([status for status, _ in await asyncio.gather(*calls)])
    assert statuses == [200] * 3 + [422] * 6
    await ctx.store.transition(workers.job, JobState.CANCELLED, reason="over")
    async with FakeWorkers(ctx, await start_server(ctx)).work():
        await until(lambda: user.post("create_model", **body, model_seq_id=20), lambda answer: answer[0] == 200)


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


# --- lists ----------------------------------------------------------------------------------------------------------


async def sessions_of(workers: FakeWorkers, count: int) -> list[str]:
    ids = [f"s-{number:020x}" for number in range(count)]
    for number, id in enumerate(ids):
        made = TinkerSession(id=id, tenant="default", created=1000.0 + number, name=f"name{number}")
        await workers.store.open_session(made)
    return ids[::-1]


async def test_lists_come_in_pages(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    session = await user.session()
    models = [await user.model(session, number) for number in range(4)][::-1]
    for at, model in enumerate(models):
        await workers.store.add_checkpoint(checkpoint_of(ctx, model, created=1000.0 - at))
    status, found = await user.get("training_runs?limit=2&offset=1")
    assert status == 200 and found["cursor"] == {"offset": 1, "limit": 2, "total_count": 4}
    assert [one["training_run_id"] for one in found["training_runs"]] == models[1:3]
    status, found = await user.get("checkpoints?limit=3&offset=2")
    assert found["cursor"] == {"offset": 2, "limit": 3, "total_count": 4}
    assert [one["tinker_path"].split("/")[2] for one in found["checkpoints"]] == models[2:]
    ids = await sessions_of(workers, 5)
    assert (await user.get("sessions?limit=2&offset=2"))[1]["sessions"] == ids[1:3]
    for wrong in ("limit=0", "limit=1001", "offset=-1", "limit=x"):
        for path in ("sessions", "training_runs", "checkpoints"):
            assert (await user.get(f"{path}?{wrong}"))[0] == 422
    assert (await user.get(f"sessions/{session}"))[1]["training_run_ids"] == sorted(models)


async def test_a_search_reads_a_bounded_number_of_sessions(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_api, "SEARCHED", 4)
    monkeypatch.setattr(sessions_api, "SEARCHED_AT_ONCE", 2)
    ids, found, cursor, calls = await sessions_of(workers, 7), [], None, 0
    while True:
        answer = await user.ok("sessions/search", display_name="name1", limit=3, cursor=cursor)
        found += [one["session_id"] for one in answer["sessions"]]
        calls += 1
        if (cursor := answer["next_cursor"]) is None:
            break
    assert found == [ids[5]] and calls == 2
    pages, cursor = [], None
    while True:
        answer = await user.ok("sessions/search", limit=3, cursor=cursor)
        pages.append([one["session_id"] for one in answer["sessions"]])
        if (cursor := answer["next_cursor"]) is None:
            break
    assert pages == [ids[:3], ids[3:6], ids[6:]]
    assert (await user.ok("sessions/search", session_id=ids[6]))["sessions"][0]["session_id"] == ids[6]
