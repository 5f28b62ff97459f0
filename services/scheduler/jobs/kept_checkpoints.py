"""Keeps the checkpoints that a new job starts from, serves or plays against, until the job is over.

Kept means: hard links in {data_dir}/jobs/{job}/start, or copies where the artifact store is another disk. Whatever the
other job's trainer removes later, the new job's trainer finds them there when its turn comes, after every restart, and
reference-forward until the end; `cleanup.py` takes them away. Functions without `async` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.jobs.check_start_checkpoint import SourceCheckpoint
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway
from opentinker.shared.durable_files import sync_file
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.tenant_threads import TooManyCalls
from opentinker.shared.types.manifest import Manifest, read_manifest, start_of

CHUNK = 8 << 20
SUBMISSION_S = 3600.0
"""Longer than any submission takes."""
ADVICE = "submit it again; `opentinker checkpoints JOB` lists what there is"


class Reference(NamedTuple):
    """A checkpoint that a spec names."""

    field: str
    source: SourceCheckpoint
    place: Path
    """Directory in which it is kept."""


class LinksRefused(Exception):
    """The file system makes no hard link of a checkpoint's file."""


class GivenUp(Exception):
    """The caller no longer waits for the copies."""


async def keep(ctx: Context, references: Sequence[Reference], job: str, tenant: str) -> list[dict[str, Any]]:
    """Keep checkpoints for a job. Return the mistake of the first that cannot be kept: others may be kept by then.

    Raises ReferencesAway if links take longer than `ctx.disk_s` or copies longer than `ctx.copy_s`, or if too much is
    copied already. Nothing is kept then, as soon as the file system lets go."""
    given_up = threading.Event()
    linking = ctx.disk.submit(_keep, references, partial(_link, given_up))
    try:
        async with _leaving_nothing(ctx, linking, given_up, job):
            return await _within(ctx.disk_s, asyncio.wrap_future(linking), "linked")
    except LinksRefused:
        return await _keep_copies(ctx, references, job, tenant)


async def _keep_copies(ctx: Context, references: Sequence[Reference], job: str, tenant: str) -> list[dict[str, Any]]:
    loop, begun, given_up = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    data_dir = ctx.settings.data_dir

    def copy_all() -> list[dict[str, Any]]:
        loop.call_soon_threadsafe(begun.set)
        _remove(data_dir, job)  # links that were made before one was refused
        return _keep(references, partial(copy, given_up))

    try:
        copying = ctx.copies.submit(tenant, copy_all)
    except TooManyCalls:
        forget(ctx, job)
        problem = f"the checkpoints of {ctx.copies.per_tenant} submissions of yours are being copied; retry after that"
        raise ReferencesAway(problem) from None
    async with _leaving_nothing(ctx, copying, given_up, job):
        try:
            async with asyncio.timeout(ctx.copy_wait_s):
                await begun.wait()
        except TimeoutError:
            raise ReferencesAway("the server is copying other checkpoints; retry in a few minutes") from None
        return await _within(ctx.copy_s, asyncio.wrap_future(copying), "copied")


async def _within(limit_s: float, keeping: asyncio.Future[list[dict[str, Any]]], done: str) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(limit_s):
            return await keeping
    except TimeoutError:
        raise ReferencesAway(
            f"checkpoints that the spec names were not {done} within {limit_s:g} s; submit it again"
        ) from None


@contextlib.asynccontextmanager
async def _leaving_nothing(
    ctx: Context, keeping: Future[list[dict[str, Any]]], given_up: threading.Event, job: str
) -> AsyncIterator[None]:
    """Stop `keeping` at its next file or chunk and remove its files if the body gives up."""
    try:
        yield
    except (ReferencesAway, asyncio.CancelledError):
        given_up.set()
        keeping.cancel()  # if it has not begun
        keeping.add_done_callback(lambda _: forget(ctx, job))
        raise


def forget(ctx: Context, job: str) -> None:
    """Begin to remove everything that was kept for a job that never was. Does not block."""
    ctx.disk.submit(_remove, ctx.settings.data_dir, job)


def _remove(data_dir: Path, job: str) -> None:
    shutil.rmtree(start_of(data_dir, job).parent, ignore_errors=True)


def _keep(references: Sequence[Reference], link: Callable[[Path, Path], None]) -> list[dict[str, Any]]:
    for field, source, place in references:
        try:
            checkpoint_dir.second_names(source.directory, source.manifest, place, link)
        except OSError as error:
            problem = f"it could not be kept for the new job: {error.strerror}; {ADVICE}"
            return [{"field": field, "value": source.name, "problem": problem}]
    return []


def _link(given_up: threading.Event, source: Path, target: Path) -> None:
    """Raises LinksRefused, GivenUp, FileNotFoundError."""
    if given_up.is_set():
        raise GivenUp
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LinksRefused from error


def copy(given_up: threading.Event, source: Path, target: Path) -> None:
    """Raises GivenUp, OSError."""
    with source.open("rb") as original, target.open("xb") as made:
        while chunk := original.read(CHUNK):
            if given_up.is_set():
                raise GivenUp
            made.write(chunk)
    sync_file(target)


def read_start(data_dir: Path, job: str) -> Manifest:
    """Return the manifest of the checkpoint kept for a job. Raises OSError, ValueError."""
    return read_manifest(start_of(data_dir, job))


def drop(data_dir: Path, job: str) -> None:
    """Remove the checkpoints kept for a job that is over."""
    shutil.rmtree(start_of(data_dir, job), ignore_errors=True)


def kept_long(data_dir: Path) -> set[str]:
    """Jobs for which a checkpoint is kept, but for those that a submission may be about to store."""
    found = set()
    for path in data_dir.glob("jobs/*/start"):
        with contextlib.suppress(FileNotFoundError):  # its job is over by now
            if time.time() - path.stat().st_mtime > SUBMISSION_S:
                found.add(path.parent.name)
    return found
