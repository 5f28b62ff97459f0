"""Jobs of kind `eval`: exams and nothing else, with the weights that the engine was started with.

exam loop     see `eval_runner.py`; the scheduler asks, and gets the results
report loop   produces METRIC once a second
timeline      produces TIMELINE once a second
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import structlog

from opentinker.services.rollout_worker.episode_protocol import Sessions
from opentinker.services.rollout_worker.eval_runner import EvalRunner
from opentinker.services.rollout_worker.seat_map import LoadedPolicy
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import first_failure
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.runtime.timeline import Lanes
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Lease

log = structlog.get_logger()

REPORT_S = 1.0


class EvalJob:
    """One lease's work."""

    def __init__(
        self,
        worker: LeasedWorker,
        lease: Lease,
        spec: JobSpec,
        policies: Sequence[LoadedPolicy],
        sessions: Sessions,
        urls: Sequence[UrlPlayer] = (),
    ) -> None:
        """`policies`: the job's own and frozen checkpoints, whose engines are started and serve their weights."""
        self.worker, self.lease, self.policies = worker, lease, policies
        self.engine = policies[0].engine
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts: Counter[str] = Counter()
        self.metrics = MetricSource(worker.ctx.bus, lease.job, worker.info.id)
        self.lanes = Lanes(worker.ctx.bus, lease.job, worker.info.id)
        self.examiner = EvalRunner(
            worker.ctx.bus,
            worker.info.id,
            lease.job,
            spec,
            policies,
            sessions,
            self.counts,
            self.broken,
            worker.spent,
            partial(self.lanes.busy, kind="evaluation"),
            urls=urls,
            idle=partial(self.lanes.busy, kind="exams"),
        )

    async def run(self) -> None:
        """Play until the lease ends or is taken back, or the service stops. Unfinished episodes are then played
        elsewhere, or later."""
        try:
            await self.worker.status("ready", job=self.lease.job, epoch=self.lease.epoch)
            await first_failure(
                {
                    "exams": self.examiner.run(),
                    "report": self._report_loop(),
                    "timeline": self.lanes.run(),
                    "broken": asyncio.wait_for(self.broken, None),
                    **{f"engine {policy.name}": policy.engine.watch() for policy in self.policies},
                    "stop": self.worker.ended(),
                }
            )
        finally:
            self.metrics.close()
            await self.lanes.report()

    async def _report_loop(self) -> None:
        """Produces METRIC: totals, and tokens per second since the last report. Returns never."""
        last, then = 0, time.monotonic()
        while True:
            await sleep(REPORT_S)
            now, tokens = time.monotonic(), self.worker.spent["tokens_generated"]
            values = {f"rollout/{name}": float(count) for name, count in self.counts.items()}
            values |= {"rollout/tokens": float(tokens), "rollout/tokens_per_s": (tokens - last) / (now - then)}
            if tokens != last:
                await self.metrics.emit(0 if self.engine.version is None else self.engine.version.step, values)
                last, then = tokens, now
