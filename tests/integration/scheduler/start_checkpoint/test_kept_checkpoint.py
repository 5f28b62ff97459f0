"""The checkpoint that is kept for a job: linked or copied, swept, and copies that are slow, stuck or given up."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker import ApiError, AsyncClient
from opentinker.services.scheduler.jobs import kept_checkpoints
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.trainer import checkpoint
from opentinker.shared.runtime.service import TENANT_COPIES, Context
from opentinker.shared.runtime.tenant_threads import TenantThreads
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict
from opentinker.shared.types.manifest import read_manifest, start_of
from tests.conftest import soon, until
from tests.integration.scheduler.start_checkpoint.checkpoint_files import full_files, spec_of
from tests.support.api import refused, write_checkpoint
from tests.support.scheduling import new_job

LINK = os.link


async def test_checkpoint_is_kept_to_the_end(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> None:
    first = (await client.submit(spec_of(base)))["id"]
    for step in (10, 20):
        source = write_checkpoint(ctx, first, step, full_files(tmp_path))
    second = await client.submit(spec_of(base), from_checkpoint=f"{first}@latest", with_optimizer=True)
    record = await client.job(second["id"])
    assert record["spec"]["start"] == {"from": f"{first}@20", "optimizer": True}
    kept = start_of(ctx.settings.data_dir, second["id"])
    assert (kept / "model.safetensors").samefile(source / "model.safetensors"), "it takes no space of its own"
    checkpoint.sweep(source.parent, keep=0, epoch=1)
    assert not source.exists()
    assert checkpoint.read_intact(kept) == read_manifest(kept) and read_manifest(kept).step == 20
    await client.cancel(second["id"])
    await until(lambda: not kept.exists())
    await client.cancel(first)


async def test_repetition_makes_one_job(
    client: AsyncClient, ctx: Context, base: Path, first: str, tmp_path: Path
) -> None:
    """Also if `latest` is another one by then."""
    spec = spec_of(base) | {"start": {"from": f"{first}@latest"}}
    second = (await client.submit(spec, idempotency_key="once"))["id"]
    write_checkpoint(ctx, first, 20, full_files(tmp_path))
    assert (await client.submit(spec, idempotency_key="once"))["id"] == second
    assert [path.parent.name for path in ctx.settings.data_dir.glob("jobs/*/start")] == [second]
    assert (await client.job(second))["spec"]["start"]["from"] == f"{first}@10"


async def test_repetition_outlives_its_source(
    client: AsyncClient, ctx: Context, base: Path, first: str, again: Any
) -> None:
    second = (await client.submit(again, idempotency_key="once"))["id"]
    shutil.rmtree(ctx.settings.data_dir / "jobs" / first / "checkpoints")
    shutil.rmtree(base)
    assert (await client.submit(again, idempotency_key="once"))["id"] == second
    with pytest.raises(ApiError) as other:
        await client.submit(again | {"name": "other"}, idempotency_key="once")
    assert other.value.status == 409
    assert "none yet" in (await refused(client, again, idempotency_key="twice"))["start.from"]


async def test_copy_is_made_where_files_cannot_have_two_names(
    client: AsyncClient, ctx: Context, first: str, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    second = (await client.submit(again))["id"]
    shutil.rmtree(ctx.settings.data_dir / "jobs" / first)
    checkpoint.read_intact(start_of(ctx.settings.data_dir, second))


def no_links(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files cannot be linked, and copies take until the event is set."""
    finish = threading.Event()
    copy = kept_checkpoints.copy

    def slow(given_up: threading.Event, source: Path, target: Path) -> None:
        finish.wait(60)
        copy(given_up, source, target)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(kept_checkpoints, "copy", slow)
    yield finish
    finish.set()


async def test_copy_may_take_longer_than_a_check(
    ctx: Context, client: AsyncClient, homes: Path, again: Any, slow_copies: threading.Event
) -> None:
    ctx.disk_s = 2.0
    submission = asyncio.create_task(client.submit(again))
    await until(lambda: any(homes.glob("*/start")))
    await asyncio.sleep(2 * ctx.disk_s)
    slow_copies.set()
    checkpoint.read_intact(homes / (await soon(submission))["id"] / "start")


@pytest.mark.parametrize("ending", ["limit", "cancellation"])
async def test_copy_that_is_given_up_leaves_nothing(
    ctx: Context, first: str, again: Any, homes: Path, slow_copies: threading.Event, ending: str
) -> None:
    if ending == "limit":
        ctx.copy_s = 0.01
    submission = asyncio.create_task(submit(ctx, again, "default"))
    await until(lambda: any(homes.glob("*/start")))
    if ending == "cancellation":
        submission.cancel()
    with pytest.raises(asyncio.CancelledError if ending == "cancellation" else ReferencesAway):
        await soon(submission)
    slow_copies.set()
    await until(lambda: [home.name for home in homes.iterdir()] == [first])


