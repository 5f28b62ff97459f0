"""Evaluations on schedule, each with one version of the weights:

    evaluate loop  consumes the version that is due; produces EXAM, val/* METRIC, transcripts;
                   waits until the version is served, then for the results of its episodes; woken by each of them

From the moment a version is due until its evaluation is over no later one is published: that is how its episodes come
from these weights alone. Generation goes on under them meanwhile, and training as far as `max_staleness` allows; the
newest weights wait in memory, one copy more. Exams are no tickets: admission and the ledger never hear of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from opentinker.services.trainer.job_reporter import Record
from opentinker.services.trainer.learners.base import SnapshotLike
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.evaluation.records import exam_at, metrics_of, transcript_of
from opentinker.shared.messaging.bus import NoReply, StreamFull
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT, EXAMS
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ValidationSpec
from opentinker.shared.types.core import Lease, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.evaluation import EvalAck, EvalResult

log = structlog.get_logger()

LOOK_S = 0.5
UNDERWAY = 1024
"""Exams that are stored and have no result: more follow as results come, so that a large evaluation is no flood."""
LOST_S = 10.0
"""Exams without a result after so long a silence are looked for, and asked anew if nobody has them."""


class Validation:
    """`publish` is the publisher's `offer`. `plan` None: no evaluations, every version goes straight through."""

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        plan: ValidationSpec | None,
        record: Record,
        publish: Callable[[SnapshotLike], None],
    ) -> None:
        self.ctx, self.lease, self.plan, self.record, self._publish = ctx, lease, plan, record, publish
        self._version: WeightVersion | None = None
        """Under evaluation, or about to be."""
        self._held: SnapshotLike | None = None
        """The newest version that waits for the end of the evaluation."""
        self._served: WeightVersion | None = None
        self._results: dict[int, EvalResult] = {}
        self._begun = 0
        """The exams before this one have been stored."""
        self._lost: set[int] = set()
        """Exams that nobody had at the last look."""
        self._asked = 0
        """Times that exams were stored, over all evaluations: makes their message ids differ."""
        self._last = False
        """Nothing but the evaluation is left to do."""
        self._news = asyncio.Event()
        self._idle = asyncio.Event()

    # --- the trainer's side ---------------------------------------------------------------------------------------

    async def resumed(self, step: int) -> None:
        """An evaluation that was cut off, of a version that no checkpoint holds, is missing: say so."""
        due = 0 if self.plan is None else step - step % self.plan.every
        if due and due != step and due not in self.record.evaluations.steps:
            why = "the trainer was restarted before it was over, and these weights are gone"
            await self.record.event("validation_incomplete", {"step": due, "why": why})

    async def offer(self, snapshot: SnapshotLike) -> None:
        """As `takes`, once the evaluation before is over."""
        while not self.takes(snapshot):
            if not await self.over():
                return  # the service stops

    def takes(self, snapshot: SnapshotLike) -> bool:
        """Publish a version as soon as no evaluation holds it back. False for one that is due while another is
        evaluated: it must be offered again."""
        due = self._is_due(snapshot.version.step)
        if self._version is not None:
            self._held = snapshot  # also of one that is due: it may travel before it is offered again
            return not due
        if due:
            self._begin(snapshot.version)
        self._publish(snapshot)
        return True

    def served(self, version: WeightVersion) -> None:
        self._served = version
        self._news.set()

    async def over(self) -> bool:
        """Waits while an evaluation runs. False if the service stops first."""
        while self._version is not None and not self.ctx.stopping.is_set():
            await wait_event(self._idle, LOOK_S)
        return self._version is None

    async def finish(self, step: int) -> bool:
        """The weights that are left at the end are evaluated, unless they were. False if the service stops first."""
        self._last = True
        if await self.over() and self.plan is not None and step not in self.record.evaluations.steps:
            self._begin(WeightVersion(self.lease.epoch, step))
        return await self.over()

    def _is_due(self, step: int) -> bool:
        if self.plan is None or step in self.record.evaluations.steps:
            return False
        return step % self.plan.every == 0 if step else self.plan.at_start

    def _begin(self, version: WeightVersion) -> None:
        self._version = version
        self._idle.clear()
        self._news.set()

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Never returns. Raises JobFailed."""
        serving = await self.ctx.bus.serve(EXAM_RESULT, self._receive, job=self.lease.job)
        try:
            await self._withdraw()  # what an earlier trainer has asked
            while True:
                self._news.clear()
                if self._version is not None:
                    await self._evaluate(self._version)
                    self._end()
                await wait_event(self._news, LOOK_S)
        finally:
            await serving.unsubscribe()

    def _end(self) -> None:
        self._version, held, self._held = None, self._held, None
        if held is not None:
            self._publish(held)
        self._idle.set()

    async def _evaluate(self, version: WeightVersion) -> None:
        assert self.plan is not None
        self._results, self._lost, self._begun = {}, set(), 0
        began = time.monotonic()
        if await self._until_served(version):
            began = time.monotonic()
            await self._until_done(version, began)
        if len(self._results) < self.plan.total:
            await self._withdraw()
        results = [self._results[index] for index in sorted(self._results)]
        values = await asyncio.to_thread(metrics_of, results, self.plan)
        values |= {"val/seconds": time.monotonic() - began}
        if self.record.spec.train.deterministic and self.record.target_is_validated:
            self._refuse_luck(version, results)  # before anything of it is kept
        await self.record.evaluations.keep(version.step, [transcript_of(r, self.plan) for r in results if r.messages])
        await self.record.evaluations.add(version, values, self.record.spec.train.target)

    def _refuse_luck(self, version: WeightVersion, results: list[EvalResult]) -> None:
        """Raises JobFailed if timing had a part in what says whether a deterministic job ends before its last step."""
        assert self.plan is not None
        if version.step >= self.record.spec.train.steps:
            return
        failed = [result for result in results if not result.ending.repeats]
        if len(results) < self.plan.total:
            why = f"{len(results)} of {self.plan.total} episodes were played when validation.timeout_s was over"
        elif failed:
            why = f"episode {failed[0].index} could not be played ({failed[0].ending}: {failed[0].error})"
        else:
            return
        raise JobFailed(
            f"evaluation of step {version.step}: {why}, and in a deterministic job no train.target may depend on that. "
            "Raise validation.timeout_s, rollout.retries or rollout.episode_timeout_s, or see to the environment"
        )

    async def _until_served(self, version: WeightVersion) -> bool:
        """Training waits for rollout workers too, so there is no limit, but at the end: then nobody else waits."""
        assert self.plan is not None
        since = None
        while self._served != version:
            if self._last:
                since = since or time.monotonic()
                if time.monotonic() - since > self.plan.timeout_s:
                    return False
            await wait_event(self._news, LOOK_S)
            self._news.clear()
        return True

    async def _until_done(self, version: WeightVersion, began: float) -> None:
        assert self.plan is not None
        had, heard = 0, began
        while len(self._results) < self.plan.total and time.monotonic() - began < self.plan.timeout_s:
            self._news.clear()
            await self._ask_more(version)
            if len(self._results) > had:
                had, heard = len(self._results), time.monotonic()
            elif time.monotonic() - heard > LOST_S:
                await self._ask_for_lost(version)
                heard = time.monotonic()
            await wait_event(self._news, LOOK_S)

    # --- exams ----------------------------------------------------------------------------------------------------

    async def _ask_more(self, version: WeightVersion) -> None:
        """So many that rollout workers have work, in order."""
        assert self.plan is not None
        room = UNDERWAY - (self._begun - len(self._results))
        if room > UNDERWAY // 2 and self._begun < self.plan.total:
            first, self._begun = self._begun, min(self.plan.total, self._begun + room)
            await self._ask(version, range(first, self._begun))

    async def _ask(self, version: WeightVersion, indices: Iterable[int]) -> None:
        """Store exams. What a full store has no room for counts as lost, and is asked for again."""
        assert self.plan is not None
        self._asked += 1
        job = self.lease.job
        exams = [exam_at(i, job, version, self.plan) for i in indices]
        try:
            await asyncio.gather(
                *(self.ctx.bus.publish(EXAM, e, f"{job}/{version}/{e.index}/{self._asked}", job=job) for e in exams)
            )
        except StreamFull as error:
            log.warning("exams_later", error=str(error))

    async def _ask_for_lost(self, version: WeightVersion) -> None:
        """Those of which nothing is stored, twice in a row: a result may just be on its way."""
        try:
            stored = {exam.index for exam in await self.ctx.bus.stored(EXAM, job=self.lease.job)}
        except NoReply:
            return
        missing = set(range(self._begun)) - self._results.keys() - stored
        if again := missing & self._lost:
            log.warning("exams_asked_again", exams=sorted(again)[:20], count=len(again))
            await self._ask(version, sorted(again))
        self._lost = missing - again

    async def _withdraw(self) -> None:
        assert EXAMS.name is not None
        await self.ctx.bus.purge(EXAMS.name, EXAM.at(job=self.lease.job))

    async def _receive(self, result: EvalResult) -> EvalAck:
        wanted = result.version == self._version and result.index not in self._results
        if wanted and not result.ending.failed and result.sampled_by != [result.version]:
            log.warning("exam_of_other_weights", exam=result.index, versions=[str(v) for v in result.sampled_by])
            wanted = False
        if wanted:
            self._results[result.index] = result
            self._news.set()
        return EvalAck(wanted=wanted)
