"""A reconciler that a test drives, and jobs that it has placed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease
from tests.conftest import until
from tests.support.scheduling import BEAT_S, Workers, new_job, running

T = TypeVar("T")


@asynccontextmanager
async def looking(reconciler: Reconciler) -> AsyncIterator[None]:
    """It looks as often as workers beat, which say nothing here that would wake it."""

    async def wake() -> None:
        while True:
            reconciler._wake.set()
            await asyncio.sleep(BEAT_S)

    async with running(reconciler.run()), running(wake()):
        yield


async def reconciled(reconciler: Reconciler, read: Callable[[], Awaitable[T]], holds: Callable[[T], object]) -> T:
    """Reconcile until what is read afterwards satisfies `holds`, and return it."""

    async def look() -> T:
        await reconciler.reconcile()
        return await read()

    return await until(look, holds)


async def reaches_epoch(reconciler: Reconciler, job: str, epoch: int) -> None:
    await reconciled(reconciler, partial(reconciler.ctx.store.job, job), lambda record: record.epoch == epoch)


async def state(store: Store, job: str) -> JobState:
    return (await store.job(job)).state


async def started(store: Store, job: str, epoch: int = 1) -> bool:
    record = await store.job(job)
    return record.state == JobState.STARTING and record.epoch == epoch


async def begun(store: Store, workers: Workers) -> str:
    """A job whose two workers have seen their leases."""
    job = await new_job(store, "j-a")
    await workers.start("trainer-0", "rollout-0")
    await until(lambda: started(store, job))
    for id in ("trainer-0", "rollout-0"):
        await until(partial(is_leased, workers, id, job, 1))
    return job


async def waits_for(store: Store, job: str, what: str) -> bool:
    return (await store.job(job)).waiting_for == what


async def has_lease(workers: Workers, id: str, lease: Lease) -> bool:
    return await workers[id].lease() == lease


async def is_leased(workers: Workers, id: str, job: str, epoch: int) -> bool:
    lease = await workers[id].lease()
    return lease is not None and (lease.job, lease.epoch) == (job, epoch)


async def works_for(store: Store, id: str, job: str) -> bool:
    return any(worker.id == id and worker.job == job for worker in await store.workers())
