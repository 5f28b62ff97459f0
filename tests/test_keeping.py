"""Jobs' leavings on their way into the artifact store when something goes wrong: nothing is lost, nothing stuck."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler import checkpoints
from opentinker.services.scheduler.keeping import Keeping
from opentinker.services.scheduler.stores import DirectoryStore, StoreAway
from opentinker.shared.bus import NoReply
from opentinker.shared.service import Context
from opentinker.shared.store import Store
from opentinker.shared.types import JobRecord, JobState
from tests.api import SPEC, write_checkpoint
from tests.conftest import Server
from tests.scheduling import context

FILES = {"model.safetensors": b"weights", "trainer/state.json": b"{}"}
PATH = "checkpoints/step-000010"


@pytest.fixture
async def ctx(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> AsyncIterator[Context]:
    async with context(nats_server, valkey_server, "scheduler-0", tmp_path / "data") as ctx:
        yield ctx


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is on another file system than the jobs; those are put away as soon as they are over."""
    monkeypatch.setattr(DirectoryStore, "apart", True)
    monkeypatch.setattr("opentinker.services.scheduler.keeping.LINGER_S", -60.0)


async def begun(ctx: Context) -> str:
    """A job that has had a trainer, and a checkpoint."""
    job = f"j-{uuid.uuid4().hex[:10]}"
    await ctx.store.create_job(id=job, spec=SPEC, tenant="default")
    await ctx.store.transition(job, JobState.STARTING, epoch=1)
    write_checkpoint(ctx, job, 10, FILES)
    return job


async def over(ctx: Context, job: str) -> None:
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await ctx.store.ended(job)


async def record(ctx: Context, job: str) -> JobRecord:
    return (await ctx.store.jobs([job]))[0]


def staged(ctx: Context, job: str, name: str = "step-000010") -> Path:
    return ctx.settings.data_dir / "staged" / "default" / job / name


async def tar_of(keeping: Keeping, job: JobRecord, first: int = 0) -> tuple[str, bytes]:
    archive = await checkpoints.open_archive(await keeping.artifacts.checkpoints(job), 10, everything=True)
    try:
        return archive.etag, b"".join([chunk async for chunk in archive.chunks(first, archive.size - first)])
    finally:
        archive.close()


async def test_disk_that_refuses_costs_no_checkpoint(
    ctx: Context, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, keeping = await begun(ctx), Keeping(ctx)
    await keeping.index.open(job)
    await over(ctx, job)
    home = ctx.settings.data_dir / "jobs" / job / PATH

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "second_name", full)
        for _ in range(2):
            await keeping.look()
            await keeping.put()
    assert (home / "model.safetensors").read_bytes() == b"weights", "it is the last copy"
    assert job in await keeping.index.opened(), "it is tried again"
    await keeping.look()
    await keeping.put()
    assert (await keeping.index.of(job)).keys() == {PATH} and home.exists()
    await keeping.look()
    assert job not in await keeping.index.opened() and not home.exists()
    assert await keeping.artifacts.store.stat(f"default/{job}/{PATH}/model.safetensors") == 7


async def test_what_the_store_cannot_have_stays_where_it_is(ctx: Context, apart: None) -> None:
    job, keeping = await begun(ctx), Keeping(ctx)
    home = ctx.settings.data_dir / "jobs" / job / PATH
    (home / "model.safetensors").write_bytes(b"half")
    await keeping.index.open(job)
    await over(ctx, job)
    await keeping.look()
    assert job not in await keeping.index.opened()
    assert (home / "model.safetensors").read_bytes() == b"half" and (home / "trainer" / "state.json").exists()


async def test_download_goes_on_when_the_checkpoint_has_moved_into_the_store(ctx: Context) -> None:
    job, keeping = await record(ctx, await begun(ctx)), Keeping(ctx)
    before = await tar_of(keeping, job)
    await keeping.look()
    await keeping.put()
    shutil.rmtree(ctx.settings.data_dir / "jobs" / job.id)
    etag, rest = await tar_of(keeping, job, first=1000)
    assert (etag, before[1][:1000] + rest) == before


@pytest.mark.parametrize("text", [b"", b"{"])
async def test_torn_manifest_of_what_is_staged_is_staged_again(ctx: Context, text: bytes) -> None:
    job, keeping = await begun(ctx), Keeping(ctx)
    await keeping.look()
    (staged(ctx, job) / "manifest.json").write_bytes(text)
    await keeping.put()
    assert await keeping.index.of(job) == {}
    staged(ctx, job).mkdir(parents=True, exist_ok=True)
    (staged(ctx, job) / "manifest.json").write_bytes(text)
    await keeping.look()
    await keeping.put()
    assert (await keeping.index.of(job)).keys() == {PATH}


