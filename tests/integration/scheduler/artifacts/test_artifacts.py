"""Artifacts: kept in a directory or an object store, read in ranges, fetched again from where it broke off."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from opentinker import ApiError, AsyncClient
from opentinker.sdk.client import ApiConflict
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.artifacts.store import ArtifactStore, DirectoryStore, store_of
from opentinker.shared.config import Settings
from opentinker.shared.messaging.subjects import LOG, METRIC
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import NotFound, SpecError
from opentinker.shared.types.telemetry import LogLine
from tests.conftest import NewContext, until
from tests.integration.scheduler.artifacts.kept_artifacts import (
    begun,
    expired,
    finished,
    keeping,
    kept_steps,
    listed_steps,
    no_removal,
    put_away,
    spec_with,
)
from tests.support.api import SPEC, write_checkpoint
from tests.support.object_store import SECRET, make_bucket, s3_server, s3_settings
from tests.support.scheduling import archive

WEIGHTS = os.urandom(2_500_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "trainer/optimizer.safetensors": b"moments"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
async def kept_at(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a scheduler."""
    if request.param == "directory":
        return {}
    url, bucket = request.getfixturevalue("s3"), f"bucket-{uuid.uuid4().hex}"
    await make_bucket(url, bucket)
    return s3_settings(url, bucket, tmp_path / "secrets")


@pytest.fixture
async def ctx(kept_at: dict[str, Any], new_context: NewContext) -> AsyncIterator[Context]:
    async with new_context(**kept_at) as ctx:
        yield ctx


# --- stores ---------------------------------------------------------------------------------------------------------


async def read(store: ArtifactStore, key: str, first: int = 0, length: int | None = None) -> bytes:
    opened = await store.open(key)
    try:
        wanted = opened.size - first if length is None else length
        return b"".join([chunk async for chunk in opened.chunks(first, wanted)])
    finally:
        opened.close()


async def test_stores_do_the_same(kept_at: dict[str, Any], tmp_path: Path) -> None:
    store = store_of(Settings(data_dir=tmp_path, **kept_at))
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(os.urandom(12_000_000))  # several parts of an upload
    small.write_bytes(b"")
    await store.put("t/j/a/large", large)
    await store.put("t/j/a/small", small)
    await store.put("t/j/ab", small)
    assert await store.list("t/j/a") == {"t/j/a/large": 12_000_000, "t/j/a/small": 0}
    assert await store.stat("t/j/a/large") == 12_000_000 and await store.stat("t/j/a") is None
    assert await read(store, "t/j/a/large", 1_000_001, 6_000_000) == large.read_bytes()[1_000_001:7_000_001]
    assert await read(store, "t/j/a/small") == b""
    await store.put("t/j/a/small", large)
    assert await store.stat("t/j/a/small") == 12_000_000
    for _ in range(2):
        await store.delete("t/j/a")
    assert await store.list("t") == {"t/j/ab": 0}
    with pytest.raises(NotFound):
        await store.open("t/j/a/large")


