"""Publishes metrics that only the scheduler can measure: admission room and queues of every job, and workers of the
cluster.

measure loop   consumes ledgers, stream sizes, heartbeats; produces METRIC, by job and for the cluster;
               measures once a second and publishes changes
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.data.step_log import metric_prefix
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import GROUP, SCORE, TICKET, Subject
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import CLUSTER, REPORT_S, Meters, Reporter
from opentinker.shared.state.admission import admission_of
from opentinker.shared.state.circuits import Circuits, circuit_key
from opentinker.shared.types.core import JobRecord, JobState, Pool

QUEUES: dict[str, Subject[Any]] = {"queue/tickets": TICKET, "queue/scores": SCORE, "queue/groups": GROUP}
"""Tickets that are out; groups that wait for reference-forward; groups that no checkpoint covers yet."""
LONGEST_WAIT = "queue/longest_wait_s"
WAIT_STEP_S = 60
"""Unit of LONGEST_WAIT: changes alone are published, and this one never stands still."""


class SchedulerMetrics:
    def __init__(self, ctx: Context) -> None:
        self.store, self.bus = ctx.store, ctx.bus
        self.circuits, self.meters = Circuits(ctx.store.redis), Meters()
        self.reporter = Reporter(ctx.bus, ctx.worker, self.meters)

    async def run(self) -> None:
        while True:
            await sleep(REPORT_S)
            await self.measure()
            await self.reporter.report()

    async def measure(self) -> None:
        jobs = await self.store.active_jobs()
        await self._cluster(jobs)
        held = [job for job in jobs if job.state.held and job.kind == "rl"]
        for over in self.meters.jobs.keys() - {CLUSTER, *(job.id for job in held)}:
            del self.meters.jobs[over]
        if not held:
            return
        depths: dict[str, int] = {}
        for subject in QUEUES.values():
            depths |= await self.bus.counts(required_stream(subject), subject.at(job="*"))
        for job in held:
            await self._job(job, depths)

    async def _job(self, job: JobRecord, depths: dict[str, int]) -> None:
        """Measure a job: the ledger of each of its policies, and its queues."""
        new = job.id not in self.meters.jobs
        meter = self.meters.of(job.id)
        gauges = {name: depths.get(subject.at(job=job.id), 0) for name, subject in QUEUES.items()}
        circuit = await self.circuits.find(circuit_key(job.tenant, job.spec["environment"]))
        gauges["scheduler/environment_down"] = int(circuit.is_open)
        counts = {}
        for policy in job.policies or ("",):
            ledger = await admission_of(self.store.redis, job, policy).ledger()
            prefix = metric_prefix(policy)
            meter.step = ledger.version.step
            counts[f"{prefix}scheduler/tickets_issued"] = ledger.issued
            counts[f"{prefix}scheduler/groups_accepted"] = ledger.accepted
            gauges[f"{prefix}scheduler/running_groups"] = ledger.running
            gauges[f"{prefix}scheduler/pending_groups"] = ledger.pending
        meter.counts, meter.gauges = Counter(counts), Counter(gauges)
        if new:
            meter.before = meter.counts.copy()

    async def _cluster(self, jobs: list[JobRecord]) -> None:
        pools = Counter(worker.pool for worker in await self.store.workers())
        states = Counter(job.state for job in jobs)
        self.meters.of(CLUSTER).gauges = Counter(
            {
                **{f"workers/{pool}": pools[pool] for pool in Pool},
                **{f"jobs/{state}": states[state] for state in JobState if not state.final},
                LONGEST_WAIT: _longest_wait_s(jobs),
            }
        )


def _longest_wait_s(jobs: Sequence[JobRecord]) -> int:
    """Return how long the longest-waiting job has been queued. Those that are asleep wait for requests alone."""
    waits = [time.time() - job.since for job in jobs if job.state is JobState.QUEUED and not job.asleep]
    return int(max(waits, default=0.0)) // WAIT_STEP_S * WAIT_STEP_S