async def test_one_that_cannot_be_put_or_removed_holds_up_no_other(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, keeping = sorted([await begun(ctx), await begun(ctx), await begun(ctx)]), Keeping(ctx)
    await keeping.look()
    (staged(ctx, jobs[0]) / "model.safetensors").unlink()
    store = keeping.artifacts.store
    put, delete = store.put, store.delete

    async def refuses(key: str, *rest: Any) -> None:
        if key.startswith(f"default/{jobs[1]}/"):
            raise StoreAway("not this one")
        await (put if rest else delete)(key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", refuses)
        patch.setattr(store, "delete", refuses)
        await keeping.put()
        kept = [(await keeping.index.of(job)).keys() for job in jobs]
        assert kept == [set(), set(), {PATH}] and not staged(ctx, jobs[0]).exists() and staged(ctx, jobs[1]).exists()
        await keeping.look()
        await keeping.put()
        assert (await keeping.index.of(jobs[0])).keys() == {PATH}, "it is staged and put again"
    await keeping.put()
    assert (await keeping.index.of(jobs[1])).keys() == {PATH}
    for job in jobs:
        await keeping.index.remove("default", job, [PATH])
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", refuses)
        await keeping.remove()
    assert await keeping.index.removing() == [f"default/{jobs[1]}/{PATH}"]


async def test_history_that_does_not_answer_is_asked_again(
    ctx: Context, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, keeping = await begun(ctx), Keeping(ctx)
    await keeping.look()
    await keeping.put()
    await over(ctx, job)

    async def away(*args: Any, **keys: Any) -> None:
        raise NoReply("history: the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(ctx.bus, "history", away)
        await keeping.look()
    assert job in await keeping.index.opened()
    await keeping.look()
    assert job not in await keeping.index.opened()


async def test_published_while_the_leader_puts_it(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job, leader, publisher = await record(ctx, await begun(ctx)), Keeping(ctx), Keeping(ctx)
    (held,) = await publisher.artifacts.checkpoints(job)

    async def late(key: str, file: Path) -> None:
        await leader.put()
        raise StoreAway(f"{file} has gone")

    monkeypatch.setattr(publisher.artifacts.store, "put", late)
    kept = await publisher.keep(job, held)
    assert kept.manifest == held.manifest
    monkeypatch.setattr(publisher, "stage", None)  # it is not even asked
    assert await publisher.keep(job, held) == kept


async def test_what_was_measured_brings_nothing_back(ctx: Context) -> None:
    job, keeping = await begun(ctx), Keeping(ctx)
    await keeping.look()
    await keeping.put()
    entry = (await keeping.index.of(job))[PATH]
    await keeping.index.note(job, entry, 0.5)
    measured = (await keeping.index.of(job))[PATH]
    assert measured == msgspec.structs.replace(entry, metric=0.5)
    await keeping.index.note(job, entry, 0.9)
    assert (await keeping.index.of(job))[PATH] == measured, "it is another one by now"
    await keeping.index.remove("default", job, [PATH])
    await keeping.index.note(job, measured, 0.9)
    (held,) = [replace(held, metric=0.9) for held in await keeping.artifacts.checkpoints(await record(ctx, job))]
    await keeping._note(await record(ctx, job), [held], {10: measured})
    assert await keeping.index.of(job) == {}


async def test_what_killed_schedulers_left_is_swept(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job, keeping, data = await begun(ctx), Keeping(ctx), ctx.settings.data_dir
    checkpoint = data / "jobs" / job / PATH
    await keeping.look()
    await keeping.put()
    assert list((data / "staged").iterdir()) == [], "no empty directories stay"
    mark = uuid.uuid4().hex
    left = [
        staged(ctx, job, f".step-000010-{mark}"),
        staged(ctx, "j-another", f".files-{mark}"),
        checkpoint.with_name(f".removing-{mark}"),
        data / "artifacts" / "default" / f".removing-{mark}",
        data / "artifacts" / "default" / job / PATH / f".putting-{mark}",
    ]
    for place in left[:-1]:
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"half")
    left[-1].write_bytes(b"half")
    trainers = checkpoint.with_name(".removing-step-000010-1-1")
    trainers.mkdir()
    keeping.sweep()
    assert all(place.exists() for place in left), "somebody may be at it"
    monkeypatch.setattr("opentinker.services.scheduler.keeping.ORPHAN_S", -60.0)
    keeping.sweep()
    assert not any(place.exists() for place in left) and list((data / "staged").iterdir()) == []
    assert trainers.exists() and (checkpoint / "model.safetensors").exists()
    assert await keeping.artifacts.store.stat(f"default/{job}/{PATH}/model.safetensors") == 7