async def test_directory_shares_bytes_and_keys_stay_in_it(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kept", tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    await store.put("t/file", tmp_path / "file")
    assert (tmp_path / "file").samefile(tmp_path / "kept" / "t" / "file") and not store.apart
    (tmp_path / "kept" / "link").symlink_to(tmp_path / "file")
    for key in ("../file", "/etc/passwd", "link", "t"):
        with pytest.raises(NotFound):
            await store.open(key)
    await store.delete("t/file")
    assert not (tmp_path / "kept" / "t").exists() and (tmp_path / "file").exists()


def test_settings_of_stores_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    wrong: list[tuple[dict[str, str], str]] = [
        ({"ARTIFACTS_URL": "here"}, "artifacts_url"),
        ({"ARTIFACTS_URL": "s3://X"}, "artifacts_url"),
        ({"ARTIFACTS_URL": "s3://bucket", "ARTIFACTS_S3_ENDPOINT": "http://me:secret@host"}, "artifacts_s3_endpoint"),
        ({"ARTIFACTS_S3_ENDPOINT": "http://host"}, "artifacts_s3_endpoint = http://host is not used"),
    ]
    for given, words in wrong:
        with pytest.raises(SpecError) as caught:
            load_settings(environ={f"OPENTINKER_{name}": value for name, value in given.items()})
        assert words in str(caught.value)
    with pytest.raises(SpecError, match="AWS_ACCESS_KEY_ID"):
        store_of(Settings(artifacts_url="s3://bucket"))
    (tmp_path / "credentials").write_text("only-one-line")
    with pytest.raises(SpecError, match="two lines"):
        store_of(Settings(artifacts_url="s3://bucket", artifacts_s3_credentials_file=tmp_path / "credentials"))
    (tmp_path / "credentials").write_text(f"id-of-the-key\n{SECRET}")
    settings = Settings(artifacts_url="s3://bucket", artifacts_s3_credentials_file=tmp_path / "credentials")
    assert settings.secrets("scheduler") == [SECRET]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id-of-the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert Settings(artifacts_url="s3://bucket").secrets("scheduler") == [SECRET]
    assert Settings().secrets("scheduler") == []


# --- what is kept ---------------------------------------------------------------------------------------------------


async def test_artifacts_are_stored_by_tenant(quick: None, client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job = await begun(client, ctx)
    home = ctx.settings.data_dir / "jobs" / job
    write_checkpoint(ctx, job, 10, FILES)
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [10])
    (home / "transcripts").mkdir()
    (home / "transcripts" / "step-000010.jsonl").write_bytes(b'{"index": 0}\n')
    (home / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    live = {entry["path"]: entry for entry in await client.artifacts(job)}
    assert live["metrics.jsonl"]["bytes"] == 12 and live["transcripts/step-000010.jsonl"]["kind"] == "transcripts"
    assert live["checkpoints/step-000010/model.safetensors"]["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    await finished(ctx, job)
    store = ArtifactCatalog(ctx).store
    index, prefix = await ArtifactCatalog(ctx).index.of(job), f"default/{job}"
    kept, at = await store.list(prefix), index["checkpoints/step-000010"].at
    assert kept[f"{prefix}/{at}/model.safetensors"] == len(WEIGHTS)
    found = {entry["path"]: entry for entry in await client.artifacts(job)}
    places = {f"{prefix}/{at}/{name}" for name in (*FILES, "manifest.json")}
    assert places | {f"{prefix}/{entry.at}" for entry in index.values() if entry.manifest is None} == {*kept}
    assert index.keys() | found.keys() == found.keys() | {"checkpoints/step-000010"}
    assert all(entry["sha256"] for entry in found.values())
    assert found.keys() - live.keys() == {"logs.jsonl", "events.jsonl"}
    assert (home / "checkpoints" / "step-000010").exists() is not store.apart
    target = await client.download(job, tmp_path / "model", everything=True)
    assert {n: (target / n).read_bytes() for n in FILES} == FILES
    paths = await client.download_artifacts(job, tmp_path / "rest")
    assert (tmp_path / "rest" / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    events = [orjson.loads(line)["event"] for line in (tmp_path / "rest" / "events.jsonl").read_bytes().splitlines()]
    assert events[0] == "queued" and events[-1] == "succeeded"
    assert len(paths) == 4 and await client.download_artifacts(job, tmp_path / "rest") == paths


async def test_job_starts_from_a_checkpoint_in_the_store(quick: None, client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx)
    write_checkpoint(ctx, job, 10, {"trainer/state.json": b"{}"})
    await finished(ctx, job)
    next_job = (await client.submit(spec_with(), from_checkpoint=f"{job}@latest"))["id"]
    start = ctx.settings.data_dir / "jobs" / next_job / "start"
    assert (start / "trainer" / "state.json").read_bytes() == b"{}"
    assert (await client.job(next_job))["spec"]["start"]["from"] == f"{job}@10"


async def test_step_that_was_written_anew_replaces_the_one_that_is_kept(client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx)
    write_checkpoint(ctx, job, 10, {"model.safetensors": b"before", "old.txt": b"old"})
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [10])
    write_checkpoint(ctx, job, 10, {"model.safetensors": b"after"}, epoch=2)
    artifacts = ArtifactCatalog(ctx)

    async def replaced() -> bool:
        entry = (await artifacts.index.of(job)).get("checkpoints/step-000010")
        return entry is not None and entry.manifest is not None and entry.manifest.epoch == 2

    await until(replaced)
    key = f"default/{job}/{(await artifacts.index.of(job))['checkpoints/step-000010'].at}"
    assert await read(artifacts.store, f"{key}/model.safetensors") == b"after"
    await until(
        lambda: artifacts.store.list(f"default/{job}"),
        lambda there: there.keys() == {f"{key}/model.safetensors", f"{key}/manifest.json"},
    )  # the one before is deleted afterwards


async def test_what_is_left_expires_but_for_what_is_published(quick: None, client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx, keep_all=True, expire_days=1e-9)
    for step in (10, 20):
        write_checkpoint(ctx, job, step, {"trainer/state.json": b"{}"})
        await keeping(ctx, job, step)
    await client.publish(f"{job}@10", "good")
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await until(lambda: expired(client, job))
    await put_away(ctx, job)
    assert await kept_steps(ctx, job) == [10] and (await client.job(job))["artifacts"]["published"] == ["good"]
    assert [event["event"] for event in await client.event_log(job)].count("artifacts_expired") == 1
    assert not (ctx.settings.data_dir / "jobs" / job).exists()
    assert {entry["path"] for entry in await client.artifacts(job)} == {"checkpoints/step-000010/trainer/state.json"}
    await MetricSource(ctx.bus, job, "trainer").emit(1, {"reward/mean": 0.5})
    await until(lambda: _has_metrics(ctx, job, 1))
    await client.unpublish("good")
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [])
    await until(lambda: ArtifactCatalog(ctx).store.list(f"default/{job}"), lambda found: not found)
    await until(lambda: _has_metrics(ctx, job, 0))
    await until(lambda: client.job(job), lambda found: found["deleted"] is not None)
    assert not await ctx.store.redis.exists(f"adm:{job}", f"job:{job}:failures")
    with pytest.raises(ApiError) as gone:
        await client.metrics(job)
    assert gone.value.status == 410


async def _has_metrics(ctx: Context, job: str, count: int) -> bool:
    return len(await ctx.bus.history(METRIC, 0, 10, job=job, source="*")) == count


def test_an_inference_job_keeps_no_checkpoints() -> None:
    serving = {"name": "x", "kind": "inference", "model": {"base": "x"}, "artifacts": {"keep_all": True}}
    with pytest.raises(SpecError, match=r"artifacts\.keep_all"):
        parse_spec(serving)


async def _refuses_until_files_can_be_removed(client: AsyncClient, ctx: Context, job: str, size: int) -> None:
    """Also when it is repeated: what a failed call has begun to remove is still there."""
    jobs = ctx.settings.data_dir / "jobs"
    if not (jobs / job).exists():  # an object store has it all
        assert (await client.delete_artifacts(job))["bytes"] == size
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", no_removal)
        for _ in range(2):
            with pytest.raises(ApiConflict, match="could not be removed"):
                await client.delete_artifacts(job)
    assert (await client.job(job))["deleted"] is None
    assert 0 < (await client.delete_artifacts(job))["bytes"] <= size
    assert not [path for path in jobs.iterdir() if job in path.name or "removing" in path.name]


async def test_what_is_deleted_is_gone_and_counts_no_more(quick: None, client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx, keep_all=True)
    for step in (10, 20):
        write_checkpoint(ctx, job, step, {"model.safetensors": b"weights"})
    with pytest.raises(ApiConflict, match="may resume"):
        await client.delete_artifacts(job, 10)
    with pytest.raises(ApiConflict, match="when it has ended"):
        await client.delete_artifacts(job)
    await MetricSource(ctx.bus, job, "trainer").emit(1, {"reward/mean": 0.5})
    line = LogLine(job=job, time=1.0, level="info", service="trainer", worker="trainer-0", event="said")
    await ctx.bus.emit(LOG, line, job=job, level="info")
    await until(lambda: client.metrics(job))
    await finished(ctx, job)
    assert (await client.delete_artifacts(job, 10))["bytes"] == 7
    assert (await client.job(job))["deleted"] is None
    assert await listed_steps(client, job) == [20]
    index = ArtifactCatalog(ctx).index
    before = (await index.stored("default"))[job]
    assert before == sum(entry["bytes"] for entry in await client.artifacts(job))
    await _refuses_until_files_can_be_removed(client, ctx, job, before)
    assert await client.artifacts(job) == [] and job not in await index.stored("default")
    await until(lambda: ArtifactCatalog(ctx).store.list(f"default/{job}"), lambda found: not found)
    for stream, subject in (("METRICS", f"metric.{job}.*"), ("LOGS", f"log.{job}.*")):
        assert await ctx.bus.counts(stream, subject) == {}
    assert (await client.job(job))["deleted"] is not None
    for what in ("metrics", "logs?format=json", "timeline", "transcripts", "rollouts", "distributions", "failures"):
        with pytest.raises(ApiError, match="deleted") as gone:
            await client._http.json(dict, "GET", f"/v1/jobs/{job}/{what}")
        assert gone.value.status == 410
    keys = {key async for key in ctx.store.redis.scan_iter(match=f"*{job}*") if ":op:" not in key}
    assert keys <= {f"job:{job}", f"job:{job}:states", f"job:{job}:events", f"spent:job:{job}"}
    events = [event["event"] for event in await ctx.store.events(job)]
    assert events[0] == "queued" and events[-1] == "artifacts_removed" and "checkpoints_removed" not in events


# --- a store that is away -------------------------------------------------------------------------------------------


async def test_silent_store_costs_nothing(store: Store, tmp_path: Path, s3: str, new_context: NewContext) -> None:
    """The bucket is not there yet: what is committed waits, and is put there as soon as it is."""
    bucket = f"bucket-{uuid.uuid4().hex}"
    settings = s3_settings(s3, bucket, tmp_path / "secrets")
    async with new_context(**settings) as ctx:
        job = "j-patient000"
        await store.create_job(id=job, spec=SPEC, tenant="default")
        await store.transition(job, JobState.STARTING, epoch=1)
        directory = write_checkpoint(ctx, job, 10, {"model.safetensors": b"weights"})
        archiver = Archiver(ctx)
        await archive(archiver)
        assert await kept_steps(ctx, job) == []
        directory.rename(directory.with_name(".removing"))  # its trainer goes on meanwhile
        await make_bucket(s3, bucket)
        await archiver.put()
        assert await kept_steps(ctx, job) == [10]
        at = (await archiver.index.of(job))["checkpoints/step-000010"].at
        assert await read(archiver.artifacts.store, f"default/{job}/{at}/model.safetensors") == b"weights"
