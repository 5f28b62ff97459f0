"""Finds the workers that do a job's work, and for how long each has loaded its model or been silent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from opentinker.services.scheduler.diagnosis.waits import began_at
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Pool
from opentinker.shared.types.telemetry import Segment, TimelinePart

LOADING = "loading"
"""Status of a worker; lane and kind of its segments."""


class Holder(msgspec.Struct, frozen=True):
    worker: str
    pool: Pool
    silent_s: float = 0.0
    """Time since it last did something for the job."""
    loading_s: float = 0.0
    """Time for which it has been loading its model; 0: it has loaded it."""


async def holders_of(
    store: Store, bus: Bus, job: str, parts: Sequence[TimelinePart], began: float, until: float
) -> list[Holder]:
    """Return the workers that hold the job, without members of a group whose lead speaks for them. `parts`: recent
    activity, by Unix time, of the job that `began` then."""
    led = {lease.worker for lease in await store.leases() if lease.job == job and not lease.leads}
    workers = [worker for worker in await store.workers() if worker.job == job and worker.id not in led]

    async def segments_of(worker: str) -> list[Segment]:
        """Return its recent segments, or the last ones that it ever reported."""
        found = [segment for part in parts if part.worker == worker for segment in part.segments]
        if not found and (last := await bus.last(TIMELINE, job=job, worker=worker)):
            found = last.segments
        return found

    holders = []
    for worker, segments in zip(workers, await asyncio.gather(*(segments_of(one.id) for one in workers)), strict=True):
        if worker.status == LOADING:
            loading_s = max(0.0, until - began_at(segments, LOADING, LOADING))
            holders.append(Holder(worker.id, worker.pool, loading_s=loading_s))
        else:
            end = max((segment.end for segment in segments), default=began)
            holders.append(Holder(worker.id, worker.pool, silent_s=max(0.0, until - end)))
    return holders
