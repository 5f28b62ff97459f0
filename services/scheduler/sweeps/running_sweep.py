"""One sweep, as long as it runs or has jobs to cancel."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import msgspec
import structlog

from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.sweeps.curves import History, best_of, mean_value
from opentinker.services.scheduler.sweeps.early_stopping import judge
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.sweeps.children import child_of, combinations, named
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.sweeps import SweepProgress, SweepRecord, SweepState, Trial, TrialJob, TrialState

log = structlog.get_logger()

PAGE = 1000
LATE_S = 10.0
"""Time after a job's end within which its last metrics are expected."""
HOPELESS = 5
"""Trials that may fail before the first one has a value; then no more are started."""
SHOWN_NAMES = 12
VALUED = (TrialState.FINISHED, TrialState.STOPPED)


class RunningSweep:
    def __init__(
        self, ctx: Context, store: SweepStore, history: MetricHistory, leader: int, sweep: SweepRecord
    ) -> None:
        self.ctx, self._store, self._metrics, self.leader = ctx, store, history, leader
        self.id, self.sweep = sweep.id, sweep
        self.table = SweepTable.model_validate(sweep.table)
        self._planned = list(combinations(self.table))
        self._trials: list[Trial] | None = None
        self._saved: dict[int, bytes] = {}
        self._histories: dict[str, History] = {}
        self._cursors: dict[str, int] = {}
        self._importance: dict[str, float] = {}
        self._weighed = 0
        """Finished trials that `_importance` is of."""

    async def step(self) -> bool:
        """Look at the jobs once, and do what follows. Return whether nothing is left to do. Raises NotFound: the sweep
        was deleted; Fenced; NoReply and others while a server is away."""
        self.sweep = await self._store.sweep(self.id)
        if self._trials is None:
            self._trials = await self._store.trials(self.id)
        trials = self._trials
        records = await self._records(trials)
        for trial in trials:
            for job in trial.open_jobs:
                if job.id:
                    await self._follow(job, records.get(job.id))
            self._conclude(trial, records)
        if self.sweep.state is SweepState.RUNNING:
            await self._go_on(trials)
        if self.sweep.state is not SweepState.RUNNING:
            self._give_up(trials)
        await self._cancel_rest(trials)
        await self._save(trials)
        over = {job.id for trial in trials if not _runs(trial) for job in trial.jobs if job.over}
        for id in over & self._histories.keys():
            del self._histories[id]
        if self.sweep.state is SweepState.RUNNING or any(trial.open_jobs for trial in trials):
            return False
        await self._store.ended(self.id, leader=self.leader)
        return True

    # --- what the jobs say --------------------------------------------------------------------------------------

    async def _records(self, trials: list[Trial]) -> dict[str, JobRecord]:
        asked = [job.id for trial in trials for job in trial.open_jobs if job.id]
        return {record.id: record for record in await self.ctx.store.jobs(asked)}

    async def _follow(self, job: TrialJob, record: JobRecord | None) -> None:
        """Read what is new of a job's metric."""
        if record is None or record.deleted:
            job.over, job.state = True, JobState.CANCELLED
            return
        history = self._histories.setdefault(job.id, History(self.table))
        waits = record.state is JobState.QUEUED and not record.step
        more = not waits
        while more:
            page, more = await self._metrics.page(record, self._cursors.get(job.id, 0), PAGE, "*")
            for cursor, point in page:
                history.add(point.step, point.values)
                self._cursors[job.id] = cursor
        job.state, job.step, job.value, job.curve = record.state, history.step, history.value(), history.curve()
        complete = history.step >= record.step or time.time() - record.finished > LATE_S
        job.over = record.state.final and complete

    def _conclude(self, trial: Trial, records: dict[str, JobRecord]) -> None:
        """End a trial whose jobs have ended, or of which one has failed."""
        if trial.state is not TrialState.RUNNING:
            return
        for job in trial.jobs:
            if job.over and job.state in (JobState.FAILED, JobState.CANCELLED):
                why = records[job.id].reason if job.id in records else "the job is gone"
                state = TrialState.FAILED if job.state == JobState.FAILED else TrialState.CANCELLED
                return self._end_trial(trial, state, why)
        if trial.open_jobs:
            return
        trial.value = mean_value(trial)
        if trial.value is None:
            return self._end_trial(trial, TrialState.FAILED, self._without_metric(trial))
        self._end_trial(trial, TrialState.FINISHED)

    def _without_metric(self, trial: Trial) -> str:
        names = {name for job in trial.jobs if job.id in self._histories for name in self._histories[job.id].names}
        shown = ", ".join(sorted(names)[:SHOWN_NAMES]) or "none"
        return f"its job reported no metric {self.table.metric}; of {len(names)} metrics the first are: {shown}"

    def _end_trial(self, trial: Trial, state: TrialState, reason: str = "") -> None:
        trial.state, trial.reason, trial.finished = state, reason, time.time()
        log.info("trial_ended", trial=trial.number, state=state.value, value=trial.value, reason=reason)

    # --- what follows -------------------------------------------------------------------------------------------

    async def _go_on(self, trials: list[Trial]) -> None:
        """End the sweep if it is over or its budget is spent; else stop bad trials and start others."""
        if spent := await self._spent(trials):
            return await self._end(SweepState.SUCCEEDED, spent)
        for trial in trials:
            if trial.state is TrialState.RUNNING and (why := judge(trial, trials, self.table)):
                trial.value = mean_value(trial)
                self._end_trial(trial, TrialState.STOPPED, why)
        await self._start(trials)
        if any(trial.open_jobs for trial in trials):
            return
        await self._save(trials)
        if best_of(trials, self.table) is not None:
            return await self._end(SweepState.SUCCEEDED)
        last = next((trial.reason for trial in reversed(trials) if trial.reason), "")
        await self._end(SweepState.FAILED, f"none of {len(trials)} trials has a value; the last: {last}"[:1000])

    async def _spent(self, trials: list[Trial]) -> str:
        """Return which budget is spent; empty if none is."""
        hours, worker_s = self.table.max_hours, self.table.max_worker_s
        if hours is not None and time.time() - self.sweep.created > hours * 3600:
            return f"its budget is spent: max_hours = {hours:g}"
        if worker_s is not None:
            jobs = [job.id for trial in trials for job in trial.jobs if job.id]
            used = sum(spent["worker_s"] for spent in await UsageStore(self.ctx.store.redis).of_jobs(jobs))
            if used > worker_s:
                return f"its budget is spent: max_worker_s = {worker_s:g}"
        return ""

    async def _end(self, state: SweepState, reason: str = "") -> None:
        """End the sweep, unless somebody has cancelled it."""
        before = await self._store.end(self.id, state, reason, leader=self.leader)
        self.sweep = await self._store.sweep(self.id)
        if before is SweepState.RUNNING:
            log.info("sweep_ended", state=state.value, reason=reason)

    async def _start(self, trials: list[Trial]) -> None:
        """Submit as many jobs as there is room for."""
        room = self.table.max_running - sum(bool(job.id) for trial in trials for job in trial.open_jobs)
        while room > 0:
            waiting = [(trial, job) for trial in trials for job in trial.open_jobs if not job.id and _runs(trial)]
            if not waiting:
                trial = await self._new_trial(trials)
                if trial is None:
                    return
                continue
            await self._submit(*waiting[0])
            room -= 1

    async def _new_trial(self, trials: list[Trial]) -> Trial | None:
        """Store the next trial; None if there is none."""
        number = len(trials)
        failed = sum(trial.state is TrialState.FAILED for trial in trials)
        if failed >= HOPELESS and not any(trial.state in VALUED for trial in trials):
            return None
        if number >= (self.table.most_trials if self.table.method == "tpe" else len(self._planned)):
            return None
        try:
            settings = self._planned[number] if self._planned else await asyncio.to_thread(self._suggested, trials)
        except ValueError as error:  # of Optuna: the trials that there are stay, no further one is made
            log.error("search_failed", error=str(error))
            return None
        jobs = [TrialJob(seed=seed) for seed in self.table.job_seeds]
        trial = Trial(number=number, settings=settings, jobs=jobs, created=time.time())
        trials.append(trial)
        await self._save(trials)
        return trial

    def _suggested(self, trials: list[Trial]) -> dict[str, Any]:
        """Blocking."""
        from opentinker.services.scheduler.sweeps.adaptive import suggest

        return suggest(self.table, trials)

    async def _submit(self, trial: Trial, job: TrialJob) -> None:
        """Raises ReferencesAway and others while a server is away: it is submitted again, as the same job."""
        spec = child_of(self.table, self.sweep.base, trial.settings, job.seed)
        spec = named(spec, self.id, trial.number, trial.settings)
        key, sweep = self._key(trial, job), self.sweep
        try:
            job.id, _ = await submit(self.ctx, spec, sweep.tenant, key, key=sweep.key, trace=sweep.trace)
            job.state = JobState.QUEUED
            await self._save(self._trials or [])
        except (SpecError, Conflict) as error:
            job.over = True
            self._end_trial(trial, TrialState.FAILED, f"its job was refused: {error}"[:1000])

    def _key(self, trial: Trial, job: TrialJob) -> str:
        """Return the idempotency key of a job. It has spaces, which no key of a request has."""
        return f"sweep {self.id} {trial.number} {trial.jobs.index(job)}"

    async def _job_of(self, trial: Trial, job: TrialJob) -> str:
        """Return the job that another leader submitted just before it was killed; empty if there is none."""
        return await self.ctx.store.job_of_key(self.sweep.tenant, self._key(trial, job)) or ""

    def _give_up(self, trials: list[Trial]) -> None:
        """End the trials of a sweep that has ended."""
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                self._end_trial(trial, TrialState.CANCELLED, self.sweep.reason)

    async def _cancel_rest(self, trials: list[Trial]) -> None:
        """Cancel the jobs of trials that have ended."""
        for trial in trials:
            for job in trial.open_jobs if not _runs(trial) else []:
                job.id = job.id or await self._job_of(trial, job)
                if not job.id:
                    job.over = True
                    continue
                with contextlib.suppress(Conflict, NotFound):
                    reason = f"{trial.state.value} by sweep {self.id}" + (f": {trial.reason}" if trial.reason else "")
                    await self.ctx.store.transition(job.id, JobState.CANCELLED, reason=reason[:1000])
                    await self.ctx.bus.emit(WAKE, {"job": job.id}, who="scheduler")

    async def _save(self, trials: list[Trial]) -> None:
        """Store those that have changed. Raises Fenced."""
        texts = {trial.number: msgspec.json.encode(trial) for trial in trials}
        changed = [trial for trial in trials if self._saved.get(trial.number) != texts[trial.number]]
        if changed:
            await self._store.save(self.id, changed, await self._progress(trials), leader=self.leader)
            self._saved |= {trial.number: texts[trial.number] for trial in changed}

    async def _progress(self, trials: list[Trial]) -> SweepProgress:
        best = best_of(trials, self.table)
        finished = sum(trial.state is TrialState.FINISHED for trial in trials)
        if finished != self._weighed:
            self._weighed, self._importance = finished, await asyncio.to_thread(self._importances, trials)
        return SweepProgress(
            jobs=sum(bool(job.id) for trial in trials for job in trial.jobs),
            states=dict(Counter(trial.state.value for trial in trials)),
            best=None if best is None else best.number,
            value=None if best is None else best.value,
            settings={} if best is None else best.settings,
            importance=self._importance,
        )

    def _importances(self, trials: list[Trial]) -> dict[str, float]:
        """Blocking."""
        from opentinker.services.scheduler.sweeps.adaptive import importance

        try:
            return importance(self.table, trials)
        except ValueError as error:  # of Optuna: it is shown without
            log.error("importance_failed", error=str(error))
            return {}


def _runs(trial: Trial) -> bool:
    return trial.state is TrialState.RUNNING
