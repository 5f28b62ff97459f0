"""A scheduler that led, was stopped, and wakes when another one leads: it records, deletes and loses nothing.

Stopped at every single point: before each command to Redis and each piece of work on files that archiver does.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.artifacts.history import delete_history
from opentinker.services.scheduler.artifacts.store import DirectoryStore
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Fenced
from tests.support.api import write_checkpoint
from tests.support.scheduling import archive, new_job

PATH = "checkpoints/step-000010"


@pytest.fixture
async def own(ctx: Context) -> AsyncIterator[Store]:
    """The connection of whoever is stopped."""
    async with Store.connect(ctx.settings.redis_url, "old") as own:
        yield own


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 6])
def stride(request: pytest.FixtureRequest) -> int:
    """Every so many operations are tried."""
    return int(request.param)


def said(at: int, stride: int, refused: int) -> None:
    points = at // stride - 1
    print(f"\nstopped at {points} points, refused {refused} times, recorded and deleted nothing then")
    assert at > 40 and refused > points / 2


class Stopped:
    """Whose task is stopped before its operation number `at`, while `meanwhile` happens."""

    def __init__(self, at: int, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self.at, self.meanwhile, self.count = at, meanwhile, 0
        self.task: asyncio.Task[Any] | None = None

    async def point(self) -> None:
        if asyncio.current_task() is not self.task:
            return
        self.count += 1
        if self.count == self.at:
            task, self.task = self.task, None  # what happens meanwhile is no work of ours
            await self.meanwhile()
            self.task = task

    def watch(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        command, to_thread = store.redis.execute_command, asyncio.to_thread

        async def commanded(*args: Any, **options: Any) -> Any:
            await self.point()
            return await command(*args, **options)

        async def threaded(function: Any, *args: Any, **options: Any) -> Any:
            await self.point()
            return await to_thread(function, *args, **options)

        monkeypatch.setattr(store.redis, "execute_command", commanded)
        monkeypatch.setattr(asyncio, "to_thread", threaded)

    async def run(self, work: Callable[[], Awaitable[None]]) -> bool:
        """True: it was refused."""
        self.task = asyncio.current_task()
        try:
            await work()
        except Fenced:
            return True
        finally:
            self.task = None
        return False


async def stop(
    ctx: Context, own: Store, at: int, monkeypatch: pytest.MonkeyPatch,
    work: Callable[[], Awaitable[None]], meanwhile: Callable[[], Awaitable[None]],
) -> tuple[bool, bool]:  # fmt: skip
    """Stop this work before its operation number `at`: it changes nothing of what happens meanwhile.

    Return whether it was refused, and whether it has no such operation."""
    before: list[Any] = []

    async def noted() -> None:
        await meanwhile()
        before.extend([await state_of(ctx), files_of(ctx)])

    stopped = Stopped(at, noted)
    with monkeypatch.context() as patch:
        stopped.watch(own, patch)
        refused = await stopped.run(work)
    assert not before or [await state_of(ctx), files_of(ctx)] == before, f"stopped before operation {at}"
    return refused, not before


async def lead(store: Store) -> int:
    return int(await store.redis.incr("leader:epoch"))


async def state_of(ctx: Context) -> dict[str, Any]:
    """All of Redis that the archiver writes."""
    redis, found = ctx.store.redis, dict[str, Any]()
    for name in sorted(await redis.keys("*")):
        if not name.startswith(("artifact:", "stored:", "published:", "job", "spent:")) or ":op:" in name:
            continue
        match await redis.type(name):
            case "hash":
                found[name] = await redis.hgetall(name)
            case "set":
                found[name] = await redis.smembers(name)
            case "zset":
                found[name] = await redis.zrange(name, 0, -1)
            case "stream":
                found[name] = await redis.xlen(name)
    return found


def files_of(ctx: Context) -> dict[str, str]:
    data = ctx.settings.data_dir
    return {
        path.relative_to(data).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in ("artifacts", "jobs")
        for path in sorted((data / part).rglob("*"))
        if path.is_file()
    }


async def whole(ctx: Context, job: str) -> dict[int, int]:
    """Epoch by step of what the index says is kept, all of whose files are in the store, and nothing else is there."""
    archiver = Archiver(ctx)
    index, found, places = await archiver.index.of(job), dict[int, int](), set[str]()
    for kept in index.values():
        manifest = kept.manifest
        names = [""] if manifest is None else [f"/{name}" for name in (*manifest.files, "manifest.json")]
        for name in names:
            file = ctx.settings.data_dir / "artifacts" / "default" / job / (kept.at + name)
            wanted = kept.sha256 if manifest is None else getattr(manifest.files.get(name[1:]), "sha256", None)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            assert wanted in (None, digest), f"{file} is not what the index says"
            places.add(f"default/{job}/{kept.at}{name}")
        if manifest is not None:
            found[manifest.step] = manifest.epoch
    assert (await archiver.artifacts.store.list(f"default/{job}")).keys() == places
    assert (await archiver.index.stored("default")).get(job, 0) == sum(kept.bytes for kept in index.values())
    return found


def sweep(ctx: Context, job: str, step: int) -> None:
    """As the trainer does."""
    directory = ctx.settings.data_dir / "jobs" / job / f"checkpoints/step-{step:06d}"
    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    directory.rmdir()


async def rounds(archiver: Archiver, count: int) -> None:
    for _ in range(count):
        await archive(archiver)


twice = partial(rounds, count=2)


def weights(text: str) -> dict[str, bytes]:
    return {"model.safetensors": text.encode(), "trainer/state.json": b"{}"}


async def test_leader_stops_mid_job(ctx: Context, own: Store, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the trainer resumes, writes step 20 anew and sweeps; the next leader puts and removes."""
    rules = {"keep_last": 1}
    at, refusals, done = 1, 0, False
    while not done:
        job = await new_job(ctx.store, state=JobState.STARTING, artifacts=rules)
        write_checkpoint(ctx, job, 10, weights("ten"))
        old = Archiver(replace(ctx, store=own), await lead(ctx.store))
        await archive(old)
        sweep(ctx, job, 10)
        write_checkpoint(ctx, job, 20, weights("twenty"))

        async def meanwhile(job: str = job) -> None:
            sweep(ctx, job, 20)
            write_checkpoint(ctx, job, 20, weights("twenty again"), epoch=2)
            write_checkpoint(ctx, job, 30, weights("thirty"), epoch=2)
            await twice(Archiver(ctx, await lead(ctx.store)))
            sweep(ctx, job, 20)

        refused, done = await stop(ctx, own, at, monkeypatch, partial(twice, old), meanwhile)
        refusals += refused
        await twice(Archiver(ctx, await lead(ctx.store)))
        assert await whole(ctx, job) == ({20: 1} if done else {30: 2}), f"stopped before operation {at}"
        assert list((ctx.settings.data_dir / "staged").iterdir()) == []
        await ctx.store.transition(job, JobState.CANCELLED, epoch=1)
        await ctx.store.redis.srem("artifact:open", job)
        at += stride
    said(at, stride, refusals)


