"""Jobs of kind `eval`: the leading scheduler asks for their episodes and says what came of them.

    evaluate loop   consumes jobs that have workers; starts and stops a task for each; waits for half a second
    job's task      consumes EXAM_RESULT; produces EXAM, val/* METRIC, transcripts, at last the job's result;
                    waits for results; woken by each of them

A result is in {data_dir}/jobs/{job}/results.jsonl before it is acknowledged to the rollout worker, so the next leader,
or the job after a pause, continues from there. Lost episodes are requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import structlog

from opentinker.services.scheduler.jobs.kept_checkpoints import read_start
from opentinker.shared.asyncio_tools import TasksByName, sleep, wait_event
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.evaluation.outcomes import choose_kept
from opentinker.shared.evaluation.records import Evaluations, exam_at, metrics_of, transcript_of
from opentinker.shared.messaging.bus import NoReply, StreamFull
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import EXAM, EXAM_RESULT, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import read_stored
from opentinker.shared.types.core import HELD, JobRecord, JobState, WeightVersion
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.evaluation import EvalAck, EvalResult

log = structlog.get_logger()

POLL_S = 0.5
LOST_S = 10.0
"""Episodes without a result after this silence are looked for, and requested again if no worker has them."""
MAX_PENDING_EXAMS = 1024
"""Exams that are asked for and have no result, at most."""
JUDGED_FROM = 20
"""Episodes that must have ended before the share of failed ones is judged; all of them at the end."""
RESULTS = "results.jsonl"
HEADLINE = 2
"""Metrics of a result that lists of jobs show."""


class EvalCoordinator:
    def __init__(self, ctx: Context, leadership: int, lost_s: float = LOST_S) -> None:
        self._lost_s = lost_s
        self.ctx, self.leader = ctx, leadership
        self._tasks = TasksByName()

    async def run(self) -> None:
        """Coordinate until cancelled. Raises errors of a job's task that are no fault of the job."""
        try:
            while True:
                await self.reconcile()
                await sleep(POLL_S)
        finally:
            await self._tasks.cancel()

    async def reconcile(self) -> None:
        held = {job.id: job for job in await self.ctx.store.held_jobs() if job.kind == "eval"}
        await self._tasks.keep(held, lambda id: self._evaluate(held[id]))

    async def _evaluate(self, job: JobRecord) -> None:
        with structlog.contextvars.bound_contextvars(job=job.id):
            try:
                version = WeightVersion(0, 0)
                if job.spec.get("start") is not None:
                    version = (await asyncio.to_thread(read_start, self.ctx.settings.data_dir, job.id)).version
            except (OSError, ValueError) as error:
                reason = f"the checkpoint that was kept for this job cannot be read: {error}"
                await end(self.ctx, self.leader, job.id, JobState.FAILED, reason)
                return
            with contextlib.suppress(Conflict, NotFound):  # it has ended since: our results stay where they are
                await Evaluation(self.ctx, self.leader, job, version, self._lost_s).run()


async def end(ctx: Context, leader: int, job: str, state: JobState, reason: str = "") -> None:
    """End the job unless it is over, paused or back in the queue by now. Raises Fenced."""
    with contextlib.suppress(Conflict, NotFound):
        await ctx.store.transition(job, state, allowed=HELD, reason=reason, leader=leader)
        await ctx.bus.emit(WAKE, {"job": job}, who="scheduler")


