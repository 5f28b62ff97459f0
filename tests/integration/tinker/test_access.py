"""Who may use a Tinker server, quotas, sessions, runs, checkpoints and their files."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from opentinker.services.scheduler.tinker import expiry
from opentinker.services.scheduler.tinker.access import Access, shown_base
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.audit_log import folder, writers
from opentinker.shared.security.authorization import Role
from opentinker.shared.types.core import JobState
from opentinker.shared.types.tinker import TinkerCheckpoint, tinker_place
from tests.conftest import NewContext, until
from tests.integration.tinker.site import BASE, Client, FakeWorkers, checkpoint_of, passes, start_server
from tests.support.api import Http, new_key_of
from tests.support.scheduling import running, scheduler


@pytest.fixture
async def blue(api: Http, ctx: Context, workers: FakeWorkers) -> AsyncIterator[Client]:
    """A user of a tenant to which the server is not open."""
    yield Client(api, await new_key_of(ctx.store, "blue"))


@pytest.fixture
async def saved(user: Client, workers: FakeWorkers, ctx: Context) -> TinkerCheckpoint:
    found = checkpoint_of(ctx, await user.model(), metadata={"renderer_name": "x"})
    await workers.store.add_checkpoint(found)
    return found


async def test_a_server_is_open_to_the_tenants_that_it_names(user: Client, blue: Client, ctx: Context) -> None:
    assert (await blue.get("get_server_capabilities"))[1] == {"supported_models": []}
    body = {"session_id": await blue.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    status, answer = await blue.post("create_model", **body)
    assert status == 404 and "no Tinker server" in answer["detail"]
    shared = await start_server(ctx, open_to=["blue"])
    async with FakeWorkers(ctx, shared).work() as workers:
        ((one,),) = (await blue.get("get_server_capabilities"))[1].values()
        assert one["model_name"] == BASE and one["trainable"] and one["sampleable"]
        await blue.model()
        assert workers.commands[0].tenant == "blue"


def test_the_name_of_a_base_is_a_path_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("Qwen/Qwen3-8B", "tiny", "runs/models/tiny", "a/b/c/d")
    assert [shown_base(str(tmp_path / name)) for name in names] == [*names[:2], "./runs/models/tiny", names[3]]
    assert [shown_base(name) for name in ("/elsewhere/tiny", "Qwen/Qwen3-8B")] == ["/elsewhere/tiny", "Qwen/Qwen3-8B"]


async def test_a_base_in_the_servers_working_directory_has_the_name_that_its_spec_gave(
    user: Client, workers: FakeWorkers, ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "stored").mkdir()
    (tmp_path / "Qwen" / "Qwen3-8B").symlink_to(tmp_path / "stored")
    await ctx.store.transition(workers.job, JobState.FAILED)
    job = await start_server(ctx, base=str(tmp_path / "stored"))  # as submission resolves it
    names = [one["model_name"] for one in (await user.get("get_server_capabilities"))[1]["supported_models"]]
    assert names == ["stored"]
    async with FakeWorkers(ctx, job).work() as fakes:
        for name in ("Qwen/Qwen3-8B", "stored", "./stored", str(tmp_path / "stored"), "tinker", job):
            body = {"session_id": await user.session(), "base_model": name, "lora_config": {"rank": 4}}
            made = await user.result(await user.ok("create_model", **body))
            assert (await user.ok("get_info", model_id=made["model_id"]))["model_name"] == "stored"
        found = checkpoint_of(ctx, made["model_id"], base=str(tmp_path / "stored"))
        await fakes.store.add_checkpoint(found)
        assert (await user.ok("weights_info", tinker_path=found.path))["base_model"] == "stored"
        of = {"session_id": await user.session(), "base_model": "Qwen/Qwen3-8B", "model_path": found.path}
        await user.ok("create_sampling_session", **of)
        status, answer = await user.post("create_model", **(body | {"base_model": "Qwen/Qwen3-1B"}))
        assert status == 404 and "served are stored" in answer["detail"]


async def test_another_tenants_things_look_like_what_is_not_there(
    user: Client, blue: Client, ctx: Context, saved: TinkerCheckpoint
) -> None:
    await start_server(ctx, open_to=["*"])
    session, absent = saved.model.partition(":")[0], "s-" + "f" * 20
    for known, unknown in ((saved.model, f"{absent}:train:0"),):
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("optim_step", {"seq_id": 1}), ("save_weights", {"seq_id": 1, "path": "x"}), ("get_info", {}),
            ("forward", {"seq_id": 1}), ("load_weights", {"seq_id": 1, "path": saved.path, "optimizer": False}),
        ]  # fmt: skip
        for path, body in bodies:
            answers = [await blue.post(path, model_id=model, **body) for model in (known, unknown)]
            assert [status for status, _ in answers] == [404, 404], path
            texts = [
                str(answer).replace(model, "X") for (_, answer), model in zip(answers, (known, unknown), strict=True)
            ]
            assert texts[0] == texts[1]
    assert (await blue.raw("forward_backward", passes(saved.model, 1)))[0] == 404
    assert (await blue.post("session_heartbeat", session_id=session))[0] == 410
    assert (await blue.post("weights_info", tinker_path=saved.path))[0] == 404
    assert (await blue.post("retrieve_future", request_id=f"{saved.model}#0"))[0] == 404
    body = {"session_id": await blue.session(), "model_seq_id": 0, "path": saved.path, "optimizer": False}
    assert (await blue.post("load_weights", **body))[0] == 404
    assert (await blue.post("create_model", session_id=session, model_seq_id=1, base_model=BASE))[0] == 404


async def test_a_public_checkpoint_is_loaded_and_downloaded_by_others_and_changed_by_its_tenant_alone(
    user: Client, blue: Client, ctx: Context, saved: TinkerCheckpoint
) -> None:
    async with FakeWorkers(ctx, await start_server(ctx, open_to=["blue"])).work():
        place = f"training_runs/{saved.model}/checkpoints/weights/first"
        assert (await blue.get(f"{place}/external_weights_urls"))[0] == 404
        assert (await user.send("POST", f"{place}/publish"))[0] == 200
        status, urls = await blue.get(f"{place}/external_weights_urls")
        assert status == 200 and sorted(urls["urls"]) == ["adapter_config.json", "adapter_model.safetensors"]
        assert (await blue.post("weights_info", tinker_path=saved.path))[1]["lora_rank"] == 8
        body = {"session_id": await blue.session(), "model_seq_id": 0, "path": saved.path, "optimizer": False}
        await blue.result(await blue.ok("load_weights", **body))
        for method, end in (("POST", "/publish"), ("DELETE", "/publish"), ("PUT", "/ttl"), ("DELETE", "")):
            assert (await blue.send(method, place + end, {"ttl_seconds": 1}))[0] == 404
        assert (await user.send("DELETE", f"{place}/publish"))[0] == 200
        assert (await blue.get(f"{place}/external_weights_urls"))[0] == 404


async def test_files_come_by_signed_urls_without_a_key(
    user: Client, api: Http, ctx: Context, saved: TinkerCheckpoint
) -> None:
    place = f"training_runs/{saved.model}/checkpoints/weights/first"
    _, found = await user.get(f"{place}/external_weights_urls")
    url = found["urls"]["adapter_model.safetensors"].removeprefix(api.url)
    assert await api("GET", url) == (200, f"adapter_model.safetensors of {saved.path}".encode())
    state = url.replace("adapter_model.safetensors", "state.safetensors")
    for wrong in (state, url.replace("signature=", "signature=0"), url.replace("expires=", "expires=1"), url[:-70]):
        assert (await api("GET", wrong))[0] == 404
    async with api.session.get(f"{api.url}/api/v1/{place}/archive", headers=user.headers) as response:
        assert response.status == 200
        with tarfile.open(fileobj=io.BytesIO(await response.read())) as archive:
            assert sorted(archive.getnames()) == sorted(found["urls"])
    directory = tinker_place(ctx.settings.data_dir, saved.model) / saved.kind / saved.name
    for file in directory.glob("adapter_*"):
        file.unlink()
    assert (await user.get(f"{place}/external_weights_urls"))[0] == 404, "the optimizer's state is not an adapter"
    assert (await api("GET", url))[0] == 404
    assert (await user.send("DELETE", place))[0] == 200
    assert (await api("GET", url))[0] == 404 and (await user.send("DELETE", place))[0] == 404


async def test_runs_and_checkpoints_are_listed(user: Client, saved: TinkerCheckpoint) -> None:
    _, runs = await user.get("training_runs", params={"limit": 5, "offset": 0, "access_scope": "owned"})
    (run,) = runs["training_runs"]
    assert runs["cursor"] == {"offset": 0, "limit": 5, "total_count": 1}
    assert (await user.get(f"training_runs/{saved.model}"))[1] == run
    assert run["last_checkpoint"]["tinker_path"] == saved.path and run["last_sampler_checkpoint"] is None
    _, listed = await user.get(f"training_runs/{saved.model}/checkpoints")
    _, everywhere = await user.get("checkpoints")
    assert listed["checkpoints"] == everywhere["checkpoints"] == [run["last_checkpoint"]]
    assert listed["checkpoints"][0]["checkpoint_id"] == "weights/first"
    assert listed["checkpoints"][0]["user_metadata"] == {"renderer_name": "x"}
    assert (await user.get("training_runs", params={"limit": "x"}))[0] == 422


async def test_a_checkpoint_whose_time_is_over_is_gone_with_its_files(
    user: Client, workers: FakeWorkers, ctx: Context, saved: TinkerCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"training_runs/{saved.model}/checkpoints/weights/first"
    assert (await user.send("PUT", f"{place}/ttl", {"ttl_seconds": 3600}))[0] == 200
    _, listed = await user.get("checkpoints")
    assert listed["checkpoints"][0]["expires_at"] > listed["checkpoints"][0]["time"]
    assert await workers.store.expired(time.time()) == []
    assert (await user.send("PUT", f"{place}/ttl", {"ttl_seconds": 0}))[0] == 422, "0 would mean now, or never"
    assert (await user.send("PUT", f"{place}/ttl", {"ttl_seconds": 1}))[0] == 200
    await until(lambda: user.get(f"{place}/external_weights_urls"), lambda found: found[0] == 404)
    monkeypatch.setattr(expiry, "ROUND_S", 3600.0)
    places = [checkpoint_of(ctx, saved.model, name=f"n{number}", expires=time.time() - 1.0) for number in range(250)]
    for one in places:
        await workers.store.add_checkpoint(one)
    await workers.store._redis.zadd(
        "tinker:expiring", {f"tinker://gone/weights/{number}": 1.0 for number in range(150)}
    )
    access = Access(ctx)
    async with running(expiry.expire(access)):
        await until(lambda: not any(access.directory(one).exists() for one in [saved, *places]))
    assert await workers.store.checkpoints(saved.model) == [], "in the first round"


async def test_too_many_commands_that_wait_are_refused(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker.shared.state.tinker.requests.MAX_WAITING", 3)
    model = await user.model()
    workers.answers = False
    statuses = [(await user.post("optim_step", model_id=model, seq_id=seq))[0] for seq in range(1, 5)]
    assert statuses == [200, 200, 200, 429]


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.12.9", 422), ("0.7.0", 422), ("0.13.0", 200), ("0.38.0", 200), ("1.0", 200), ("", 200), ("other-client", 200)],
)
async def test_an_sdk_that_is_too_old_is_told_so_at_once(user: Client, version: str, status: int) -> None:
    found, answer = await user.post("create_session", tags=[], user_metadata=None, sdk_version=version)
    assert found == status and (status == 200 or "use tinker 0.13 or newer" in str(answer)), answer


async def test_a_session_from_its_opening_to_its_end(user: Client, workers: FakeWorkers) -> None:
    opened = await user.ok(
        "create_session", tags=["a"], user_metadata={"n": 1}, sdk_version="0.38.0", display_name="My run"
    )
    session = opened["session_id"]
    assert "train_unembed" in opened["warning_message"]
    await user.ok("session_heartbeat", session_id=session)
    model = await user.model(session)
    _, found = await user.get(f"sessions/{session}")
    assert found["training_run_ids"] == [model] and found["user_metadata"] == {"n": "1"}
    assert (await user.get("sessions"))[1]["sessions"][0] == session
    for status in ("active", "client_finished"):
        (one,) = (await user.ok("sessions/search", display_name="run my"))["sessions"]
        assert one["session_id"] == session and one["status"]["type"] == status
        await user.ok(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    assert (await user.ok("sessions/search", display_name="other"))["sessions"] == []


async def test_how_a_session_ended_is_what_its_client_said_first(user: Client) -> None:
    session, traceback = await user.session(), 'Traceback:\n\tFile "x.py"\nValueError: \x1b[31m'
    for number, detail in enumerate((traceback, "again")):
        reason = {"type": ("errored", "success")[number]}
        await user.ok(f"sessions/{session}/finish", reason=reason, detail=detail)
        (one,) = (await user.ok("sessions/search", session_id=session))["sessions"]
        assert one["status"]["reason"] == {"type": "errored"}
        assert one["status"]["detail"] == traceback.replace("\x1b", " ")
    long = await user.session()
    await user.ok(f"sessions/{long}/finish", reason={"type": "errored"}, detail="a" * 3000 + "b" * 3000)
    (one,) = (await user.ok("sessions/search", session_id=long))["sessions"]
    assert one["status"]["detail"] == "a" * 999 + "…" + "b" * 1000


async def test_a_repeated_opening_is_one_session(user: Client, api: Http) -> None:
    headers = {**user.headers, "X-Idempotency-Key": "k"}
    ids = {
        (await api("POST", "/api/v1/create_session", headers=headers, data=b"{}"))[1]["session_id"] for _ in range(3)
    }
    assert len(ids) == 1


async def test_flags_and_health(user: Client, api: Http) -> None:
    assert await api("GET", "/api/v1/healthz") == (200, {"status": "ok"})
    assert (await user.ok("client/config", sdk_version="0.38.0"))["fwdbwd_max_chunk_bytes_count"] == 5_000_000
    assert "refresh_interval_sec" in await user.ok("client/dynamic_config", sdk_version="0.38.0")
    assert await user.ok("telemetry", events=[]) == {"status": "accepted"}
    assert (await user.get("auth/apikey/me"))[1]["details"]["org_details"]["name"] == "default"


async def test_a_viewer_reads_and_changes_nothing(api: Http, ctx: Context, workers: FakeWorkers) -> None:
    viewer = Client(api, await new_key_of(ctx.store, role=Role.VIEWER))
    assert (await viewer.get("training_runs"))[0] == 200
    for path in ("create_session", "create_model", "optim_step", "asample", "create_sampling_session", "save_weights"):
        status, answer = await viewer.post(path)
        assert status == 403 and "may not do this; it needs " in answer["detail"]


async def test_what_changes_something_is_in_the_audit_log_and_steps_are_not(user: Client, ctx: Context) -> None:
    model = await user.model()
    await user.result(await user.ok("optim_step", model_id=model, seq_id=1))
    await user.result(await user.ok("save_weights", model_id=model, seq_id=2, path="x"))
    (current,) = writers(folder(ctx.settings.data_dir))
    paths = [orjson.loads(line)["path"] for line in current.read_bytes().splitlines()]
    assert paths == ["/api/v1/create_session", "/api/v1/create_model", "/api/v1/save_weights"]


async def test_a_server_without_keys_takes_any(new_context: NewContext) -> None:
    async with (
        new_context(auth=False) as ctx,
        scheduler(ctx) as url,
        aiohttp.ClientSession() as session,
        FakeWorkers(ctx, await start_server(ctx)).work(),
    ):
        assert await Client(Http(session, url), "whatever").model()


async def test_changes_of_a_checkpoint_at_the_same_time_are_all_kept(
    user: Client, workers: FakeWorkers, saved: TinkerCheckpoint
) -> None:
    path = f"training_runs/{saved.model}/checkpoints/weights/first"
    for _ in range(10):
        await workers.store.add_checkpoint(saved)
        calls = (("PUT", f"{path}/ttl", {"ttl_seconds": 3600}), ("POST", f"{path}/publish", None))
        assert [status for status, _ in await asyncio.gather(*(user.send(*call) for call in calls))] == [200, 200]
        found = await workers.store.checkpoint("default", saved.model, "weights", "first")
        assert found.public and found.expires > time.time()


async def test_a_checkpoint_that_was_saved_again_or_kept_longer_does_not_expire(
    user: Client, workers: FakeWorkers, ctx: Context, saved: TinkerCheckpoint
) -> None:
    store, access = workers.store, Access(ctx)
    changes: list[dict[str, Any]] = [{"expires": time.time() + 3600}, {"created": time.time() + 1, "seq": 5}]
    for change in changes:
        await store.add_checkpoint(msgspec.structs.replace(saved, expires=time.time() - 1))
        (old,) = await store.expired(time.time())
        await store.add_checkpoint(msgspec.structs.replace(saved, **change))
        assert not await access.remove(old)
        assert access.directory(saved).is_dir()
        assert (await store.checkpoint("default", saved.model, "weights", "first")).seq == change.get("seq", -1)
    await store.add_checkpoint(expired := msgspec.structs.replace(saved, seq=6, expires=time.time() - 1))
    assert await access.remove(expired) and not access.directory(saved).exists()
    assert await store.expired(time.time()) == []