@pytest.mark.nightly
async def test_leader_stops_at_the_end(ctx: Context, own: Store, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left is put away, to a store apart, and expires; meanwhile the next leader does all of that."""
    monkeypatch.setattr(DirectoryStore, "apart", True)
    rules = {"keep_last": 1, "expire_days": 1e-9}
    at, refusals, done = 1, 0, False
    while not done:
        job = await new_job(ctx.store, state=JobState.STARTING, artifacts=rules)
        for step in (10, 20):
            write_checkpoint(ctx, job, step, weights(str(step)))
        (ctx.settings.data_dir / "jobs" / job / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
        await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
        await ctx.store.ended(job)
        old = Archiver(replace(ctx, store=own), await lead(ctx.store), linger_s=-60.0)
        await old.index.open(job)

        async def meanwhile() -> None:
            await rounds(Archiver(ctx, await lead(ctx.store), linger_s=-60.0), 4)

        refused, done = await stop(ctx, own, at, monkeypatch, partial(rounds, old, 4), meanwhile)
        refusals += refused
        assert await whole(ctx, job) == {}
        told = [event["event"] for event in await ctx.store.events(job)]
        assert told.count("artifacts_expired") <= 1 and told.count("checkpoints_removed") <= 1, (at, told)
        assert not (ctx.settings.data_dir / "jobs" / job).exists()
        assert list((ctx.settings.data_dir / "staged").iterdir()) == []
        at += stride
    said(at, stride, refusals)


async def test_everything_a_leader_writes_of_artifacts_is_refused_from_an_earlier_one(ctx: Context) -> None:
    """Each of these by itself: nothing of Redis changes."""
    store, job = ctx.store, await new_job(ctx.store)
    await store.redis.sadd("jobs:ending", job)
    earlier, now = await lead(store), await lead(store)
    index, kept = ArtifactIndex(store.redis), ArtifactEntry(path="logs.jsonl", bytes=3, created=0.0)
    measured = msgspec.structs.replace(kept, metric=0.5)
    other = ArtifactEntry(path=PATH, place=f"{PATH}.x", bytes=3, created=0.0)
    writes: dict[str, Callable[[int], Awaitable[object]]] = {
        "add": lambda leader: index.add("default", job, kept, leader=leader),
        "note": lambda leader: index.note(job, kept, measured, leader=leader),
        "discard": lambda leader: index.discard("default", job, other.path, other.place, leader=leader),
        "remove": lambda leader: index.remove("default", job, [kept.path], leader=leader),
        "removed": lambda leader: index.removed(f"default/{job}/{kept.at}", leader=leader),
        "sweep": lambda leader: index.sweep("default", job, [10], leader=leader),
        "sweep_all": lambda leader: index.sweep_all(job, leader=leader),
        "swept": lambda leader: index.swept(job, leader=leader),
        "open": lambda leader: index.open(job, leader=leader),
        "close": lambda leader: index.close(job, 1.0, leader=leader),
        "over": lambda leader: index.over(job, leader=leader),
        "usage": lambda leader: UsageStore(store.redis).store("default", 3, leader=leader),
        "event": lambda leader: store.update(job, event="artifacts_expired", leader=leader),
        "history": lambda leader: delete_history(ctx.bus, store, job, leader=leader),
        "ended": lambda leader: store.ended(job, leader=leader),
    }
    for name, write in writes.items():
        before = await state_of(ctx)
        with pytest.raises(Fenced):
            await write(earlier)
        assert await state_of(ctx) == before, name
        await write(now)
        assert await state_of(ctx) != before, f"{name} does nothing at all"


async def test_leader_that_wakes_opens_no_job_that_is_put_away(ctx: Context) -> None:
    """Clearing: the next leader has cleared the job, and the archiver has closed it, while the one before slept."""
    job = await new_job(ctx.store)
    await ctx.store.transition(job, JobState.CANCELLED)
    sleeping = JobCleaner(ctx, await lead(ctx.store))
    await lead(ctx.store)
    with pytest.raises(Fenced):
        await sleeping.clean()
    assert await ArtifactIndex(ctx.store.redis).opened() == [] and await ctx.store.ending_jobs() == [job]


async def test_place_in_the_store_is_never_used_again(ctx: Context) -> None:
    """A checkpoint that was removed, and is wanted again, gets another one; what lies staged under an old one goes."""
    archiver = Archiver(ctx, await lead(ctx.store))
    job = await new_job(ctx.store, state=JobState.STARTING)
    write_checkpoint(ctx, job, 10, weights("ten"))
    await archiver.scan()
    (place,) = (ctx.settings.data_dir / "staged" / "default" / job).iterdir()
    copy = ctx.settings.data_dir / "copy"
    shutil.copytree(place, copy)
    await archiver.put()
    first = (await archiver.index.of(job))[PATH]
    await archiver.index.remove("default", job, [PATH])
    place.parent.mkdir(parents=True)
    copy.rename(place)  # as if we had died before it was dropped
    await archiver.put()
    assert await archiver.index.is_removed(f"default/{job}/{first.at}") and await archiver.index.of(job) == {}
    await twice(archiver)
    second = (await archiver.index.of(job))[PATH]
    assert second.at != first.at and second.manifest == first.manifest and await whole(ctx, job) == {10: 1}


async def test_an_earlier_leader_keeps_the_event_of_an_expiry(ctx: Context) -> None:
    store, job = ctx.store, await new_job(ctx.store)
    earlier, now = await lead(store), await lead(store)
    await delete_history(ctx.bus, store, job, leader=now)
    await store.update(job, event="artifacts_expired", leader=now)
    with pytest.raises(Fenced):
        await delete_history(ctx.bus, store, job, leader=earlier)
    assert [event["event"] for event in await store.events(job)][-1] == "artifacts_expired"
