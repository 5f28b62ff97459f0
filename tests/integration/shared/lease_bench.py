"""A worker of this process whose leases a test grants and revokes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Lease, Pool
from tests.conftest import WAIT_S, until
from tests.support.factories import make_spec

Behaviour = Callable[[Lease], Awaitable[None]]


class Bench:
    """One worker in this process, and the scheduler's side of its leases."""

    def __init__(self, ctx: Context, pool: Pool, timing: dict[str, Any]) -> None:
        self.ctx = ctx
        self.log: list[tuple[str, str, int]] = []
        self.behaviour: Behaviour = self.forever
        self.worker = LeasedWorker(ctx, pool, self.work, **timing)
        self.serving = asyncio.create_task(self.worker.serve())

    async def forever(self, lease: Lease) -> None:
        await asyncio.Event().wait()

    async def work(self, worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
        self.log.append(("began", lease.job, lease.epoch))
        try:
            await self.behaviour(lease)
        finally:
            self.log.append(("left", lease.job, lease.epoch))

    async def grant(self, job: str, epoch: int, incarnation: str = "", **changes: Any) -> None:
        await self.ctx.store.revoke(self.ctx.worker)
        changes["incarnation"] = incarnation or self.worker.info.incarnation
        await self.ctx.store.grant(self.lease(job, epoch, **changes))
        await self.wake()

    def lease(self, job: str, epoch: int = 1, **changes: Any) -> Lease:
        usual = {"incarnation": self.worker.info.incarnation, "pool": Pool.ROLLOUT}
        return Lease(job=job, worker=self.ctx.worker, epoch=epoch, **(usual | changes))

    async def begin(self, job: str = "a", epoch: int = 1) -> None:
        await self.grant(job, epoch)
        await self.seen(("began", job, epoch))

    async def revoke(self) -> None:
        await self.ctx.store.revoke(self.ctx.worker)
        await self.wake()

    async def wake(self) -> None:
        await self.ctx.bus.emit(WAKE, {}, who=self.ctx.worker)

    async def works_in_vain(self) -> None:
        """The worker begins job a, leaves it and is idle."""
        await self.grant("a", 1)
        await self.seen(("began", "a", 1), ("left", "a", 1))
        await self.status("idle")

    async def seen(self, *expected: tuple[str, str, int]) -> None:
        await until(lambda: self.log == list(expected))

    async def status(self, status: str) -> None:
        await until(self.ctx.store.workers, lambda found: [worker.status for worker in found] == [status])


@asynccontextmanager
async def at_the_bench(
    bus: Bus, store: Store, pool: Pool = Pool.ROLLOUT, timing: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Bench]:
    for job in ("a", "b"):
        spec: dict[str, Any] = make_spec(name=job).model_dump(mode="json")
        await store.create_job(id=job, spec=spec, tenant="t")
        await store.transition(job, JobState.STARTING)
    ctx = Context(
        service="rollout", worker="w-0", settings=Settings(**settings), bus=bus, store=store, log=structlog.get_logger()
    )
    bench = Bench(ctx, pool, timing or {})
    await until(lambda: ctx.is_ready)
    yield bench
    ctx.stopping.set()
    await asyncio.wait([bench.serving], timeout=WAIT_S)
    assert bench.serving.done()