class Evaluation:
    """One job, as long as it has workers."""

    def __init__(
        self, ctx: Context, leader: int, job: JobRecord, version: WeightVersion, lost_s: float = LOST_S
    ) -> None:
        self._lost_s = lost_s
        self.ctx, self.leader, self.job, self.version = ctx, leader, job, version
        self.plan = read_stored(job.spec).evaluation
        self.home: Path = ctx.settings.data_dir / "jobs" / job.id
        self._results: dict[int, EvalResult] = {}
        self._failed: list[EvalResult] = []
        """Failed results."""
        self._log = StepLog(self.home / RESULTS)
        self._writing = asyncio.Lock()
        self._asked: set[int] = set()
        self._lost: set[int] = set()
        """Episodes that no worker had in the last round."""
        self._name = uuid.uuid4().hex[:12]
        self._times = 0
        """Times that exams were stored: with `_name` it makes their message ids differ."""
        self._said = -1
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Run until the job ends. Raises Conflict or NotFound if it has ended in between, Fenced if another scheduler
        leads."""
        began = time.monotonic()
        try:
            self._results = await asyncio.to_thread(read_results, self.home / RESULTS, self.version)
        except OSError as error:
            reason = f"the results that it has cannot be read: {error}"
            await end(self.ctx, self.leader, self.job.id, JobState.FAILED, reason)
            return
        self._failed = [result for result in self._results.values() if result.ending.failed]
        self._asked = set(self._results)
        serving = await self.ctx.bus.serve(EXAM_RESULT, self._receive, job=self.job.id)
        try:
            await self._withdraw()  # what an earlier leader has asked
            await self._until_done()
        finally:
            await serving.unsubscribe()
        await self._conclude(time.monotonic() - began)

    async def _until_done(self) -> None:
        had, heard = len(self._results), time.monotonic()
        while len(self._results) < self.plan.total and not self._hopeless():
            self._news.clear()
            await self._ask_more()
            await self._tell()
            if len(self._results) > had:
                had, heard = len(self._results), time.monotonic()
            elif time.monotonic() - heard > self._lost_s:
                await self._ask_for_lost()
                heard = time.monotonic()
            if len(self._results) < self.plan.total:
                await sleep(POLL_S)
            await wait_event(self._news, POLL_S)

    async def _tell(self) -> None:
        """Record its progress in the job, at most once per round."""
        done = len(self._results)
        if done != self._said:
            self._said = done
            await self.ctx.store.update(self.job.id, only_active=True, step=done, leader=self.leader)

    # --- exams --------------------------------------------------------------------------------------------------

    async def _ask_more(self) -> None:
        """Ask for further episodes, in order, as many as keep the rollout workers busy."""
        room = MAX_PENDING_EXAMS - (len(self._asked) - len(self._results))
        if room > MAX_PENDING_EXAMS // 2 and len(self._asked) < self.plan.total:
            new = [i for i in range(self.plan.total) if i not in self._asked][:room]
            self._asked |= set(new)
            await self._ask(new)

    async def _ask(self, indices: Iterable[int]) -> None:
        """Store exams. What a full store has no room for counts as lost, and is asked for again."""
        self._times += 1
        job = self.job.id
        name = f"{job}/{self._name}/{self._times}"
        exams = [exam_at(i, job, self.version, self.plan) for i in indices]
        try:
            await asyncio.gather(*(self.ctx.bus.publish(EXAM, e, f"{name}/{e.index}", job=job) for e in exams))
        except StreamFull as error:
            log.warning("exams_deferred", error=str(error))

    async def _ask_for_lost(self) -> None:
        """Ask again for episodes of which nothing has been stored in two consecutive checks: a result may just be on
        its way."""
        try:
            stored = {exam.index for exam in await self.ctx.bus.stored(EXAM, job=self.job.id)}
        except NoReply:
            return
        missing = self._asked - self._results.keys() - stored
        if again := missing & self._lost:
            log.warning("exams_republished", exams=sorted(again)[:20], count=len(again))
            await self._ask(sorted(again))
        self._lost = missing - again

    async def _withdraw(self) -> None:
        await self.ctx.bus.purge(required_stream(EXAM), EXAM.at(job=self.job.id))

    async def _receive(self, result: EvalResult) -> EvalAck:
        wanted = result.version == self.version and result.index < self.plan.total
        async with self._writing:
            if not wanted or result.index in self._results:
                return EvalAck(wanted=False)
            try:
                await asyncio.to_thread(self._log.add, msgspec.to_builtins(result))
            except OSError as error:  # it is written with the next one
                log.error("result_write_failed", error=str(error))
            self._results[result.index] = result
            if result.ending.failed:
                self._failed.append(result)
        self._news.set()
        if result.ending.failed:
            detail = {"episode": result.index, "reason": result.ending.value, "error": result.error}
            await self.ctx.store.update(
                self.job.id, event="exam_failed", failure=True, detail=detail, leader=self.leader
            )
        return EvalAck(wanted=True)

    # --- the end ------------------------------------------------------------------------------------------------

    def _hopeless(self) -> bool:
        """Too large a share has failed, of as many as say something."""
        most = self.job.spec["rollout"]["max_failed_share"]
        ended = len(self._results)
        return ended >= min(JUDGED_FROM, self.plan.total) and (
            len(self._failed) > most * ended or len(self._failed) == ended
        )

    def _why(self) -> str:
        last = self._failed[-1]
        said = f": {said}" if (said := error_sentence(last.error)) else ""
        most = self.job.spec["rollout"]["max_failed_share"]
        count = f"{len(self._failed)} of {len(self._results)} episodes failed (rollout.max_failed_share is {most:g})"
        return f"{count}; last: {last.ending}{said}"

    async def _conclude(self, seconds: float) -> None:
        if self._hopeless():
            await self._withdraw()
            await end(self.ctx, self.leader, self.job.id, JobState.FAILED, self._why())
            return
        results = [self._results[index] for index in sorted(self._results)]
        values = await asyncio.to_thread(metrics_of, results, self.plan)
        values["val/seconds"] = seconds

        async def event(kind: str, detail: dict[str, object]) -> None:
            await self.ctx.store.update(self.job.id, event=kind, detail=detail, leader=self.leader)

        async def guard() -> None:
            await self.ctx.store.require_leadership(self.leader)

        kept = Evaluations(self.ctx.bus, self.job.id, self.home, event, guard)
        try:
            await kept.keep(self.version.step, [transcript_of(r, self.plan) for r in choose_kept(results, self.plan)])
            await asyncio.to_thread(kept.restore, {self.version.epoch: self.version.step}, self.version.step)
            if self.version.step not in kept.steps:  # otherwise an earlier leader has reported it
                await kept.add(self.version, values, {})
        finally:
            kept.close()
        result = {"version": str(self.version), "step": self.version.step, "values": values}
        changes: dict[str, Any] = {
            "result": orjson.dumps(result).decode(),
            "progress": orjson.dumps(_headline(values)).decode(),
        }
        await self.ctx.store.update(self.job.id, only_active=True, step=len(results), leader=self.leader, **changes)
        await end(self.ctx, self.leader, self.job.id, JobState.SUCCEEDED)
        log.info("job_evaluated", episodes=len(results), seconds=round(seconds, 1))


def _headline(values: dict[str, float]) -> dict[str, float]:
    """Return a result's headline for lists of jobs: the mean reward, then pass@1 or exact."""
    shown = {name: values[name] for name in ("val/reward/mean", "val/pass/1", "val/exact") if name in values}
    return dict(list(shown.items())[:HEADLINE])


def read_results(path: Path, version: WeightVersion) -> dict[int, EvalResult]:
    """Blocking. By episode; the first of each counts."""
    found: dict[int, EvalResult] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # half a line, of a process that was killed
                result = msgspec.json.decode(line, type=EvalResult)
                if result.version == version:
                    found.setdefault(result.index, result)
    return found
