"""Publishes metrics that only the scheduler can measure: admission room and queues of every job, and workers of the
cluster.

measure loop   consumes ledgers, stream sizes, heartbeats; produces METRIC, by job and for the cluster;
               looks once a second, and says something when something has changed
"""

from __future__ import annotations

from collections import Counter

from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.subjects import GROUP, GROUPS, SCORE, SCORES, TICKET, TICKETS
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import CLUSTER, REPORT_S, Meters, Reporter
from opentinker.shared.state.staleness import Admission
from opentinker.shared.types.core import JobRecord, JobState, Pool

QUEUES = (("queue/tickets", TICKETS, TICKET), ("queue/scores", SCORES, SCORE), ("queue/groups", GROUPS, GROUP))
"""Tickets that are out; groups that wait for reference-forward; groups that no checkpoint covers yet."""


class SchedulerMetrics:
    def __init__(self, ctx: Context) -> None:
        self.store, self.bus = ctx.store, ctx.bus
        self.meters = Meters()
        self.reporter = Reporter(ctx.bus, ctx.worker, self.meters)

    async def run(self) -> None:
        while True:
            await sleep(REPORT_S)
            await self.look()
            await self.reporter.report()

    async def look(self) -> None:
        jobs = await self.store.active_jobs()
        await self._cluster(jobs)
        held = [job.id for job in jobs if job.state.held and job.kind == "rl"]
        for over in self.meters.jobs.keys() - {CLUSTER, *held}:
            del self.meters.jobs[over]
        if not held:
            return
        depths: dict[str, int] = {}
        for _, stream, subject in QUEUES:
            assert stream.name is not None
            depths |= await self.bus.counts(stream.name, subject.at(job="*"))
        for id in held:
            await self._job(id, depths)

    async def _job(self, id: str, depths: dict[str, int]) -> None:
        ledger = await Admission(self.store.redis, id).ledger()
        new = id not in self.meters.jobs
        meter = self.meters.of(id)
        meter.step = ledger.version.step
        meter.counts = Counter(
            {"scheduler/tickets_issued": ledger.issued, "scheduler/groups_accepted": ledger.accepted}
        )
        if new:
            meter.before = meter.counts.copy()
        meter.gauges = Counter(
            {
                "scheduler/running_groups": ledger.running,
                "scheduler/pending_groups": ledger.pending,
                **{name: depths.get(subject.at(job=id), 0) for name, _, subject in QUEUES},
            }
        )

    async def _cluster(self, jobs: list[JobRecord]) -> None:
        pools = Counter(worker.pool for worker in await self.store.workers())
        states = Counter(job.state for job in jobs)
        self.meters.of(CLUSTER).gauges = Counter(
            {
                **{f"workers/{pool}": pools[pool] for pool in Pool},
                **{f"jobs/{state}": states[state] for state in JobState if not state.final},
            }
        )
