"""After a job: its tickets, groups and consumers are removed once its workers have let go. The ledger's counts stay.

clear loop   consumes the set of jobs that are ending; removes their messages; looks once a second
"""

from __future__ import annotations

import time

import nats.errors
import structlog

from opentinker.shared.admission import Admission
from opentinker.shared.service import Context
from opentinker.shared.subjects import GROUP, GROUPS, SCORE, SCORES, TICKET, TICKETS
from opentinker.shared.waiting import rest

log = structlog.get_logger()

LOOK_S = 1.0
SWEEP_S = 30.0


class Clearing:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.store, self.bus = ctx, ctx.store, ctx.bus

    async def run(self) -> None:
        swept_at = time.monotonic()
        while True:
            try:
                await self.look()
                if time.monotonic() - swept_at > SWEEP_S:
                    await self.sweep()
                    swept_at = time.monotonic()
            except (TimeoutError, nats.errors.Error) as error:
                log.warning("clearing_later", error=str(error) or type(error).__name__)
            await rest(LOOK_S)

    async def look(self) -> None:
        ending = await self.store.ending_jobs()
        if not ending:
            return
        busy = {worker.job for worker in await self.store.workers()} | {
            lease.job for lease in await self.store.leases()
        }
        for job in ending:
            if job not in busy:
                await self._clear(job)
                await self.store.ended(job)

    async def _clear(self, job: str) -> None:
        await self.bus.delete_consumers(TICKET, job=job)
        await self.bus.delete_consumers(GROUP, job=job)
        for stream, subject in ((TICKETS, TICKET), (SCORES, SCORE), (GROUPS, GROUP)):
            assert stream.name is not None
            await self.bus.purge(stream.name, subject.at(job=job))
        await Admission(self.store.redis, job).clear()
        log.info("job_cleared", job=job)

    async def sweep(self) -> None:
        """Tickets that were on their way when their job was cleared."""
        assert TICKETS.name is not None
        info = await self.bus.js.stream_info(TICKETS.name, subjects_filter=TICKET.at(job="*"))
        active = {TICKET.at(job=job.id) for job in await self.store.active_jobs()}
        for subject in set(info.state.subjects or {}) - active:
            await self.bus.purge(TICKETS.name, subject)
            log.info("tickets_swept", subject=subject)
