"""Routes over HTTP that tell what a job has done: its events, metrics, transcripts and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import Server, soon, until
from tests.support.api import Http, bearing, read_events, write_checkpoint
from tests.support.scheduling import served

# --- events -----------------------------------------------------------------------------------------------------


async def test_event_stream_is_live_resumes_and_ends_with_the_job(http: Http, store: Store) -> None:
    job = await http.job()
    await until(lambda: store.events(job), lambda events: len(events) >= 3)  # queued, unchecked, waiting
    url = f"{http.url}/v1/jobs/{job}/events"
    async with http.session.get(url) as response:
        assert response.content_type == "text/event-stream"
        first = await read_events(response, 3)
        await store.update(job, event="hello", detail={"n": 1})
        assert (await soon(read_events(response, 1)))[0]["n"] == 1
    async with http.session.get(url, headers={"Last-Event-ID": first[0]["id"]}) as response:
        resumed = asyncio.create_task(read_events(response))
        await store.transition(job, JobState.CANCELLED)
        kinds = [event["event"] for event in await soon(resumed)]
    assert kinds == ["environment_unchecked", "waiting", "hello", "cancelled"]
    last = (await store.events(job))[-1]["id"]
    async with http.session.get(url, params={"after": last}) as response:
        assert await soon(read_events(response)) == []
    as_json = (await http("GET", f"/v1/jobs/{job}/events?format=json&after={first[1]['id']}"))[1]["events"]
    assert [event["event"] for event in as_json] == ["waiting", "hello", "cancelled"]


@pytest.mark.parametrize("query", ["after=x", "after=$", "after=1-2-3", "after=99999999999999999999", "format=xml"])
async def test_wrong_event_queries_are_422(http: Http, query: str) -> None:
    job = await http.job()
    assert (await http("GET", f"/v1/jobs/{job}/events?{query}"))[0] == 422


# --- metrics ----------------------------------------------------------------------------------------------------


async def test_metrics_history_pages_and_filters(http: Http, ctx: Context) -> None:
    job = await http.job()
    trainer, rollout = MetricSource(ctx.bus, job, "trainer"), MetricSource(ctx.bus, job, "rollout-0")
    for step in range(5):
        await trainer.emit(step, {"reward/mean": float(step), "lr": 0.1})
        await rollout.emit(step, {"tokens": 1.0})
    await ctx.bus.nc.flush()
    path = f"/v1/jobs/{job}/metrics"
    await until(lambda: _points(http, path, 10))
    steps, cursor = [], 0
    while True:
        _, page = await http("GET", f"{path}?limit=2&source=trainer&names=lr,nothing&after={cursor}")
        steps += [point["step"] for point in page["metrics"]]
        assert all(point["values"] == {"lr": 0.1} for point in page["metrics"])
        cursor = page["cursor"]
        if not page["more"]:
            break
    assert steps == list(range(5))
    assert (await http("GET", f"{path}?after={2**61}"))[1] == {"metrics": [], "cursor": 2**61, "more": False}
    for query in ("after=-1", "after=x", "limit=0", "limit=1000000", f"after={2**63}"):
        assert (await http("GET", f"{path}?{query}"))[0] == 422
    for source in (">", "*", "a.b", "%20", "%00"):
        assert (await http("GET", f"{path}?source={source}"))[0] == 200


async def _points(http: Http, path: str, count: int) -> bool:
    return len((await http("GET", path))[1]["metrics"]) == count


@pytest.mark.usefixtures("store")
async def test_metric_history_survives_restarts(own_server: Server, valkey_server: Server, tmp_path: Path) -> None:
    async with served(own_server, valkey_server, tmp_path) as (ctx, http):
        job = await http.job()
        source = MetricSource(ctx.bus, job, "trainer")
        for step in range(3):
            await source.emit(step, {"reward/mean": 1.0})
        await ctx.bus.nc.flush()
        await until(lambda: _points(http, f"/v1/jobs/{job}/metrics", 3))
    own_server.process.terminate()
    own_server.process.wait()
    own_server.start()
    async with served(own_server, valkey_server, tmp_path) as (_, http):
        assert await _points(http, f"/v1/jobs/{job}/metrics", 3)


@pytest.mark.usefixtures("store")
async def test_missing_nats_is_503_until_it_is_back(own_server: Server, valkey_server: Server, tmp_path: Path) -> None:
    async with served(own_server, valkey_server, tmp_path) as (_, http):
        job = await http.job()
        own_server.kill()
        status, body = await http("GET", f"/v1/jobs/{job}/metrics")
        assert status == 503 and body["hint"]
        assert (await http("GET", "/v1/jobs"))[0] == 200
        status, body = await http("GET", f"/v1/jobs/{job}")
        assert (status, body["state"], body["metrics"]) == (200, "queued", {}), "all but the last metrics"
        own_server.start()
        await until(lambda: http("GET", f"/v1/jobs/{job}/metrics"), lambda answer: answer[0] == 200)


async def test_transcripts_are_read_by_step(http: Http, ctx: Context) -> None:
    job = await http.job()
    path = f"/v1/jobs/{job}/transcripts"
    none: Any = {
        "steps": [],
        "step": None,
        "outcomes": {"solved": 0, "unsolved": 0},
        "opponents": {},
        "transcripts": [],
    }
    assert await http("GET", path) == (200, none)
    folder = ctx.settings.data_dir / "jobs" / job / "transcripts"
    folder.mkdir(parents=True)
    for step in (0, 20):
        (folder / f"step-{step:06d}.jsonl").write_bytes(orjson.dumps({"index": 0, "reward": step}) + b"\n")
    (folder / "step-000030.tmp").write_bytes(b"half")
    for query, shown in (("", 20), ("?step=0", 0)):
        status, body = await http("GET", path + query)
        assert status == 200 and body["steps"] == [0, 20]
        assert (body["step"], body["transcripts"]) == (shown, [{"index": 0, "reward": shown, "solved": shown >= 1}])
    status, body = await http("GET", f"{path}?step=7")
    assert status == 404 and "there are: 0, 20" in body["detail"]
    assert (await http("GET", f"{path}?step=latest"))[0] == 422


# --- checkpoints ------------------------------------------------------------------------------------------------


FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(3_000_000),
    "empty.txt": b"",
    "trainer/optimizer.safetensors": b"o" * 700,
}


async def test_checkpoints_are_listed_and_downloaded_as_tar(http: Http, ctx: Context) -> None:
    job = await http.job()
    path = f"/v1/jobs/{job}/checkpoints"
    assert await http("GET", path) == (200, {"checkpoints": []})
    for step in (10, 20):
        write_checkpoint(ctx, job, step, FILES | {"step.txt": str(step).encode()})
    (ctx.settings.data_dir / "jobs" / job / "checkpoints" / ".writing-000030").mkdir()
    listed = (await http("GET", path))[1]["checkpoints"]
    assert [c["step"] for c in listed] == [10, 20]
    assert listed[0]["bytes"] == listed[0]["model_bytes"] + 700
    for chosen, query, marker in (("latest", "", b"20"), ("10", "", b"10"), ("10", "?all=1", b"10")):
        status, raw = await http("GET", f"{path}/{chosen}/download{query}")
        assert status == 200
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert found.pop("manifest.json")
        expected = FILES | {"step.txt": marker}
        assert found == {n: d for n, d in expected.items() if query or not n.startswith("trainer/")}


async def test_latest_checkpoint_is_that_of_the_newest_trainer(http: Http, ctx: Context) -> None:
    """A trainer that had to resume from before a damaged checkpoint has not come as far yet."""
    job = await http.job()
    for step, epoch in ((10, 1), (30, 1), (20, 2)):
        write_checkpoint(ctx, job, step, FILES, epoch)
    listed = (await http("GET", f"/v1/jobs/{job}/checkpoints"))[1]["checkpoints"]
    assert [(c["epoch"], c["step"], c["version"]) for c in listed] == [
        (1, 10, [1, 10]),
        (1, 30, [1, 30]),
        (2, 20, [2, 20]),
    ]
    async with http.session.get(f"{http.url}/v1/jobs/{job}/checkpoints/latest/download") as response:
        assert response.headers["X-Checkpoint-Step"] == "20"


async def test_damaged_manifest_is_left_out(http: Http, ctx: Context) -> None:
    job = await http.job()
    for step, text in ((10, "{"), (20, "{}"), (30, '{"files": 7}')):
        (write_checkpoint(ctx, job, step, FILES) / "manifest.json").write_text(text)
    write_checkpoint(ctx, job, 5, FILES)
    listed = (await http("GET", f"/v1/jobs/{job}/checkpoints"))[1]["checkpoints"]
    assert [c["step"] for c in listed] == [5]
    status, body = await http("GET", f"/v1/jobs/{job}/checkpoints/30/download")
    assert status == 404 and "there are: 5" in body["detail"]


async def test_wrong_checkpoint_requests_are_told(http: Http, ctx: Context) -> None:
    job = await http.job()
    path = f"/v1/jobs/{job}/checkpoints"
    assert (await http("GET", f"{path}/latest/download"))[0] == 404
    write_checkpoint(ctx, job, 10, FILES)
    status, body = await http("GET", f"{path}/11/download")
    assert status == 404 and "there are: 10" in body["detail"]
    for step in ("x", "-1", "1e3", "%D9%A1%D9%A0"):
        assert (await http("GET", f"{path}/{step}/download"))[0] == 422
    assert (await http("GET", f"{path}/..%2f../download"))[0] == 404
    assert (await http("GET", f"{path}/10/download?all=yes"))[0] == 422


async def test_manifest_and_links_cannot_lead_out_of_a_checkpoint(http: Http, ctx: Context, tmp_path: Path) -> None:
    job = await http.job()
    (tmp_path / "secret").write_text("secret")
    directory = write_checkpoint(ctx, job, 10, FILES)
    manifest = orjson.loads((directory / "manifest.json").read_bytes())
    path = f"/v1/jobs/{job}/checkpoints/10/download"
    for name in ("../../../../../secret", str(tmp_path / "secret"), "link"):
        manifest["files"] = {name: {"bytes": 6, "sha256": ""}}
        (directory / "manifest.json").write_bytes(orjson.dumps(manifest))
        (directory / "link").unlink(missing_ok=True)
        (directory / "link").symlink_to(tmp_path / "secret")
        status, body = await http("GET", path)
        assert status == 404 and "secret" not in str(body).replace("secret'", "")


async def test_many_open_event_streams_leave_room_for_requests(http: Http) -> None:
    job = await http.job()
    async with (
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(headers=bearing(), connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        streams = [await stack.enter_async_context(session.get(f"{http.url}/v1/jobs/{job}/events")) for _ in range(150)]
        assert [len(await soon(read_events(stream, 1))) for stream in streams] == [1] * 150
        assert (await http("GET", f"/v1/jobs/{job}"))[0] == 200
        await http("POST", f"/v1/jobs/{job}/cancel")
        assert [(await soon(read_events(stream)))[-1]["event"] for stream in streams] == ["cancelled"] * 150
