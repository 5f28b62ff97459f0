"""One sweep, as long as it runs or has jobs to cancel."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec
import structlog

from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.sweeps.curves import LARGEST, History, best_of, mean_value
from opentinker.services.scheduler.sweeps.early_stopping import judge
from opentinker.services.scheduler.sweeps.messages import tell_end, tell_target
from opentinker.services.scheduler.sweeps.metric_names import absent_metric
from opentinker.services.scheduler.sweeps.trial_jobs import cancel_job, job_key, submitted_job
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.key_text import KEY_ID
from opentinker.shared.spec import read_stored
from opentinker.shared.spec.sweeps.children import child_of, combinations, named
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.state.keys import KeyStore
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import JobRecord, JobState
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.sweeps import SweepProgress, SweepRecord, SweepState, Trial, TrialJob, TrialState

log = structlog.get_logger()

T = TypeVar("T")
PAGE = 1000
HOPELESS = 5
"""Trials that may fail before the first one has a value; then no more are started."""
VALUED = (TrialState.FINISHED, TrialState.STOPPED)


class RunningSweep:
    def __init__(
        self,
        ctx: Context,
        store: SweepStore,
        history: MetricHistory,
        search: Executor,
        leader: int,
        sweep: SweepRecord,
        *,
        refused_s: float = 600.0,
        retry_s: float = 15.0,
        late_s: float = 10.0,
    ) -> None:
        """`search`: threads in which values are searched. `refused_s`: time for which a refused job is submitted again,
        each `retry_s`: what its spec refers to was there when the sweep was submitted, and may be away for a moment,
        like a name that cannot be resolved or an environment that is not served. `late_s`: time after a job's end
        within which its last metrics are expected."""
        self._refused_s, self._retry_s, self._late_s = refused_s, retry_s, late_s
        self.ctx, self._store, self._metrics, self._search, self.leader = ctx, store, history, search, leader
        self.id, self.sweep = sweep.id, sweep
        self.table = SweepTable.model_validate(sweep.table)
        self._planned = list(combinations(self.table))
        self._trials: list[Trial] | None = None
        self._saved: dict[int, bytes] = {}
        self._closed: set[int] = set()
        """Trials that were saved in their final state."""
        self._histories: dict[str, History] = {}
        self._cursors: dict[str, int] = {}
        self._importance: dict[str, float] = {}
        self._weighed = 0
        """Finished trials that `_importance` is of."""
        self._refused_since = self._retry_at = 0.0
        self._search_error = ""
        self._told_best: int | None = None
        """Number of the best trial when targets were looked at."""

    async def step(self) -> bool:
        """Look at the jobs once, and do what follows. Return whether nothing is left to do. Raises NotFound: the sweep
        was deleted; Fenced; NoReply and others while a server is away."""
        self.sweep = await self._store.sweep(self.id)
        if self._trials is None:
            stored = await self._store.trials(self.id)
            await self._add_rungs(stored)
            self._trials = stored
        trials = self._trials
        asked = [job.id for trial in trials for job in trial.open_jobs if job.id]
        records = {record.id: record for record in await self.ctx.store.jobs(asked)}
        for trial in trials:
            for job in trial.open_jobs:
                if job.id:
                    await self._follow(job, records.get(job.id))
            self._conclude(trial, records)
        if self.sweep.state is SweepState.RUNNING:
            await self._go_on(trials)
        if self.sweep.state is not SweepState.RUNNING:
            self._give_up(trials)
        await self._save(trials)  # first: another leader must not continue a trial whose jobs are cancelled
        await self._cancel_rest(trials)
        await self._save(trials)
        await self._tell_target(best_of(trials, self.table))
        over = {job.id for trial in trials if not _runs(trial) for job in trial.jobs if job.over}
        for id in over & self._histories.keys():
            del self._histories[id]
        if self.sweep.state is SweepState.RUNNING or any(trial.open_jobs for trial in trials):
            return False
        await tell_end(self.ctx, await self._store.sweep(self.id))  # with the trials that were saved just now
        await self._store.ended(self.id, leader=self.leader)
        return True

    # --- what the jobs say --------------------------------------------------------------------------------------

    async def _follow(self, job: TrialJob, record: JobRecord | None) -> None:
        """Read what is new of a job's metric."""
        if record is None or record.deleted:
            job.over, job.state = True, JobState.CANCELLED
            return
        waits = record.state is JobState.QUEUED and not record.step
        history = await self._read(record, more=not waits)
        job.state, job.step, job.value, job.rungs = record.state, history.step, history.value(), history.rungs()
        complete = history.step >= record.step or time.time() - record.finished > self._late_s
        job.over = record.state.final and complete

    async def _read(self, record: JobRecord, *, more: bool = True) -> History:
        """Return a job's history, with what is new if there is more."""
        history = self._histories.setdefault(record.id, History(self.table))
        while more:
            page, more = await self._metrics.page(record, self._cursors.get(record.id, 0), PAGE, "*")
            for cursor, point in page:
                history.add(point)
                self._cursors[record.id] = cursor
        return history

    async def _add_rungs(self, trials: list[Trial]) -> None:
        """Jobs that ended under an earlier release have no rungs, and others are to be compared with them."""
        rule = self.table.early_stopping
        if rule is None or self.sweep.state is not SweepState.RUNNING:
            return
        jobs = [job for trial in trials for job in trial.jobs if job.over and job.step >= rule.min_steps]
        older = {job.id: job for job in jobs if not job.rungs}
        for record in await self.ctx.store.jobs(list(older)):
            if not record.deleted:
                older[record.id].rungs = (await self._read(record)).rungs()
                del self._histories[record.id]
                self._cursors.pop(record.id, None)

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
        if self.table.metric in names:
            return f"no value of its metric {self.table.metric} is a number below {LARGEST:g}"
        return absent_metric(str(self.table.metric), names)

    def _end_trial(self, trial: Trial, state: TrialState, reason: str = "") -> None:
        trial.state, trial.reason, trial.finished = state, reason, time.time()
        log.info("trial_ended", trial=trial.number, state=state.value, value=trial.value, reason=reason)

    async def _tell_target(self, best: Trial | None) -> None:
        """Tell of targets whenever another trial is the best, and of one that was there before this leader."""
        number = None if best is None else best.number
        if number != self._told_best:
            await tell_target(self.ctx, await self._store.sweep(self.id))
            self._told_best = number

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
        if self._search_error:
            return await self._end(SweepState.FAILED, f"no further values were found: {self._search_error}"[:1000])
        if best_of(trials, self.table) is not None:
            reached = self.table.all_trials > len(trials) == self.table.most_trials
            spent = f"its budget is spent: max_jobs = {self.table.max_jobs}" if reached else ""
            return await self._end(SweepState.SUCCEEDED, spent)
        reasons = [trial.reason for trial in trials if trial.reason]
        why = "" if not reasons else f": {reasons[0]}" if len({*reasons}) == 1 else f"; the last: {reasons[-1]}"
        await self._end(SweepState.FAILED, f"none of {len(trials)} trials has a value{why}"[:1000])

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
        if time.time() < self._retry_at:
            return
        room = self.table.max_running - sum(bool(job.id) for trial in trials for job in trial.open_jobs)
        while room > 0:
            waiting = [(trial, job) for trial in trials for job in trial.open_jobs if not job.id and _runs(trial)]
            if not waiting:
                trial = await self._new_trial(trials)
                if trial is None:
                    return
                continue
            if not await self._submit(*waiting[0]):
                return
            room -= 1

    async def _new_trial(self, trials: list[Trial]) -> Trial | None:
        """Store the next trial and return it, or None after the last."""
        if self._search_error:
            return None
        number = len(trials)
        failed = sum(trial.state is TrialState.FAILED for trial in trials)
        if failed >= HOPELESS and not any(trial.state in VALUED for trial in trials):
            return None
        if number >= (self.table.most_trials if self.table.method == "tpe" else len(self._planned)):
            return None
        settings = self._planned[number] if self._planned else await self._searched(self._suggested, trials)
        if settings is None:
            return None
        jobs = [TrialJob(seed=seed) for seed in self.table.job_seeds]
        trial = Trial(number=number, settings=settings, jobs=jobs, created=time.time())
        trials.append(trial)
        await self._save(trials)
        return trial

    def _suggested(self, trials: list[Trial]) -> dict[str, Any] | None:
        """Blocking. Return the settings of the next trial; None if the search fails: the trials that there are stay,
        and no further one is made."""
        from opentinker.services.scheduler.sweeps.adaptive import suggest

        try:
            return suggest(self.table, trials)
        except Exception as error:  # noqa: BLE001 - any error of Optuna ends the search
            log.error("search_failed", error=str(error))
            self._search_error = str(error) or type(error).__name__
            return None

    async def _searched(self, call: Callable[[list[Trial]], T], trials: list[Trial]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._search, call, trials)

    async def _submit(self, trial: Trial, job: TrialJob) -> bool:
        """Submit a job, or adopt the one that another leader submitted. Return whether others may follow now.

        Raises ReferencesAway and others while a server is away: it is submitted again, as the same job."""
        if problem := await self._key_problem():
            await self._end(SweepState.CANCELLED, problem)
            return False
        job.id = await self._job_of(trial, job)
        if not job.id:
            await self._submit_new(trial, job)
        if not job.id:
            return job.over
        job.state, trial.reason, self._refused_since = JobState.QUEUED, "", 0.0
        await self._save(self._trials or [])
        return True

    async def _submit_new(self, trial: Trial, job: TrialJob) -> None:
        """Submit a job; one that is refused is over, or for some time submitted again later."""
        try:
            spec = await asyncio.to_thread(self._spec, trial, job)
        except SpecError as error:
            return self._refuse(trial, job, error)
        sweep, key = self.sweep, job_key(self.id, trial.number, trial.jobs.index(job))
        try:
            same = {"key": sweep.key, "trace": sweep.trace}
            job.id, _ = await submit(self.ctx, spec, sweep.tenant, key, **same, leader=self.leader, stored=True)
        except (SpecError, Conflict) as error:
            now = time.time()
            self._refused_since = self._refused_since or now
            if now - self._refused_since >= self._refused_s:
                return self._refuse(trial, job, error)
            log.warning("job_refused", trial=trial.number, error=str(error))
            trial.reason, self._retry_at = f"its job is refused for now: {error}"[:1000], now + self._retry_s

    def _spec(self, trial: Trial, job: TrialJob) -> dict[str, Any]:
        """Return the spec of a job. Raises SpecError if it is wrong in itself."""
        sweep = self.sweep
        labels = {"name": sweep.name, "project": sweep.project, "tags": sweep.tags, "notes": sweep.notes}
        spec = child_of(self.table, {**sweep.base, **labels}, trial.settings, job.seed)
        spec = named(spec, self.id, trial.number, trial.settings, job.seed)
        read_stored(spec)
        if not self.table.notify_jobs:
            spec.pop("notify", None)
        return spec

    def _refuse(self, trial: Trial, job: TrialJob, error: Exception) -> None:
        job.over, self._refused_since = True, 0.0
        self._end_trial(trial, TrialState.FAILED, f"its job was refused: {error}"[:1000])

    async def _key_problem(self) -> str:
        """Return why no more jobs are submitted with the sweep's API key; empty if they are, and for a user's sweep."""
        if not self.ctx.settings.auth or not KEY_ID.fullmatch(self.sweep.key):
            return ""
        key = await KeyStore(self.ctx.store.redis).find(self.sweep.key)
        state = "revoked" if key is None else key.state(time.time())  # one that is unknown was revoked long ago
        return "" if state == "live" else f"its API key {self.sweep.key} is {state}"

    async def _job_of(self, trial: Trial, job: TrialJob) -> str:
        """Return the job that another leader submitted just before it was killed, or an empty text."""
        return await submitted_job(self.ctx, self.id, self.sweep.tenant, trial.number, trial.jobs.index(job))

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
                reason = f"{trial.state.value} by sweep {self.id}" + (f": {trial.reason}" if trial.reason else "")
                await cancel_job(self.ctx, job.id, reason, self.leader)

    async def _save(self, trials: list[Trial]) -> None:
        """Store those that have changed. Raises Fenced."""
        texts = {trial.number: msgspec.json.encode(trial) for trial in trials if trial.number not in self._closed}
        changed = [trial for trial in trials if self._saved.get(trial.number) != texts.get(trial.number)]
        if changed:
            await self._store.save(self.id, changed, await self._progress(trials), leader=self.leader)
        self._closed |= {trial.number for trial in trials if not _runs(trial) and not trial.open_jobs}
        self._saved = {number: text for number, text in texts.items() if number not in self._closed}

    async def _progress(self, trials: list[Trial]) -> SweepProgress:
        best = best_of(trials, self.table)
        finished = sum(trial.state is TrialState.FINISHED for trial in trials)
        if finished != self._weighed:
            self._weighed, self._importance = finished, await self._searched(self._importances, trials)
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
        except Exception as error:  # noqa: BLE001 - after any error of Optuna the sweep is shown without
            log.error("importance_failed", error=str(error))
            return {}


def _runs(trial: Trial) -> bool:
    return trial.state is TrialState.RUNNING
