"""A cluster on a fake clock around `placement.plan`: jobs and workers that do what random events say, and the rules
that must hold after every one of them, written down a second time and independently of the planner."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from opentinker.services.scheduler.placement import plan
from opentinker.services.scheduler.placing import (
    AddWorker,
    Decision,
    Held,
    Job,
    Preempt,
    Requeue,
    Rules,
    Start,
    TakeBack,
    View,
)
from opentinker.shared.config import TenantLimits
from opentinker.shared.types import Pool

TRAINER, ROLLOUT = Pool.TRAINER, Pool.ROLLOUT
POOLS = (TRAINER, ROLLOUT)
RULES = Rules(reserve_after_s=120.0, preempt_after_s=5.0, min_run_s=60.0, gang_s=15.0)
LIMITS = {
    "a": TenantLimits(weight=2.0, running_jobs=3),
    "b": TenantLimits(workers=5),
    "*": TenantLimits(running_jobs=4, workers=8),
}
KINDS = (
    ({TRAINER: 1, ROLLOUT: 1}, 1),
    ({TRAINER: 1, ROLLOUT: 1}, 3),
    ({TRAINER: 1, ROLLOUT: 2}, 4),
    ({TRAINER: 1, ROLLOUT: 4}, 4),
    ({TRAINER: 1}, 0),
    ({ROLLOUT: 1}, 2),
)
"""What a job needs, and how many rollout workers it may have."""
EVENTS = (
    ("submit",) * 6 + ("finish",) * 4 + ("cancel", "crash", "crash", "revive", "revive", "expire", "pause", "resume")
)
MOST_JOBS = 14


@dataclass
class Worker:
    pool: Pool
    alive: bool = True
    job: str = ""
    """Its lease."""
    leaving: bool = False
    busy_until: float = 0.0
    """It has not let go of its last job before."""


@dataclass
class Model:
    random: random.Random
    now: float = 1e6
    jobs: dict[str, Job] = field(default_factory=dict)
    paused: dict[str, Job] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    made: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for pool, most in ((TRAINER, 4), (ROLLOUT, 6)):
            for number in range(self.random.randint(1, most)):
                self.workers[f"{pool}-{number}"] = Worker(pool)

    # --- what happens -------------------------------------------------------------------------------------------

    def event(self) -> None:
        self.now += self.random.expovariate(0.2)
        name = self.random.choice(EVENTS)
        self.counts[name] += 1
        getattr(self, f"_{name}")()
        for worker in self.workers.values():
            if worker.leaving and self.random.random() < 0.5:
                self._release(worker)

    def _one(self, held: bool | None = None) -> Job | None:
        found = [job for job in self.jobs.values() if held is None or job.held == held]
        return self.random.choice(found) if found else None

    def _submit(self) -> None:
        if len(self.jobs) + len(self.paused) < MOST_JOBS:
            needs, most = self.random.choice(KINDS)
            self.made += 1
            job = Job(
                id=f"j{self.made}",
                tenant=self.random.choice("abc"),
                priority=self.random.choice((-1, 0, 0, 0, 2)),
                created=self.now,
                since=self.now,
                needs=needs,
                most=most,
            )
            self.jobs[job.id] = job

    def _finish(self) -> None:
        self._leave(self._one(held=True))

    def _cancel(self) -> None:
        self._leave(self._one())

    def _leave(self, job: Job | None) -> None:
        if job is not None:
            del self.jobs[job.id]
            self._free(job.id)

    def _crash(self) -> None:
        """With its heartbeat its lease expires."""
        worker = self.random.choice(list(self.workers.values()))
        worker.alive, worker.busy_until = False, 0.0
        self._lose(worker)

    def _expire(self) -> None:
        """The lease alone: its worker lives, and has not let go."""
        leased = [worker for worker in self.workers.values() if worker.job]
        if leased:
            worker = self.random.choice(leased)
            worker.busy_until = self.now + 20.0
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        job = self.jobs.get(worker.job)
        if job is not None and not worker.leaving:
            pause_s = self.random.choice((0.0, 2.0, 30.0))
            self.jobs[job.id] = replace(job, lost_at=self.now, retry_at=self.now + pause_s)
        worker.job, worker.leaving = "", False

    def _revive(self) -> None:
        for worker in self.workers.values():
            if not worker.alive:
                worker.alive = True
                return

    def _pause(self) -> None:
        job = self._one()
        if job is not None:
            self._leave(job)
            self.paused[job.id] = job

    def _resume(self) -> None:
        if self.paused:
            job = self.paused.pop(self.random.choice(list(self.paused)))
            self.jobs[job.id] = replace(job, held=False, since=self.now)

    def _free(self, job: str) -> None:
        for worker in self.workers.values():
            if worker.job == job:
                self._release(worker)

    def _release(self, worker: Worker) -> None:
        worker.job, worker.leaving, worker.busy_until = "", False, self.now + self.random.choice((0.0, 1.0, 10.0))

    # --- what the planner sees, and what comes of it ------------------------------------------------------------

    def is_free(self, worker: Worker) -> bool:
        return worker.alive and not worker.job and worker.busy_until <= self.now

    def view(self) -> View:
        workers = sorted(self.workers.items())
        return View(
            now=self.now,
            jobs=list(self.jobs.values()),
            free={pool: [id for id, w in workers if w.pool == pool and self.is_free(w)] for pool in POOLS},
            alive={pool: sum(w.pool == pool and w.alive for _, w in workers) for pool in POOLS},
            coming={
                pool: sum(w.pool == pool and w.alive and not w.job and w.busy_until > self.now for _, w in workers)
                for pool in POOLS
            },
            leases=[Held(id, w.job, w.pool, w.leaving) for id, w in workers if w.job],
            limits=LIMITS,
            rules=RULES,
        )

    def look(self) -> list[Decision]:
        view = self.view()
        planned = plan(view)
        gaps = {pool: len(free) for pool, free in view.free.items()}
        """Free workers that nobody needs."""
        for decision in planned.decisions:
            self.counts[type(decision).__name__] += 1
            if isinstance(decision, Start):
                self._check_turn(view, gaps, decision)
            if isinstance(decision, Start | AddWorker) and not self._is_lent(decision):
                for worker in decision.workers if isinstance(decision, Start) else (decision.worker,):
                    gaps[self.workers[worker].pool] -= 1
            self._apply(view, decision)
        self._check_rest(view, gaps, planned.decisions, planned.waiting)
        return planned.decisions

    def _is_lent(self, decision: Start | AddWorker) -> bool:
        if isinstance(decision, Start):
            return False
        return self.has(decision.job)[decision.pool] >= self.jobs[decision.job].needs.get(decision.pool, 0)

    def has(self, job: str) -> Counter[Pool]:
        return Counter(w.pool for w in self.workers.values() if w.job == job and not w.leaving)

    def _apply(self, view: View, decision: Decision) -> None:
        job = self.jobs[decision.job]
        match decision:
            case Start(_, workers):
                assert not job.held and self.blocked(view, job) == ""
                assert Counter(self.workers[id].pool for id in workers) == Counter(job.needs), "all that it needs"
                for id in workers:
                    self._give(id, job)
                self.jobs[job.id] = replace(job, held=True, since=self.now)
            case AddWorker(_, id, pool):
                assert job.held and self.workers[id].pool == pool
                self._give(id, job)
                assert self.has(job.id)[pool] <= max(job.needs[pool], job.most if pool == ROLLOUT else 0)
            case TakeBack(_, id, wanted_by):
                worker = self.workers[id]
                assert worker.job == job.id and not worker.leaving and not self.jobs[wanted_by].held
                worker.leaving = True
                assert self.has(job.id)[worker.pool] >= job.needs[worker.pool], "more than was lent to it"
            case Preempt(_, by):
                other = self.jobs[by]
                assert job.held and not other.held and other.priority > job.priority
                assert self.now - job.since >= RULES.min_run_s and self.now - other.since >= RULES.preempt_after_s
                self._back(job)
            case Requeue():
                assert job.held and +(Counter(job.needs) - self.has(job.id)), "it lacks nothing"
                self._back(job)

    def _back(self, job: Job) -> None:
        self._free(job.id)
        self.jobs[job.id] = replace(job, held=False, since=self.now)

    def _give(self, id: str, job: Job) -> None:
        worker = self.workers[id]
        assert self.is_free(worker), f"{id} is given to {job.id} and not free: {worker}"
        worker.job = job.id

    # --- what must hold -----------------------------------------------------------------------------------------

    def limits(self, tenant: str) -> TenantLimits:
        return LIMITS.get(tenant, LIMITS["*"])

    def minimum(self, tenant: str) -> Counter[Pool]:
        found: Counter[Pool] = Counter()
        for job in self.jobs.values():
            if job.held and job.tenant == tenant:
                found.update(job.needs)
        return found

    def share(self, view: View, tenant: str) -> float:
        held = self.minimum(tenant)
        return max((n / max(1, view.alive[pool]) for pool, n in held.items()), default=0.0) / self.limits(tenant).weight

    def blocked(self, view: View, job: Job) -> str:
        if any(n > view.alive[pool] for pool, n in job.needs.items()):
            return "too few workers"
        if view.now < job.retry_at:
            return "back-off"
        limits, running = self.limits(job.tenant), sum(j.held for j in self.jobs.values() if j.tenant == job.tenant)
        if limits.running_jobs is not None and running >= limits.running_jobs:
            return "quota of jobs"
        held = sum(self.minimum(job.tenant).values())
        return (
            "quota of workers" if limits.workers is not None and held + sum(job.needs.values()) > limits.workers else ""
        )

    def _check_turn(self, view: View, gaps: dict[Pool, int], decision: Start) -> None:
        """Nobody who could start with what is there had the turn before: fairness is bounded by one job."""
        job = self.jobs[decision.job]
        own = self.share(view, job.tenant)
        for other in self.jobs.values():
            if other.held or other is job or any(n > gaps[pool] for pool, n in other.needs.items()):
                continue
            if self.blocked(view, other):
                continue
            if other.tenant == job.tenant:
                first = (-other.priority, other.created) < (-job.priority, job.created)
            else:
                first = (-other.priority, self.share(view, other.tenant)) < (-job.priority, own)
            assert not first or self._is_kept(view), f"{other} should start before {job}"

    def _is_kept(self, view: View) -> bool:
        """Something may be kept for a job that cannot start yet: it waits for long, or for what is on its way."""
        waiting = [job for job in self.jobs.values() if not job.held and not self.blocked(view, job)]
        coming = any(view.coming.values()) or any(w.leaving or w.busy_until > self.now for w in self.workers.values())
        return any(coming or self.now - job.since >= RULES.reserve_after_s for job in waiting)

    def _check_rest(
        self, view: View, gaps: dict[Pool, int], decisions: list[Decision], waiting: dict[str, str]
    ) -> None:
        for tenant in "abc":
            limits = self.limits(tenant)
            own = [job for job in self.jobs.values() if job.held and job.tenant == tenant]
            assert limits.running_jobs is None or len(own) <= limits.running_jobs
            held = sum(sum(self.has(job.id).values()) for job in own)
            assert limits.workers is None or held <= limits.workers, f"{tenant} holds {held} workers"
        gone = {decision.job for decision in decisions if isinstance(decision, Preempt | Requeue)}
        for job in self.jobs.values():
            if not job.held and job.id not in gone:
                assert waiting[job.id], f"{job.id} waits and does not say for what"
                fits = all(n <= gaps[pool] for pool, n in job.needs.items())
                # What somebody gave back in this look counts with the next.
                stuck = fits and not gone and not self.blocked(view, job) and not self._is_kept(view)
                assert not stuck, f"{job} could start: {gaps} are free"

    def drain(self) -> None:
        """Nothing more comes and nothing more breaks: whatever can start at all comes to its end."""
        for worker in self.workers.values():
            worker.alive = True
        self.jobs |= {id: replace(job, held=False, since=self.now) for id, job in self.paused.items()}
        self.paused.clear()
        total = Counter(worker.pool for worker in self.workers.values())
        for id in [id for id, job in self.jobs.items() if Counter(job.needs) - total]:
            self._leave(self.jobs[id])
        for _ in range(60 * (len(self.jobs) + 1)):
            if not self.jobs:
                return
            self.look()
            self.now += 10.0
            for worker in self.workers.values():
                if worker.leaving:
                    self._release(worker)
            whole = [job for job in self.jobs.values() if job.held and not Counter(job.needs) - self.has(job.id)]
            for job in whole:
                if self.now - job.since >= 30.0 and self.random.random() < 0.2:
                    self._leave(job)
        raise AssertionError(f"stuck: {self.jobs}, {self.workers}")
