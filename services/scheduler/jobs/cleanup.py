"""After a job: its messages and consumers, the checkpoint of another job that it started from, and the members of its
opponent pools are removed once its workers have let go, and of a Tinker server all but checkpoints. Counts of the
ledger stay.

clean loop   consumes the set of jobs that are ending; removes their messages; polls once a second
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import nats.errors
import structlog

from opentinker.services.scheduler.artifacts.catalog import drop_fetched
from opentinker.services.scheduler.jobs import kept_checkpoints
from opentinker.services.scheduler.tinker.ended_servers import end_server
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import COMMAND, EXAM, GROUP, SAMPLE, SCORE, TICKET, token
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.tinker import KIND as TINKER
from opentinker.shared.state.admission import admission_of
from opentinker.shared.state.artifacts import ArtifactIndex
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.pools import members_of

log = structlog.get_logger()

SWEEP_S = 30.0
QUEUES = (TICKET, EXAM, SCORE, GROUP, COMMAND, SAMPLE)


class JobCleaner:
    def __init__(self, ctx: Context, leadership: int, *, poll_s: float = 1.0) -> None:
        self._poll_s = poll_s
        self.ctx, self.store, self.bus, self.leader = ctx, ctx.store, ctx.bus, leadership

    async def run(self) -> None:
        swept_at = time.monotonic()
        while True:
            try:
                await self.clean()
                if time.monotonic() - swept_at > SWEEP_S:
                    await self.sweep()
                    swept_at = time.monotonic()
            except (TimeoutError, nats.errors.Error) as error:
                log.warning("cleanup_deferred", error=str(error) or type(error).__name__)
            await sleep(self._poll_s)

    async def clean(self) -> None:
        ending = await self.store.ending_jobs()
        if not ending:
            return
        busy = {worker.job for worker in await self.store.workers()} | {
            lease.job for lease in await self.store.leases()
        }
        jobs = await self.store.jobs(ending)
        for job in jobs:
            if job.id not in busy:
                await self._clear(job)
                await ArtifactIndex(self.store.redis).open(*job.artifact_ids, leader=self.leader)
                await self.store.ended(job.id, leader=self.leader)
        for absent in set(ending) - {job.id for job in jobs}:
            log.warning("ending_job_without_record", job=absent)
            await self.store.ended(absent, leader=self.leader)

    async def _clear(self, job: JobRecord) -> None:
        for subject in QUEUES:
            for part in job.artifact_ids if subject is EXAM else [job.id]:
                await self.bus.delete_consumers(subject, job=part, tenant="*")
                await self.bus.purge(required_stream(subject), subject.at(job=part, tenant="*"))
        await admission_of(self.store.redis, job).clear()
        if job.kind == TINKER:
            await end_server(self.ctx, job.id)
        await asyncio.to_thread(kept_checkpoints.drop, self.ctx.settings.data_dir, job.id)
        await asyncio.to_thread(_drop_members, self.ctx.settings.data_dir, job)
        log.info("job_cleared", job=job.id)

    async def sweep(self) -> None:
        """Remove leftovers that were in transit when their job was cleared: tickets, and groups in reference-forward;
        and checkpoints kept for abandoned submissions.

        Messages and checkpoints are listed before jobs: those of a job that starts in between are not touched,
        regardless of pauses.
        """
        old = await asyncio.to_thread(kept_checkpoints.kept_long, self.ctx.settings.data_dir)
        streams = {subject: required_stream(subject) for subject in QUEUES}
        every = {subject: subject.at(job="*", tenant="*") for subject in QUEUES}
        stored = [(subject, await self.bus.counts(streams[subject], every[subject])) for subject in QUEUES]
        active = {part for job in await self.store.active_jobs() for part in job.artifact_ids}
        tokens = {token(part) for part in active}
        for subject, found in stored:
            for late in [one for one in found if one.split(".")[1] not in tokens]:
                await self.bus.purge(streams[subject], late)
                log.info("messages_swept", subject=late)
        for job in old - active:
            await asyncio.to_thread(kept_checkpoints.drop, self.ctx.settings.data_dir, job)
            log.info("start_checkpoint_removed", job=job)
        await asyncio.to_thread(drop_fetched, self.ctx.settings.data_dir)


def _drop_members(data_dir: Path, job: JobRecord) -> None:
    """Remove the members of a job's opponent pools. Blocking."""
    for policy in job.policies or ("",):
        shutil.rmtree(members_of(data_dir, job.id, policy), ignore_errors=True)
