"""The client against a real scheduler: both faces, retries, resumed streams, safe downloads."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from opentinker import ApiError, AsyncClient
from opentinker.client import ApiConflict, ApiNotFound
from opentinker.sdk import inputs
from opentinker.sdk.archive import unpack
from opentinker.services.scheduler.http.route_decorator import Texts
from opentinker.shared.api_types import Event
from opentinker.shared.durable_files import file_system
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound
from tests.conftest import WAIT_S, free_port, soon, until
from tests.samples.upload_samples import tar_of
from tests.support.api import write_checkpoint
from tests.support.factories import make_spec
from tests.support.http_server import answering
from tests.support.scheduling import scheduler

SPEC = make_spec(model__base="some/model")


async def test_spec_may_be_a_dict_a_jobspec_or_a_file(client: AsyncClient, tmp_path: Path) -> None:
    data = SPEC.model_dump(mode="json")
    (tmp_path / "job.json").write_bytes(orjson.dumps(data))
    (tmp_path / "job.toml").write_text(
        'name = "test"\nmodel = {base = "some/model"}\nenvironment = {name = "copy_digits"}\ntrain = {steps = 3}\n'
    )
    ids = [
        (await client.submit(spec))["id"] for spec in (data, SPEC, tmp_path / "job.json", str(tmp_path / "job.toml"))
    ]
    assert [job["id"] for job in await client.jobs()] == ids[::-1]
    assert [job["id"] for job in await client.jobs(limit=1)] == ids[:-2:-1]
    placed = SPEC.model_copy(update={"resources": SPEC.resources.model_copy(update={"trainer": "own"})})
    for id in ids[:3]:
        assert parse_spec((await client.job(id))["spec"]) == placed


@pytest.fixture
def of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and rows and a job.toml that names them; the current directory is another."""
    (tmp_path / "mine" / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "mine" / "models" / "tiny" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "mine" / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    spec = """
        name = "x"
        kind = "sft"
        model = { base = "models/tiny" }
        data = { path = "rows.jsonl" }
        train = { steps = 1 }
    """
    (tmp_path / "mine" / "job.toml").write_text(spec)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


async def test_relative_paths_are_looked_for_here_then_beside_the_file(of_a_user: Path) -> None:
    sent = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/whoami":
            return web.json_response({"files": file_system()})
        sent.append(await request.json())
        return web.json_response({})

    async with answering(answer) as url, AsyncClient(url) as client:
        await client.submit("../mine/job.toml")
        (of_a_user / "here" / "rows.jsonl").touch()
        await client.submit(Path("../mine/job.toml"))
        await client.submit({"model": {"base": "owner/model"}, "data": {"path": "~nobody-here/x", "validation": ""}})
        policies = {"a": {"model": {"base": "../mine/models/tiny"}, "teacher": {"base": "x/y"}}, "b": 3}
        await client.submit({"policies": policies})
    mine, here = of_a_user / "mine", of_a_user / "here"
    assert sent[0]["model"]["base"] == str(mine / "models" / "tiny")
    assert [one["data"]["path"] for one in sent[:2]] == [str(mine / "rows.jsonl"), str(here / "rows.jsonl")]
    assert sent[2] == {"model": {"base": "owner/model"}, "data": {"path": "~nobody-here/x", "validation": ""}}
    own = {"model": {"base": str(mine / "models" / "tiny")}, "teacher": {"base": "x/y"}}
    assert sent[3] == {"policies": {"a": own, "b": 3}}


async def test_paths_are_of_the_server(client: AsyncClient, of_a_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "file_system", lambda: "of another machine")
    with pytest.raises(ApiError, match=f"rows.jsonl.*relative paths begin at {of_a_user / 'here'}") as refused:
        await client.submit("../mine/job.toml")
    assert {mistake["field"]: mistake["value"] for mistake in refused.value.mistakes}["data.path"] == "rows.jsonl"


async def test_relative_path_that_leads_nowhere_is_no_hub_id(client: AsyncClient) -> None:
    with pytest.raises(ApiError, match=r"model\.base = 'no/such/model': does not exist on the server"):
        await client.submit(make_spec(model__base="no/such/model"))


async def test_errors_carry_status_problem_and_mistakes(client: AsyncClient, store: Store) -> None:
    with pytest.raises(ApiError) as wrong:
        await client.submit({"name": "", "train": {"steps": 0}})
    assert wrong.value.status == 422 and wrong.value.problem["title"] == "Invalid job"
    assert {"name", "model", "environment", "train.steps"} == {m["field"] for m in wrong.value.mistakes}
    assert all(m["field"] in str(wrong.value) for m in wrong.value.mistakes)
    with pytest.raises(ApiNotFound, match="there is no /v1/jobs/") as missing:
        await client.job("../workers")
    assert isinstance(missing.value, NotFound)
    job = (await client.submit(SPEC))["id"]
    await store.transition(job, JobState.SUCCEEDED)
    with pytest.raises(ApiConflict) as late:
        await client.cancel(job)
    assert isinstance(late.value, Conflict)


async def test_wait_gives_the_final_job_or_times_out(client: AsyncClient) -> None:
    job = (await client.submit(SPEC))["id"]
    with pytest.raises(TimeoutError, match="queued"):
        await client.wait(job, 0.1)
    waiting = asyncio.create_task(client.wait(job, WAIT_S))
    assert (await client.cancel(job))["state"] == "cancelled"
    assert (await waiting)["state"] == "cancelled"


async def test_events_go_on_where_they_were_when_the_server_restarts(ctx: Context, store: Store) -> None:
    port = free_port()
    fixed = Context(**{**vars(ctx), "settings": ctx.settings.model_copy(update={"http_port": port})})
    notes: list[str] = []
    async with AsyncClient(f"http://127.0.0.1:{port}", wait_s=WAIT_S, on_wait=notes.append) as client:
        async with scheduler(fixed):
            job = (await client.submit(SPEC))["id"]
            seen: list[Event] = []

            async def follow() -> None:
                async for event in client.events(job):
                    seen.append(event)

            following = asyncio.create_task(follow())
            await store.update(job, event="first")
            await until(lambda: {"waiting", "first"} <= {e["event"] for e in seen})
        await store.update(job, event="while_away")
        async with scheduler(fixed):
            await client.cancel(job)
            await soon(following)
    assert [e["id"] for e in seen] == [e["id"] for e in await store.events(job)]
    assert [e["event"] for e in seen][-2:] == ["while_away", "cancelled"]


async def test_event_stream_of_an_ended_job_ends(client: AsyncClient) -> None:
    job = (await client.submit(SPEC))["id"]
    await client.cancel(job)
    events = [event async for event in client.events(job)]
    assert events[-1]["state"] == "cancelled"
    assert [event async for event in client.events(job, after=events[-1]["id"])] == []
    assert await client.event_log(job, after=events[0]["id"]) == events[1:]


async def test_metrics_are_chosen_by_names_that_may_have_commas(client: AsyncClient, ctx: Context) -> None:
    job = (await client.submit(SPEC))["id"]
    level = "val/task/algebra, level 1/reward"
    values = {level: 0.5, "a,b": 1.0, "a": 2.0, "b": 3.0, "lr": 0.1}
    await MetricSource(ctx.bus, job, "trainer").emit(1, values)

    async def asked(*names: str) -> dict[str, float]:
        return {name: value for p in await client.metrics(job, names=[*names]) for name, value in p["values"].items()}

    await until(lambda: _is(asked(), values))
    for names in ([level], ["a,b"], ["a,b", "lr"], [level, "a"], ["a"], ["a", "b"]):
        assert await asked(*names) == {name: values[name] for name in names}
    assert await asked("a,lr") == {"a": 2.0, "lr": 0.1}, "a list, as clients wrote it before"
    assert await asked("a,lr", "b") == {"b": 3.0} and await asked("absent") == {}


async def test_a_server_of_an_earlier_release_chooses_metrics_by_several_names(
    client: AsyncClient, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(names: Texts, request: web.Request) -> list[str]:
        return [name for name in request.query.get(names.name, "").split(",") if name]

    monkeypatch.setattr(Texts, "read", first)
    job = (await client.submit(SPEC))["id"]
    source = MetricSource(ctx.bus, job, "trainer")
    await source.emit(1, {"a": 2.0, "b": 3.0, "lr": 0.1})
    await source.emit(2, {"a": 4.0, "x": 1.0})
    await source.emit(3, {"x": 2.0})

    async def asked(*names: str) -> list[dict[str, float]]:
        return [point["values"] for point in await client.metrics(job, names=[*names])]

    await until(lambda: _is(asked("x"), [{"x": 1.0}, {"x": 2.0}]))
    assert await asked("a", "lr") == [{"a": 2.0, "lr": 0.1}, {"a": 4.0}]
    assert await asked("x, y", "b") == [{"b": 3.0}], "not x, which is a part of a name"


async def test_metrics_are_followed(client: AsyncClient, ctx: Context) -> None:
    job = (await client.submit(SPEC))["id"]
    source = MetricSource(ctx.bus, job, "trainer")
    for step in range(10):
        await source.emit(step, {"reward/mean": 1.0, "lr": 0.1})

    async def steps(after: int = 0) -> list[int]:
        return [point["step"] for point in await client.metrics(job, after, names=["lr"])]

    await until(lambda: _is(steps(), list(range(10))))
    paged = await client._http.pages(f"/v1/jobs/{job}/metrics", "metrics", 0, {"limit": "4"})
    assert paged == await client.metrics(job)
    cursor = paged[4]["cursor"]
    assert await steps(cursor) == [5, 6, 7, 8, 9]
    followed: list[int] = []

    async def follow() -> None:
        async for point in client.watch_metrics(job, cursor, poll_s=0.05):
            followed.append(point["step"])

    following = asyncio.create_task(follow())
    await until(lambda: followed == [5, 6, 7, 8, 9])
    await source.emit(10, {"lr": 0.1})
    await until(lambda: followed[-1] == 10)
    await client.cancel(job)
    await soon(following)


async def _is(coroutine: Any, expected: object) -> bool:
    return bool(await coroutine == expected)


# --- downloads --------------------------------------------------------------------------------------------------

FILES = {"config.json": b"{}", "sub/model.safetensors": b"w" * 100_000, "trainer/state.json": b"{}"}


async def test_download_makes_the_directory_whole(client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job = (await client.submit(SPEC))["id"]
    for step in (1, 2):
        write_checkpoint(ctx, job, step, FILES | {"step.txt": str(step).encode()})
    assert [c["step"] for c in await client.checkpoints(job)] == [1, 2]
    target = await client.download(job, tmp_path / "new" / "model")
    assert (target / "sub" / "model.safetensors").read_bytes() == FILES["sub/model.safetensors"]
    assert (target / "step.txt").read_text() == "2" and not (target / "trainer").exists()
    (tmp_path / "empty").mkdir()
    whole = await client.download(job, str(tmp_path / "empty"), 1, everything=True)
    assert (whole / "step.txt").read_text() == "1" and (whole / "trainer" / "state.json").exists()
    with pytest.raises(ApiError, match="not an empty directory"):
        await client.download(job, whole)
    with pytest.raises(ApiNotFound, match="there are: 1, 2"):
        await client.download(job, tmp_path / "none", 3)
    assert sorted(os.listdir(tmp_path)) == ["data", "empty", "new"]


async def test_damaged_checkpoint_is_not_accepted(client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job = (await client.submit(SPEC))["id"]
    directory = write_checkpoint(ctx, job, 1, FILES)
    (directory / "config.json").write_bytes(b"[]")
    with pytest.raises(ApiError, match=r"checksum of config\.json.*; there is no other"):
        await client.download(job, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", [b"[]", None])
async def test_a_damaged_checkpoint(client: AsyncClient, ctx: Context, tmp_path: Path, content: bytes | None) -> None:
    job = (await client.submit(SPEC))["id"]
    for step in (10, 20):
        write_checkpoint(ctx, job, step, FILES)
    damaged = write_checkpoint(ctx, job, 30, FILES) / "config.json"
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    with pytest.raises(ApiError, match=r"of step 20, 10: opentinker download (.*) DIR --step 20$") as caught:
        await client.download(job, tmp_path / "model")
    assert "of step 30" in str(caught.value) and job in str(caught.value)
    assert (await client.download(job, tmp_path / "model", 20)).is_dir()


def make_tar(*members: tarfile.TarInfo | tuple[str, bytes]) -> io.BytesIO:
    return io.BytesIO(tar_of(*members))


def link(kind: bytes, to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, to
    return info


EVIL = [
    ("../escaped", b"x"),
    ("/tmp/escaped", b"x"),
    ("a/../../escaped", b"x"),
    ("..\\escaped", b"x"),
    link(tarfile.SYMTYPE, "/etc/passwd"),
    link(tarfile.LNKTYPE, "../escaped"),
    link(tarfile.FIFOTYPE, ""),
    link(tarfile.CHRTYPE, ""),
]


@pytest.mark.parametrize("member", EVIL)
def test_tar_that_leaves_its_directory_is_refused(tmp_path: Path, member: tarfile.TarInfo | tuple[str, bytes]) -> None:
    manifest = ("manifest.json", orjson.dumps({"files": {}}))
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="not a plain file"):
        unpack(make_tar(manifest, member), tmp_path / "in" / "model")
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


@pytest.mark.parametrize(
    "data",
    [
        make_tar(),
        make_tar(("a", b"x")),
        make_tar(("manifest.json", b"{}")),
        make_tar(("manifest.json", b"[]")),
        make_tar(("manifest.json", b'{"files": {}}'), ("a", b"x")),
        io.BytesIO(b"not a tar"),
    ],
)
def test_tar_without_a_true_manifest_is_refused(tmp_path: Path, data: io.BytesIO) -> None:
    data.seek(0)
    with pytest.raises(ValueError):
        unpack(data, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_truncated_tar_is_refused(tmp_path: Path) -> None:
    content = b"x" * 10_000
    files = {"a": {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
    whole = make_tar(("manifest.json", orjson.dumps({"files": files})), ("a", content)).getvalue()
    with pytest.raises(ValueError):
        unpack(io.BytesIO(whole[:5000]), tmp_path / "model")
    unpack(io.BytesIO(whole), tmp_path / "model")
    assert (tmp_path / "model" / "a").read_bytes() == content


async def test_who_waits_cancels_the_job_only_if_asked_to(client: AsyncClient, ctx: Context) -> None:
    for asked in (False, True):
        job = (await client.submit(SPEC))["id"]
        waiting = asyncio.create_task(client.wait(job, cancel_on_interrupt=asked))
        await asyncio.sleep(0)  # it has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await client.job(job))["state"] == ("cancelled" if asked else "queued")
