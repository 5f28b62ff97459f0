"""Chooses the running jobs that are interrupted for a queued one (`planner.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentinker.services.scheduler.placement.gpu_matching import GpuMatcher
from opentinker.services.scheduler.placement.planner_state import Reservation, RunningJob
from opentinker.services.scheduler.placement.shortages import missing
from opentinker.services.scheduler.placement.types import LEASED, PlannedJob, Rules
from opentinker.shared.types.core import Pool


class Preemption:
    def __init__(self, running: Iterable[RunningJob], matcher: GpuMatcher, rules: Rules, now: float) -> None:
        """`running`: all jobs that have begun."""
        self._matcher, self._rules, self._now = matcher, rules, now
        ran = [one for one in running if not one.requeued and now - one.job.since >= rules.min_run_s]
        self._candidates = sorted(
            ran, key=lambda one: (not one.job.idle, one.job.priority, -one.job.since, -one.job.created)
        )
        """Jobs that ran for long enough: idle ones first, then lowest priority, shortest run, youngest."""

    def remove(self, victim: RunningJob) -> None:
        self._candidates.remove(victim)

    def victims(
        self, job: PlannedJob, short: dict[Pool, int], reserve: Reservation | None, there: Sequence[str] = ()
    ) -> list[RunningJob] | None:
        """Return as few jobs as hold, as their minimum, what is short; None if all that may be interrupted do not.
        `there`: trainers of the job's group that need no interruption."""
        if not short:
            return []
        if self._now - job.since < self._rules.preempt_after_s:
            return None
        not_spared = {pool for pool, n in short.items() if reserve and not self._can_spare(reserve, pool, n)}

        def own(other: RunningJob, pool: Pool) -> list[str]:
            kept = self._matcher.those(other.own[pool], reserve.job, pool) if reserve and pool in not_spared else ()
            return [worker for worker in other.own[pool] if worker not in kept]

        def left(others: Sequence[RunningJob]) -> dict[Pool, int]:
            """Return what is still short when these are interrupted."""
            found = {pool: [worker for other in others for worker in own(other, pool)] for pool in short}
            return missing(short, {p: len(self._matcher.added(workers, job, p, there)) for p, workers in found.items()})

        chosen: list[RunningJob] = []
        lack = short
        for other in self._preemptible(job):
            if not lack:
                break
            if (less := left([*chosen, other])) != lack:
                chosen, lack = [*chosen, other], less
        if lack:
            return None
        for other in list(chosen):  # some of the first ones may no longer be needed
            rest = [one for one in chosen if one is not other]
            if not left(rest):
                chosen = rest
        return chosen

    def released(
        self, reserve: Reservation, job: PlannedJob, short: Mapping[Pool, int], there: Sequence[str]
    ) -> dict[Pool, Sequence[str]]:
        """Return the job's part of reserved workers, in place of workers for which it could preempt others: those would
        be reserved too, and it would preempt again and again."""
        return {
            pool: self._matcher.added(reserve.holds(pool), job, pool, there)[:n]
            if self._can_spare(reserve, pool, n)
            else ()
            for pool, n in {**dict.fromkeys(LEASED, 0), **short}.items()
        }

    def _can_spare(self, reserve: Reservation, pool: Pool, count: int) -> bool:
        """Return whether the job that has waited longer can still preempt others for this many, in addition to those
        that it lacks."""
        job = reserve.job
        if pool not in job.needs:
            return True
        held = [worker for other in self._preemptible(job) for worker in other.own[pool]]
        return len(self._matcher.added(held, job, pool, reserve.holds(pool))) >= reserve.lacks[pool] + count

    def _preemptible(self, job: PlannedJob) -> Iterator[RunningJob]:
        """Yield jobs that may be interrupted for this one, the first choice first."""
        for other in self._candidates:
            if other.job.priority < job.priority or (other.job.idle and other.job.priority == job.priority):
                yield other
            elif not other.job.idle:
                return
