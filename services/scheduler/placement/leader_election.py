"""Elects the scheduler that places jobs, issues tickets and cleans up. All schedulers serve HTTP.

    lead loop   renews the lease on `leader` in Redis; waits a fifth of its length; the leader's work runs concurrently
                and ends when another one leads

A leader that dies is followed by another within worker_ttl_s, one that is stopped in good order or started again at
once. What a leader writes into leases carries the number of its leadership, and Redis refuses that of an earlier one:
who slept through the change grants nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.types.errors import Fenced

log = structlog.get_logger()

Work = Callable[[int], dict[str, Coroutine[Any, Any, None]]]
"""The number of the leadership -> named tasks."""


class Leadership:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.incarnation = uuid.uuid4().hex

    async def run(self, work: Work) -> None:
        """Take part in elections until cancelled. Raises errors of the work."""
        try:
            while True:
                epoch = await self._lead()
                if epoch is None:
                    await sleep(self._pause_s)
                else:
                    await self._while_leading(epoch, work)
        finally:
            await self.ctx.store.resign(self.incarnation)

    async def _while_leading(self, epoch: int, work: Work) -> None:
        log.info("leads", leadership=epoch)
        self.ctx.detail["leads"] = True
        doing = asyncio.create_task(first_failure(work(epoch)))
        try:
            while not doing.done() and await self._lead() == epoch:
                await asyncio.wait([doing], timeout=self._pause_s)
            if doing.done():
                doing.result()
        except Fenced:
            pass  # the next try to lead says who does
        finally:
            await cancel_and_wait(doing)
            self.ctx.detail["leads"] = False
        log.warning("leadership_lost", leadership=epoch)

    @property
    def _pause_s(self) -> float:
        return self.ctx.settings.worker_ttl_s / 5

    async def _lead(self) -> int | None:
        return await self.ctx.store.lead(self.ctx.worker, self.incarnation, self.ctx.settings.worker_ttl_s)
