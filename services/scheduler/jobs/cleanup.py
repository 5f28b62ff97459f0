"""After a job: its messages and consumers, and the checkpoint of another job that it started from, are removed
once its workers have let go. The ledger's counts stay.

clear loop   consumes the set of jobs that are ending; removes their messages; looks once a second
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats.errors
import structlog
from nats.js.api import StreamConfig

from opentinker.services.scheduler.artifacts.catalog import drop_fetched
from opentinker.services.scheduler.jobs import check_start_checkpoint
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.subjects import EXAM, EXAMS, GROUP, GROUPS, SCORE, SCORES, TICKET, TICKETS, Subject
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactIndex
from opentinker.shared.state.staleness import Admission

log = structlog.get_logger()

LOOK_S = 1.0
SWEEP_S = 30.0
QUEUES = ((TICKETS, TICKET), (EXAMS, EXAM), (SCORES, SCORE), (GROUPS, GROUP))


class JobCleaner:
    def __init__(self, ctx: Context, leadership: int) -> None:
        self.ctx, self.store, self.bus, self.leader = ctx, ctx.store, ctx.bus, leadership

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
            await sleep(LOOK_S)

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
                await ArtifactIndex(self.store.redis).open(job, leader=self.leader)
                await self.store.ended(job, leader=self.leader)

    async def _clear(self, job: str) -> None:
        for stream, subject in QUEUES:
            await self.bus.delete_consumers(subject, job=job)
            assert stream.name is not None
            await self.bus.purge(stream.name, subject.at(job=job))
        await Admission(self.store.redis, job).clear()
        await asyncio.to_thread(check_start_checkpoint.drop, self.ctx.settings.data_dir, job)
        log.info("job_cleared", job=job)

    async def sweep(self) -> None:
        """Remove leftovers that were in transit when their job was cleared: tickets, and groups in reference-forward;
        and checkpoints kept for abandoned submissions.

        Messages and checkpoints are listed before jobs: those of a job that starts in between are not touched,
        regardless of pauses.
        """
        old = await asyncio.to_thread(check_start_checkpoint.kept_long, self.ctx.settings.data_dir)
        stored = [(stream, subject, await self._stored(stream, subject)) for stream, subject in QUEUES]
        active = [job.id for job in await self.store.active_jobs()]
        for stream, subject, found in stored:
            assert stream.name is not None
            for late in found - {subject.at(job=job) for job in active}:
                await self.bus.purge(stream.name, late)
                log.info("messages_swept", subject=late)
        for job in old - set(active):
            await asyncio.to_thread(check_start_checkpoint.drop, self.ctx.settings.data_dir, job)
            log.info("start_swept", job=job)
        await asyncio.to_thread(drop_fetched, self.ctx.settings.data_dir)

    async def _stored(self, stream: StreamConfig, subject: Subject[Any]) -> set[str]:
        assert stream.name is not None
        return set(await self.bus.counts(stream.name, subject.at(job="*")))
