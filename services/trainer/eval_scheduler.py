"""Schedules evaluations during training, each with one version of the weights:

    evaluate loop  consumes the version that is due; produces EXAM, val/* METRIC, transcripts;
                   waits until the version is served, then for the results of its episodes; woken by each of them

While a version is due or under evaluation no later one is published, so that all its episodes come from these weights.
Generation continues under them, and training as far as `max_staleness` allows; the newest weights wait in memory, one
additional copy. Exams are not tickets: admission and the ledger do not count them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import structlog

from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.base import SnapshotLike
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.evaluation.job_ratings import Counts, version_name
from opentinker.shared.evaluation.outcomes import choose_kept
from opentinker.shared.evaluation.records import exam_at, metrics_of, transcript_of
from opentinker.shared.messaging.bus import NoReply, StreamFull
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT, EXAMS
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ValidationSpec
from opentinker.shared.spec.matches.pools import policies_without_opponent, without_opponent
from opentinker.shared.types.core import Lease, WeightVersion, part_id
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.evaluation import EvalAck, EvalResult
from opentinker.shared.types.match_results import BOT

log = structlog.get_logger()

POLL_S = 0.5
MAX_OUTSTANDING = 1024
"""Maximum number of stored exams without a result; more follow as results arrive, so that a large evaluation does not
flood the stream."""


class EvalScheduler:
    """`publish` is the publisher's `offer`. `plan` None: no evaluations, every version is published immediately. After
    `lost_after_s` without a result, exams that are not stored any longer are published again. `asleep_s`: seconds in
    which engines slept for steps; time limits do not count them."""

    def __init__(
        self,
        ctx: Context,
        lease: Lease,
        plan: ValidationSpec | None,
        reporter: JobReporter,
        publish: Callable[[SnapshotLike], None],
        lost_after_s: float = 10.0,
        asleep_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.ctx, self.lease, self.plan, self.reporter, self._publish = ctx, lease, plan, reporter, publish
        self.lost_after_s, self._asleep_s = lost_after_s, asleep_s
        self._part = part_id(lease.job, reporter.policy)
        """The job, or its policy that is evaluated."""
        self._opponents = [] if plan is None else plan.opponents_of(reporter.policy)
        self._total = 0 if plan is None else plan.total_of(reporter.policy)
        self._version: WeightVersion | None = None
        """The version under evaluation or due for it."""
        self._held: SnapshotLike | None = None
        """The newest version, withheld until the evaluation has finished."""
        self._served: WeightVersion | None = None
        self._results: dict[int, EvalResult] = {}
        self._published = 0
        """Number of exams published so far: those with a lower index."""
        self._lost: set[int] = set()
        """Exams that were neither stored nor answered at the last poll."""
        self._publications = 0
        """Number of publications over all evaluations: makes message ids distinct."""
        self._finishing = False
        """Only the evaluation is left to do."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()

    # --- the trainer's side ---------------------------------------------------------------------------------------

    async def resumed(self, step: int) -> None:
        """Report an evaluation that a restart interrupted if no checkpoint holds its version."""
        due = 0 if self.plan is None else step - step % self.plan.every
        if due and due != step and due not in self.reporter.evaluations.steps:
            why = "the trainer was restarted before it had finished, and these weights are gone"
            await self.reporter.event("validation_incomplete", {"step": due, "why": why})

    async def offer(self, snapshot: SnapshotLike) -> None:
        """Call `takes` once the previous evaluation has finished."""
        while not self.takes(snapshot):
            if not await self.over():
                return  # the service stops

    def takes(self, snapshot: SnapshotLike) -> bool:
        """Publish a version, or withhold it during an evaluation. Returns False for a version that is due while another
        is evaluated: it must be offered again."""
        due = self._is_due(snapshot.version.step)
        if self._version is not None:
            self._held = snapshot  # also a version that is due: it may be published before it is offered again
            return not due
        if due:
            self._begin(snapshot.version)
        self._publish(snapshot)
        return True

    def served(self, version: WeightVersion) -> None:
        self._served = version
        self._changed.set()

    async def over(self) -> bool:
        """Wait while an evaluation runs. Returns False if the service stops first."""
        if self._version is not None:
            with self.reporter.lanes.busy("training", "wait", str(self._version)):
                while self._version is not None and not self.ctx.stopping.is_set():
                    await wait_event(self._idle, POLL_S)
        return self._version is None

    async def finish(self, step: int) -> bool:
        """Evaluate the final weights unless that was done. Returns False if the service stops first."""
        self._finishing = True
        if await self.over() and self.plan is not None and step not in self.reporter.evaluations.steps:
            self._begin(WeightVersion(self.lease.epoch, step))
        return await self.over()

    def _is_due(self, step: int) -> bool:
        if self.plan is None or step in self.reporter.evaluations.steps:
            return False
        return step % self.plan.every == 0 if step else self.plan.at_start

    def _begin(self, version: WeightVersion) -> None:
        self._version = version
        self._idle.clear()
        self._changed.set()

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run evaluations until cancelled. Raises JobFailed."""
        if self.reporter.policy in policies_without_opponent(self.reporter.spec):
            raise JobFailed(f"validation.against {without_opponent(self.reporter.policy)}")
        serving = await self.ctx.bus.serve(EXAM_RESULT, self._receive, job=self._part)
        try:
            await self._purge_exams()  # exams of an earlier trainer
            while True:
                self._changed.clear()
                if self._version is not None:
                    await self._evaluate(self._version)
                    self._end()
                await wait_event(self._changed, POLL_S)
        finally:
            await serving.unsubscribe()

    def _end(self) -> None:
        self._version, held, self._held = None, self._held, None
        if held is not None:
            self._publish(held)
        self._idle.set()

    async def _evaluate(self, version: WeightVersion) -> None:
        assert self.plan is not None
        self._results, self._lost, self._published = {}, set(), 0
        began = time.monotonic()
        if await self._until_served(version):
            began = time.monotonic()
            await self._until_done(version)
        if len(self._results) < self._total:
            await self._purge_exams()
        results = [self._results[index] for index in sorted(self._results)]
        names = [opponent.metric_name for opponent in self._opponents]
        values = await asyncio.to_thread(metrics_of, results, self.plan, names)
        values |= {"val/seconds": time.monotonic() - began}
        anchors = self.plan.anchors_of(self.reporter.policy)
        players = self._players(results)
        values |= await self.reporter.evaluations.rate(version, values, players, anchors)
        if self.reporter.spec.train.deterministic and self.reporter.target_uses_evaluation:
            self._require_complete(version, results)  # before any result is stored
        kept = [transcript_of(result, self.plan, names) for result in choose_kept(results, self.plan, names)]
        await self.reporter.evaluations.keep(version.step, kept)
        await self.reporter.evaluations.add(version, values, self.reporter.spec.train.target, players)

    def _players(self, results: Sequence[EvalResult]) -> dict[str, str | dict[str, Counts]]:
        """Return the opponents as `Players`."""
        found: dict[str, str | dict[str, Counts]] = {}
        for place, one in enumerate(self._opponents):
            if one.policy is None:
                found[one.metric_name] = one.player or f"{BOT}{one.bot}"
            else:
                found[one.metric_name] = self._games_by_version(place, one.policy, results)
        return found

    def _games_by_version(self, place: int, policy: str, results: Sequence[EvalResult]) -> dict[str, Counts]:
        """Return the games against each version of a policy, the opponent at this place: it makes steps meanwhile."""
        assert self.plan is not None
        won: defaultdict[str, Counter[float | None]] = defaultdict(Counter)
        for result in results:
            if result.index // self.plan.total == place and not result.ending.failed:
                version = result.opponent
                if version is None:  # of a worker of the release before
                    version = WeightVersion(self.lease.epoch, self.reporter.joint.made(policy))
                won[version_name(policy, version)][result.outcome] += 1
        return {player: (found[1.0], found[0.5], found[0.0]) for player, found in won.items()}

    def _require_complete(self, version: WeightVersion, results: list[EvalResult]) -> None:
        """Raise JobFailed if timing affected an evaluation that decides whether a deterministic job ends early."""
        assert self.plan is not None
        if version.step >= self.reporter.spec.train.steps:
            return
        failed = [result for result in results if not result.ending.repeats]
        if len(results) < self._total:
            why = f"{len(results)} of {self._total} episodes were played within validation.timeout_s"
        elif failed:
            why = f"episode {failed[0].index} could not be played ({failed[0].ending}: {failed[0].error})"
        else:
            return
        raise JobFailed(
            f"evaluation of step {version.step}: {why}, and in a deterministic job no train.target may depend on that. "
            "Raise validation.timeout_s, rollout.retries or rollout.episode_timeout_s, or fix the environment"
        )

    async def _until_served(self, version: WeightVersion) -> bool:
        """Wait until the version is served, without a time limit before the end of the job: until then training waits
        for rollout workers too."""
        assert self.plan is not None
        since = None
        while self._served != version:
            if self._finishing:
                since = since or time.monotonic()
                if time.monotonic() - since > self.plan.timeout_s:
                    return False
            await wait_event(self._changed, POLL_S)
            self._changed.clear()
        return True

    def _now(self) -> float:
        return time.monotonic() - self._asleep_s()

    async def _until_done(self, version: WeightVersion) -> None:
        assert self.plan is not None
        had, began = 0, self._now()
        heard = began
        while len(self._results) < self._total and self._now() - began < self.plan.timeout_s:
            self._changed.clear()
            await self._publish_more(version)
            if len(self._results) > had:
                had, heard = len(self._results), self._now()
            elif self._now() - heard > self.lost_after_s:
                await self._republish_lost(version)
                heard = self._now()
            await wait_event(self._changed, POLL_S)

    # --- exams ----------------------------------------------------------------------------------------------------

    async def _publish_more(self, version: WeightVersion) -> None:
        """Publish the next exams, in order, enough to keep rollout workers busy."""
        room = MAX_OUTSTANDING - (self._published - len(self._results))
        if room > MAX_OUTSTANDING // 2 and self._published < self._total:
            first, self._published = self._published, min(self._total, self._published + room)
            await self._publish_exams(version, range(first, self._published))

    async def _publish_exams(self, version: WeightVersion, indices: Iterable[int]) -> None:
        """Publish exams. Those that a full stream rejects count as lost and are published again later."""
        assert self.plan is not None
        self._publications += 1
        job = self._part
        exams = [exam_at(i, job, version, self.plan) for i in indices]
        try:
            await asyncio.gather(
                *(
                    self.ctx.bus.publish(EXAM, e, f"{job}/{version}/{e.index}/{self._publications}", job=job)
                    for e in exams
                )
            )
        except StreamFull as error:
            log.warning("exams_deferred", error=str(error))

    async def _republish_lost(self, version: WeightVersion) -> None:
        """Publish exams again that two polls in a row found neither stored nor answered: a result may be in transit."""
        try:
            stored = {exam.index for exam in await self.ctx.bus.stored(EXAM, job=self._part)}
        except NoReply:
            return
        missing = set(range(self._published)) - self._results.keys() - stored
        if again := missing & self._lost:
            log.warning("exams_republished", exams=sorted(again)[:20], count=len(again))
            await self._publish_exams(version, sorted(again))
        self._lost = missing - again

    async def _purge_exams(self) -> None:
        assert EXAMS.name is not None
        await self.ctx.bus.purge(EXAMS.name, EXAM.at(job=self._part))

    async def _receive(self, result: EvalResult) -> EvalAck:
        wanted = result.version == self._version and result.index not in self._results
        if wanted and not result.ending.failed and not set(result.sampled_by) <= {result.version}:
            log.warning("exam_with_other_weights", exam=result.index, versions=[str(v) for v in result.sampled_by])
            wanted = False
        if wanted:
            self._results[result.index] = result
            self._changed.set()
        return EvalAck(wanted=wanted)
