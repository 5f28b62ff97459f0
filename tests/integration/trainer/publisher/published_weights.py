"""A trainer whose publisher is at work, workers that only answer, and how long a test waits for them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch
from nats.aio.subscription import Subscription

from opentinker.services.rollout_worker.engines.base import SwapError
from opentinker.services.trainer.learners.base import BUCKET_BYTES, EmptySnapshot
from opentinker.services.trainer.weights.publisher import Publisher
from opentinker.shared.messaging.subjects import SWAP
from opentinker.shared.nn.buckets import snapshot
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.types.core import Lease, Pool, WeightVersion
from opentinker.shared.types.swap import SwapCommand, SwapReply
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, until
from tests.support.factories import version
from tests.support.scheduling import running

REAL, FAKE = "real", "fake"
"""Jobs: of processes, and of workers that only answer."""
TIMING: dict[str, dict[str, Any]] = {REAL: {}, FAKE: {"poll_s": 0.02, "retry_s": (0.01, 0.05)}}
TIMEOUT_S = TTL_S = 3 * WAIT_S
"""A death or a hang that holds up the others until one of these is over is not `soon`, so a test fails."""
BRIEF_S = 2.0
"""The same for those that are to be found out by it."""
LARGE = BUCKET_BYTES // 4
"""float32 values; more than sockets buffer, so that a transfer stands still when one member does."""


class Trainer:
    """A publisher at work, what it was offered and what it says was served."""

    def __init__(self, ctx: Context, job: str, device: str, **options: Any) -> None:
        self.newest = version(0)
        self.served: dict[WeightVersion, float] = {}
        lease = Lease(job=job, worker="trainer-0", incarnation="t", epoch=1, pool=Pool.TRAINER)
        self.lanes = Lanes(ctx.bus, job, "trainer-0")
        self.publisher = Publisher(ctx, lease, device, self._served, self.lanes, **TIMING[job] | options)

    async def _served(self, version: WeightVersion, seconds: dict[str, float]) -> None:
        self.served.setdefault(version, time.monotonic())

    async def offer(self, step: int, values: int = 0, base_bytes: int = 0) -> None:
        """New weights of so many float32 values; of an adapter, with the size of its base."""
        self.newest = version(step)
        made = snapshot(version(step), [("w", torch.randn(values))], BUCKET_BYTES) if values else None
        offered = dataclasses.replace(made, base_bytes=base_bytes) if made else EmptySnapshot(version=version(step))
        self.publisher.offer(offered)

    async def serves(self) -> None:
        """Until the newest version counts as served."""
        await until(lambda: self.newest in self.served)

    async def serve(self, step: int, values: int = 0) -> None:
        await self.offer(step, values)
        await self.serves()


@asynccontextmanager
async def training(ctx: Context, job: str, device: str, **options: Any) -> AsyncIterator[Trainer]:
    trainer = Trainer(ctx, job, device, **options)
    async with running(trainer.publisher.run()):
        yield trainer


class FakeWorker:
    """Beats, and answers the trainer as it is told, in this process."""

    def __init__(
        self,
        ctx: Context,
        name: str,
        take: Callable[[SwapCommand], Awaitable[None]],
        job: str = FAKE,
        follows: str = "",
        *,
        sleeps: bool = False,
    ) -> None:
        """`follows`: the job whose live policy `job` serves. `sleeps`: its engine has no room during a step."""
        self.sleeps = sleeps
        self.ctx, self.take = ctx, take
        self.info = WorkerInfo(
            id=name,
            incarnation="i",
            pool=Pool.ROLLOUT,
            host="here",
            pid=1,
            job=job,
            epoch=1,
            status="ready",
            address=f"{name}-i",
            detail={"follows": follows} if follows else {},
        )
        self.version: WeightVersion | None = None
        self.asked: list[str] = []
        self.busy = False
        self._subscription: Subscription | None = None

    async def live(self) -> None:
        await self.serve()
        try:
            while True:
                await self.ctx.store.beat(self.info, TTL_S)
                await asyncio.sleep(0.1)
        finally:
            await self.stop_serving()
            await self.ctx.store.leave(self.info)

    async def serve(self) -> None:
        self._subscription = await self.ctx.bus.serve(SWAP, self._answer, worker=self.info.address)

    async def starts_anew(self) -> None:
        """Its lease is taken and given again: the same process with another engine."""
        await self.stop_serving()
        self.info = msgspec.structs.replace(self.info, address=f"{self.info.id}-again")
        self.version, self.asked = None, []
        await self.serve()

    async def stop_serving(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    def has_done(self, action: str, count: int) -> bool:
        return self.asked.count(action) >= count

    async def _answer(self, command: SwapCommand) -> SwapReply:
        error = ""
        if command.action == "ping":
            error = "busy" if self.busy else ""
        else:
            self.busy = True
            self.asked.append(command.action)
            try:
                await self.take(command)
                self.version = command.version or self.version
            except SwapError as failure:
                error = str(failure)
            self.busy = False
        return SwapReply(
            worker=self.info.id,
            incarnation="i",
            ok=not error,
            error=error,
            version=self.version,
            sleeps=self.sleeps,
        )


async def takes(command: SwapCommand) -> None:
    """Every command succeeds."""
