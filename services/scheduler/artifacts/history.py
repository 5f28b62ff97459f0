"""The history of a finished job: its files, log lines and events, written for the artifact store or deleted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import orjson

from opentinker.services.scheduler.artifacts.catalog import EVENTS, LOG, live_files
from opentinker.shared.messaging import subjects
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import split_part

PAGE = 5000
KEPT = ((subjects.METRIC, "source"), (subjects.LOG, "level"), (subjects.TIMELINE, "worker"))
"""Subjects whose streams keep messages about a job, with the part that varies within one job."""


async def write_history(ctx: Context, home: Path, job: str, target: Path) -> list[str]:
    """Copy the files in a job's directory, which their writers might touch again, and write its log lines and events as
    JSON lines; a policy of a job has only files. Return the paths below `target`."""
    paths = list(await asyncio.to_thread(live_files, home))
    for path in paths:
        await asyncio.to_thread(_copy, home / path, target / path)
    if split_part(job)[1]:
        return paths
    lines, after = [], 0
    while page := await ctx.bus.history(subjects.LOG, after, PAGE, job=job, level="*"):
        lines += [msgspec.json.encode(line) for _, line in page]
        after = page[-1][0]
    events = map(orjson.dumps, await ctx.store.all_events(job))
    await asyncio.to_thread(_write_lines, target / LOG, lines)
    await asyncio.to_thread(_write_lines, target / EVENTS, events)
    return [*paths, LOG, EVENTS]


async def delete_history(bus: Bus, store: Store, job: str, *, leader: int = UNFENCED) -> None:
    """Delete a finished job's metrics, log lines, timeline and Redis keys; its record, state changes and usage stay.
    Raises Fenced, when the streams are purged already: of a job that is over, every leader would purge them."""
    for subject, rest in KEPT:
        await bus.purge(required_stream(subject), subject.at(job=job, **{rest: "*"}))
    await store.forget(job, leader=leader)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_lines(target: Path, lines: Iterable[bytes]) -> None:
    target.write_bytes(b"".join(line + b"\n" for line in lines))
