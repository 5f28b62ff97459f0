"""Jobs' leavings on their way into the artifact store when something goes wrong: nothing is lost, nothing stuck."""

from __future__ import annotations

import errno
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from opentinker.services.scheduler.artifacts import checkpoint_dir, retention
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.artifacts.checkpoint_dir import CheckpointView
from opentinker.services.scheduler.artifacts.retention import CheckpointMetrics, Rule
from opentinker.services.scheduler.artifacts.store import DirectoryStore, StoreUnavailable
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import TrainingEvaluation
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.manifest import read_manifest
from tests.support.api import write_checkpoint
from tests.support.scheduling import archive, new_job

FILES = {"model.safetensors": b"weights", "trainer/state.json": b"{}"}
PATH = "checkpoints/step-000010"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is on another file system than the jobs."""
    monkeypatch.setattr(DirectoryStore, "apart", True)


async def begun(ctx: Context) -> str:
    """A job that has had a trainer, and a checkpoint."""
    job = await new_job(ctx.store, state=JobState.STARTING)
    write_checkpoint(ctx, job, 10, FILES)
    return job


async def over(ctx: Context, job: str) -> None:
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await ctx.store.ended(job)


def staged(ctx: Context, job: str) -> Path:
    (place,) = (ctx.settings.data_dir / "staged" / "default" / job).glob("step-000010.*")
    return place


async def size_of(archiver: Archiver, job: str, name: str = "model.safetensors") -> int | None:
    """In the store."""
    return await archiver.artifacts.store.stat(f"default/{job}/{(await archiver.index.of(job))[PATH].at}/{name}")


async def tar_of(archiver: Archiver, job: JobRecord, first: int = 0) -> tuple[str, bytes]:
    archive = await checkpoint_dir.open_archive(await archiver.artifacts.checkpoints(job), 10, everything=True)
    try:
        return archive.etag, b"".join([chunk async for chunk in archive.chunks(first, archive.size - first)])
    finally:
        archive.close()


async def test_a_full_disk_loses_no_checkpoint(ctx: Context, apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job, archiver = await begun(ctx), Archiver(ctx, linger_s=-60.0)
    await archiver.index.open(job)
    await over(ctx, job)
    home = ctx.settings.data_dir / "jobs" / job / PATH

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_dir, "hard_link", full)
        for _ in range(2):
            await archive(archiver)
    assert (home / "model.safetensors").read_bytes() == b"weights", "it is the last copy"
    assert job in await archiver.index.opened(), "it is tried again"
    await archive(archiver)
    assert (await archiver.index.of(job)).keys() == {PATH} and home.exists()
    await archiver.scan()
    assert job not in await archiver.index.opened() and not home.exists()
    assert await size_of(archiver, job) == 7


async def test_what_the_store_cannot_have_stays_where_it_is(ctx: Context, apart: None) -> None:
    job, archiver = await begun(ctx), Archiver(ctx, linger_s=-60.0)
    home = ctx.settings.data_dir / "jobs" / job / PATH
    (home / "model.safetensors").write_bytes(b"half")
    await archiver.index.open(job)
    await over(ctx, job)
    await archiver.scan()
    assert job not in await archiver.index.opened()
    assert (home / "model.safetensors").read_bytes() == b"half" and (home / "trainer" / "state.json").exists()


@pytest.mark.parametrize("what", ["the checkpoint", "a file of it"])
async def test_a_checkpoint_that_moves_while_it_is_opened_is_opened_in_the_store(
    ctx: Context, apart: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The archiver removes the job's directory when the request has listed it and opens its first file."""
    job, archiver = await begun(ctx), Archiver(ctx, linger_s=-60.0)
    await archiver.index.open(job)
    await over(ctx, job)
    await archive(archiver)
    home, catalog = ctx.settings.data_dir / "jobs" / job / PATH, archiver.artifacts
    assert home.exists() and (await archiver.index.of(job)).keys() == {PATH}, "in both places"
    opens, moved = catalog.workshop.open, []

    async def moves(key: str) -> Any:
        await archiver.scan()
        moved.append(key)
        return await opens(key)

    monkeypatch.setattr(catalog.workshop, "open", moves)
    if what == "the checkpoint":
        opened: Any = await catalog.open_checkpoint(await ctx.store.job(job), None, True)
    else:
        opened, _ = await catalog.open(await ctx.store.job(job), f"{PATH}/model.safetensors")
    data = b"".join([chunk async for chunk in opened.chunks(0, opened.size)])
    opened.close()
    assert b"weights" in data and not home.exists() and len(moved) == 1