async def test_stuck_copies_hold_up_only_copies_of_their_tenant(
    ctx: Context, first: str, again: Any, homes: Path, slow_copies: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = [asyncio.create_task(submit(ctx, again, "default")) for _ in range(TENANT_COPIES)]
    await until(lambda: len(list(homes.glob("*/start"))) == TENANT_COPIES)
    await until(lambda: ctx.copies._unfinished["default"] == TENANT_COPIES)
    with pytest.raises(ReferencesAway, match="2 submissions of yours are being copied"):
        await soon(submit(ctx, again, "default"))
    other = ctx.copies.submit("other", threading.get_ident)
    assert await soon(asyncio.wrap_future(other)), "another tenant's copy is made"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", LINK)
        linked, _ = await soon(submit(ctx, again, "default"))
    checkpoint.read_intact(start_of(ctx.settings.data_dir, linked))
    slow_copies.set()
    made = {id for id, _ in await soon(asyncio.gather(*stuck))}
    await until(lambda: {home.name for home in homes.iterdir()} == {first, linked, *made})


@pytest.fixture
def busy(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Context, threading.Event]]:
    """Files cannot be linked, and the one thread that copies them is another tenant's until the event is set."""
    monkeypatch.setattr(os, "link", no_links)
    finish, busy = threading.Event(), Context(**{**vars(ctx), "copies": TenantThreads(1, 2, "copies")})
    busy.copies.submit("other", finish.wait)
    yield busy, finish
    finish.set()


async def test_time_of_a_copy_begins_with_it(busy: tuple[Context, threading.Event], again: Any, homes: Path) -> None:
    ctx, finish = busy
    ctx.copy_s = 2.0
    submission = asyncio.create_task(submit(ctx, again, "default"))
    await asyncio.sleep(2 * ctx.copy_s)
    finish.set()
    second, _ = await soon(submission)
    checkpoint.read_intact(homes / second / "start")


async def test_submission_does_not_wait_for_ever_for_a_thread(
    busy: tuple[Context, threading.Event], first: str, again: Any, homes: Path
) -> None:
    busy[0].copy_wait_s = 0.01
    with pytest.raises(ReferencesAway, match="copying other checkpoints"):
        await soon(submit(busy[0], again, "default"))
    await until(lambda: [home.name for home in homes.iterdir()] == [first])


def test_copy_that_nobody_awaits_ends_before_its_next_chunk(tmp_path: Path) -> None:
    source, given_up = tmp_path / "source", threading.Event()
    source.write_bytes(b"weights")
    kept_checkpoints.copy(given_up, source, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"weights"
    given_up.set()
    with pytest.raises(kept_checkpoints.GivenUp):
        kept_checkpoints.copy(given_up, source, tmp_path / "partial")
    assert (tmp_path / "partial").stat().st_size == 0


async def test_checkpoint_kept_for_a_refused_submission_is_removed(
    ctx: Context, first: str, again: Any, homes: Path
) -> None:
    """Its key was used for another job while its files were linked."""
    found = await asyncio.gather(
        submit(ctx, again, "default", "once"),
        submit(ctx, again | {"name": "other"}, "default", "once"),
        submit(ctx, again, "default", "once"),
        return_exceptions=True,
    )
    (made,) = {answer[0] for answer in found if isinstance(answer, tuple)}
    assert any(isinstance(answer, Conflict) for answer in found)
    await until(lambda: {home.name for home in homes.iterdir()} == {first, made})


async def test_checkpoint_that_is_written_anew_meanwhile_is_not_mixed_with_the_old_one(
    client: AsyncClient, ctx: Context, first: str, again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def slow(source: Path, target: Path) -> None:
        link(source, target)
        if target.name == "config.json":
            shutil.rmtree(source.parent)
            write_checkpoint(ctx, first, 10, full_files(tmp_path), epoch=2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", slow)
        problems = await refused(client, again)
    assert "it was written again just now; submit it again" in problems["start.from"]
    await client.submit(again)


async def test_what_a_broken_submission_kept_is_swept_when_it_is_old(ctx: Context, tmp_path: Path) -> None:
    places = {job: start_of(ctx.settings.data_dir, job) for job in ("j-active", "j-old", "j-new")}
    for place in places.values():
        place.mkdir(parents=True)
    for job in ("j-active", "j-old"):
        os.utime(places[job], (1e9, 1e9))
    assert kept_checkpoints.kept_long(ctx.settings.data_dir) == {"j-active", "j-old"}
    assert kept_checkpoints.kept_long(tmp_path / "empty") == set()
    await new_job(ctx.store, "j-active")
    await JobCleaner(ctx, UNFENCED).sweep()
    assert [job for job, place in places.items() if place.exists()] == ["j-active", "j-new"]


async def test_a_former_leader_sweeps_no_newer_jobs(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped when it had read which jobs there are, for longer than a submission takes."""
    place = start_of(ctx.settings.data_dir, "j-meanwhile")
    jobs_now = ctx.store.active_jobs

    async def stopped() -> list[JobRecord]:
        before = await jobs_now()
        place.mkdir(parents=True)
        os.utime(place, (1e9, 1e9))
        await new_job(ctx.store, "j-meanwhile")
        return before

    monkeypatch.setattr(ctx.store, "active_jobs", stopped)
    await JobCleaner(ctx, UNFENCED).sweep()
    assert place.exists()