async def test_download_goes_on_when_the_checkpoint_has_moved_into_the_store(ctx: Context) -> None:
    job, archiver = await ctx.store.job(await begun(ctx)), Archiver(ctx)
    before = await tar_of(archiver, job)
    await archive(archiver)
    shutil.rmtree(ctx.settings.data_dir / "jobs" / job.id)
    etag, rest = await tar_of(archiver, job, first=1000)
    assert (etag, before[1][:1000] + rest) == before


@pytest.mark.parametrize("text", [b"", b"{"])
async def test_torn_manifest_of_what_is_staged_is_staged_again(ctx: Context, text: bytes) -> None:
    job, archiver = await begun(ctx), Archiver(ctx)
    await archiver.scan()
    torn = staged(ctx, job)
    (torn / "manifest.json").write_bytes(text)
    await archiver.put()
    assert await archiver.index.of(job) == {} and not torn.exists()
    torn.mkdir(parents=True)
    (torn / "manifest.json").write_bytes(text)
    await archive(archiver)
    assert (await archiver.index.of(job)).keys() == {PATH}


async def test_a_failed_upload_or_removal_delays_no_other(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, archiver = sorted([await begun(ctx), await begun(ctx), await begun(ctx)]), Archiver(ctx)
    await archiver.scan()
    places = [staged(ctx, job) for job in jobs]
    (places[0] / "model.safetensors").unlink()
    store = archiver.artifacts.store
    put, delete = store.put, store.delete

    async def refuses(key: str, *rest: Any) -> None:
        if key.startswith(f"default/{jobs[1]}/"):
            raise StoreUnavailable("not this one")
        await (put if rest else delete)(key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", refuses)
        patch.setattr(store, "delete", refuses)
        await archiver.put()
        kept = [(await archiver.index.of(job)).keys() for job in jobs]
        assert kept == [set(), set(), {PATH}] and not places[0].exists() and places[1].exists()
        await archive(archiver)
        assert (await archiver.index.of(jobs[0])).keys() == {PATH}, "it is staged and put again"
    await archiver.put()
    assert (await archiver.index.of(jobs[1])).keys() == {PATH}
    at = (await archiver.index.of(jobs[1]))[PATH].at
    for job in jobs:
        await archiver.index.remove("default", job, [PATH])
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", refuses)
        await archiver.remove()
    assert await archiver.index.removing() == [f"default/{jobs[1]}/{at}"]


async def test_unanswered_history_is_retried(ctx: Context, apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job, archiver = await begun(ctx), Archiver(ctx, linger_s=-60.0)
    await archive(archiver)
    await over(ctx, job)

    async def away(*args: Any, **keys: Any) -> None:
        raise NoReply("history: the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(ctx.bus, "history", away)
        await archiver.scan()
    assert job in await archiver.index.opened()
    await archiver.scan()
    assert job not in await archiver.index.opened()


async def test_published_while_the_leader_puts_it(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job, leader, publisher = await ctx.store.job(await begun(ctx)), Archiver(ctx), Archiver(ctx)
    (held,) = await publisher.artifacts.checkpoints(job)

    async def late(key: str, file: Path) -> None:
        await leader.put()
        raise StoreUnavailable(f"{file} has gone")

    monkeypatch.setattr(publisher.artifacts.store, "put", late)
    kept = await publisher.archive(job, held)
    assert kept.manifest == held.manifest
    monkeypatch.setattr(publisher, "stage", None)  # it is not even asked
    assert await publisher.archive(job, held) == kept


async def test_what_was_measured_brings_nothing_back(ctx: Context) -> None:
    job, archiver = await begun(ctx), Archiver(ctx)
    await archive(archiver)
    entry = (await archiver.index.of(job))[PATH]
    measured = msgspec.structs.replace(entry, metric=0.5)
    await archiver.index.note(job, entry, measured)
    assert (await archiver.index.of(job))[PATH] == measured
    better = msgspec.structs.replace(entry, metric=0.9)
    await archiver.index.note(job, entry, better)
    assert (await archiver.index.of(job))[PATH] == measured, "it is another one by now"
    await archiver.index.remove("default", job, [PATH])
    await archiver.index.note(job, measured, better)
    (held,) = [replace(held, metric=0.9) for held in await archiver.artifacts.checkpoints(await ctx.store.job(job))]
    await archiver._note(await ctx.store.job(job), [held], {10: measured})
    assert await archiver.index.of(job) == {}


async def test_what_killed_schedulers_left_is_swept(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job, archiver, data = await begun(ctx), Archiver(ctx), ctx.settings.data_dir
    checkpoint = data / "jobs" / job / PATH
    await archive(archiver)
    assert list((data / "staged").iterdir()) == [], "no empty directories stay"
    mark = uuid.uuid4().hex
    kept = data / "artifacts" / "default" / job / (await archiver.index.of(job))[PATH].at
    left = [
        data / "staged" / "default" / job / f".step-000010-{mark}",
        data / "staged" / "default" / "j-another" / f".files-{mark}",
        checkpoint.with_name(f".removing-{mark}"),
        data / "artifacts" / "default" / f".removing-{mark}",
        kept / f".putting-{mark}",
    ]
    for place in left[:-1]:
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"half")
    left[-1].write_bytes(b"half")
    trainers = checkpoint.with_name(".removing-step-000010-1-1")
    trainers.mkdir()
    archiver.sweep()
    assert all(place.exists() for place in left), "somebody may be at it"
    archiver.sweep(orphan_s=-60.0)
    assert not any(place.exists() for place in left) and list((data / "staged").iterdir()) == []
    assert trainers.exists() and (checkpoint / "model.safetensors").exists()
    assert await size_of(archiver, job) == 7


# --- the best by a metric of evaluations, which come after the checkpoints ------------------------------------------


def evaluated(ctx: Context, job: str, step: int, exact: float | None = None, epoch: int = 1) -> None:
    """A line of the trainer's, when an evaluation is over."""
    metrics = {} if exact is None else {"val/exact": exact}
    with (ctx.settings.data_dir / "jobs" / job / "validation.jsonl").open("ab") as file:
        file.write(orjson.dumps({"epoch": epoch, "step": step, **metrics}) + b"\n")


async def judged(ctx: Context, **validation: Any) -> str:
    """A job that keeps its newest checkpoint and the best one, by evaluations every ten steps."""
    rules = {"keep_last": 1, "keep_best": 1, "best_metric": "val/exact"}
    plan = {"every": 10, "episodes": 4} | validation
    return await new_job(ctx.store, state=JobState.STARTING, artifacts=rules, validation=plan, train={"steps": 100})


async def after(ctx: Context, archiver: Archiver, job: str, *steps: int, epoch: int = 1) -> list[int]:
    """Steps that are kept once the trainer has saved these, and swept them."""
    for step in steps:
        directory = write_checkpoint(ctx, job, step, FILES, epoch)
        await archive(archiver)
        shutil.rmtree(directory)
    await archive(archiver)
    return sorted(kept.manifest.step for kept in (await archiver.index.of(job)).values() if kept.manifest is not None)


async def test_checkpoint_whose_evaluation_is_still_to_come_stays(ctx: Context) -> None:
    job, archiver = await judged(ctx), Archiver(ctx)
    assert await after(ctx, archiver, job, 10, 15, 20) == [10, 20], "15 is never evaluated"
    evaluated(ctx, job, 10, 0.9)
    assert await after(ctx, archiver, job, 30) == [10, 20, 30]
    evaluated(ctx, job, 20, 0.5)
    assert await after(ctx, archiver, job) == [10, 30]
    evaluated(ctx, job, 30, 0.95)
    assert await after(ctx, archiver, job, 40) == [30, 40], "a better one"


async def test_evaluations_of_a_job_are_stored_with_its_checkpoints(
    ctx: Context,
) -> None:
    job, archiver = await new_job(ctx.store, state=JobState.STARTING, artifacts={"keep_all": True}), Archiver(ctx)
    archiver._metrics = CheckpointMetrics(max_values=2)
    home = ctx.settings.data_dir / "jobs" / job

    async def stored() -> dict[int, TrainingEvaluation | None]:
        await after(ctx, archiver, job)
        return {
            e.manifest.step: e.evaluation for e in (await archiver.index.of(job)).values() if e.manifest is not None
        }

    assert await after(ctx, archiver, job, 10, 15, 20) == [10, 15, 20]
    line = {"epoch": 1, "step": 10, "time": 5.0, "loss": 1.0, "val/a": None, "val/b": 1, "val/c": 2.0, "val/d": 3.0}
    (home / "validation.jsonl").write_bytes(orjson.dumps(line) + b'\n{"epoch": 1, "st')
    first = TrainingEvaluation(finished=5.0, values={"val/b": 1.0, "val/c": 2.0})
    assert await stored() == {10: first, 15: None, 20: None}
    (home / "validation.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    for step, exact in ((10, 0.25), (20, 0.5)):
        evaluated(ctx, job, step, exact)
    evaluated(ctx, job, 15, 0.75, epoch=2)
    again, last = (TrainingEvaluation(finished=0.0, values={"val/exact": exact}) for exact in (0.25, 0.5))
    assert await stored() == {10: again, 15: None, 20: last}, "epoch 2 had other weights"
    (home / "validation.jsonl").unlink()
    assert await stored() == {10: again, 15: None, 20: last}
    assert await after(ctx, Archiver(ctx), job) == [10, 15, 20]
    assert (await archiver.index.of(job))[PATH].evaluation == again


async def test_evaluations_that_could_not_be_read_are_read_again(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job, archiver = await new_job(ctx.store, state=JobState.STARTING, artifacts={"keep_all": True}), Archiver(ctx)
    assert await after(ctx, archiver, job, 10) == [10]
    evaluated(ctx, job, 10, 0.5)

    def refuse(_: Path) -> Any:
        raise OSError("the disk is away")

    with monkeypatch.context() as broken:
        broken.setattr(retention, "_lines", refuse)
        await after(ctx, archiver, job)
    assert (await archiver.index.of(job))[PATH].evaluation is None
    await after(ctx, archiver, job)
    found = (await archiver.index.of(job))[PATH].evaluation
    assert found == TrainingEvaluation(finished=0.0, values={"val/exact": 0.5})


async def test_a_checkpoint_saved_again_has_the_evaluation_that_came_before_it_was_stored(ctx: Context) -> None:
    job, archiver = await new_job(ctx.store, state=JobState.STARTING, artifacts={"keep_all": True}), Archiver(ctx)
    write_checkpoint(ctx, job, 10, FILES)
    await archive(archiver)
    (ctx.settings.data_dir / "jobs" / job / "validation.jsonl").write_bytes(b'{"epoch": 1, "step": 5}\n')
    await archive(archiver)
    write_checkpoint(ctx, job, 10, FILES, created=2e9)
    evaluated(ctx, job, 10, 0.5)
    await archiver.scan()  # sees the new one's evaluation while the index has the old one
    for _ in range(2):  # it is stored, then measured
        await archive(archiver)
    found = (await archiver.index.of(job))[PATH]
    assert found.manifest is not None and found.manifest.created == 2e9
    assert found.evaluation == TrainingEvaluation(finished=0.0, values={"val/exact": 0.5})


async def test_checkpoint_that_will_not_be_evaluated_any_more_goes(ctx: Context) -> None:
    job, archiver = await judged(ctx), Archiver(ctx)
    assert await after(ctx, archiver, job, 10, 20, 30) == [10, 20, 30]
    evaluated(ctx, job, 10)  # without the metric: none of its episodes was played
    assert await after(ctx, archiver, job) == [20, 30]
    evaluated(ctx, job, 30, 0.1)  # they come in order: that of 20 was cut off
    assert await after(ctx, archiver, job, 40, 45) == [30, 40, 45]
    await over(ctx, job)
    assert await after(ctx, archiver, job) == [30, 45], "the job is over"


async def test_what_was_measured_before_a_rollback_is_of_other_weights(ctx: Context) -> None:
    """The first trainer came to step 20 and was evaluated there, the second one went on from 10."""
    job, archiver = await judged(ctx), Archiver(ctx)
    evaluated_at = ctx.settings.data_dir / "jobs" / job
    evaluated_at.mkdir(parents=True)
    for step, exact in ((10, 0.4), (20, 0.9)):
        evaluated(ctx, job, step, exact)
    directory = write_checkpoint(ctx, job, 20, FILES, epoch=2)
    manifest = msgspec.structs.replace(read_manifest(directory), resumed={1: 0, 2: 10})
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    held = [CheckpointView(manifest, archiver.artifacts.workshop, "", here=True)]
    rule = Rule.of((await ctx.store.job(job)).spec)
    (found,) = CheckpointMetrics().add(evaluated_at, held, rule, over=False)
    assert found.metric is None and found.awaited
    evaluated(ctx, job, 20, 0.1, epoch=2)
    (found,) = CheckpointMetrics().add(evaluated_at, held, rule, over=False)
    assert found.metric == 0.1 and not found.awaited
    (resumed,) = CheckpointMetrics().add(
        evaluated_at, [replace(held[0], manifest=msgspec.structs.replace(manifest, step=10))], rule, over=False
    )
    assert resumed.metric == 0.4, "these weights are those of the first trainer"


def test_only_what_is_evaluated_is_waited_for() -> None:
    rule = Rule(last=1, best=1, metric="val/exact", every=10, at_start=False, steps=25)
    assert [step for step in range(30) if rule.is_due(step)] == [10, 20, 25]
    assert Rule(last=1, best=1, metric="reward/mean").is_due(10) is False
