"""What must hold of `placement.plan` whatever happens to a cluster (placement/cluster.py), checked after every event:
written down a second time and independently of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from opentinker.services.scheduler.placement.planner import plan
from opentinker.services.scheduler.placement.types import (
    AddTrainers,
    AddWorker,
    ClusterView,
    Decision,
    PlannedJob,
    Preempt,
    Reclaim,
    Requeue,
    Start,
)
from opentinker.shared.types.core import Pool
from tests.support.placement.cluster import DAY_S, POOLS, ROLLOUT, RULES, Cluster, Tenant

RECOUNT_EVERY = 50
"""Looks."""


class Model(Cluster):
    looks = 0

    def look(self) -> list[Decision]:
        view = self.view()
        planned = plan(view)
        gaps = {pool: set(free) for pool, free in view.free.items()}
        """Free workers that nobody needs."""
        for decision in planned.decisions:
            self.counts[type(decision).__name__] += 1
            if isinstance(decision, Start):
                self._check_turn(view, gaps, decision)
                self._check_choice(view, gaps, decision)
            if isinstance(decision, Start | AddTrainers | AddWorker) and not self._is_lent(decision):
                for worker in (decision.worker,) if isinstance(decision, AddWorker) else decision.workers:
                    gaps[self.workers[worker].pool].remove(worker)
            self._apply(view, decision)
        self._check_rest(view, gaps, planned.decisions, planned.waiting)
        self.looks += 1
        if self.looks % RECOUNT_EVERY == 0:
            self.recount()
        return planned.decisions

    def _is_lent(self, decision: Start | AddTrainers | AddWorker) -> bool:
        if not isinstance(decision, AddWorker):
            return False
        return self.held_by(decision.job)[decision.pool] >= self.jobs[decision.job].needs.get(decision.pool, 0)

    def _apply(self, view: ClusterView, decision: Decision) -> None:
        job = self.jobs[decision.job]
        match decision:
            case Start(_, workers):
                assert not job.held and self.blocked(view, job) == ""
                assert Counter(self.workers[id].pool for id in workers) == Counter(job.needs), "all that it needs"
                assert all(self.does(id, job) for id in workers), "a worker lacks what the job needs of it"
                for id in workers:
                    self.give(id, job)
                self.begin(job)
            case AddTrainers(_, ids):
                assert job.held and self.held_by(job.id)[Pool.TRAINER] == 0, "all of them in one act"
                assert len(ids) == job.needs[Pool.TRAINER], "all of them, or none"
                for id in ids:
                    assert self.workers[id].pool == Pool.TRAINER and self.does(id, job)
                    self.give(id, job)
            case AddWorker(_, id, pool):
                assert job.held and self.workers[id].pool == pool and self.does(id, job)
                self.give(id, job)
                assert self.has[job.id][pool] <= max(job.needs[pool], job.most if pool == ROLLOUT else 0)
            case Reclaim(_, id, wanted_by):
                worker = self.workers[id]
                assert worker.lease is not None and worker.lease.job == job.id
                other = self.jobs[wanted_by]
                assert not other.held and not self.blocked(view, other)
                own = job.tenant == other.tenant  # whose quota has no room for both
                assert own or self.does(id, other), "it is of no use to who wants it"
                self.take_back(worker)
                assert self.has[job.id][worker.pool] >= job.needs[worker.pool], "more than was lent to it"
            case Preempt(_, by):
                other = self.jobs[by]
                assert job.held and not other.held and other.priority > job.priority
                assert not self.blocked(view, other), "it could not start then either"
                assert self.now - job.since >= RULES.min_run_s and self.now - other.since >= RULES.preempt_after_s
                self.back(job)
            case Requeue():
                has = self.held_by(job.id)
                lacks = any(n > has[pool] for pool, n in job.needs.items())
                assert job.held and (lacks or self._has_used_up(self.tenants[job.tenant])), "it lacks nothing"
                self.back(job)

    # --- what must hold -----------------------------------------------------------------------------------------

    def does(self, id: str, job: PlannedJob) -> bool:
        """It has what the job needs of it."""
        worker = self.workers[id]
        if (need := job.gpus.get(worker.pool)) is None:
            return True
        fit = sum(memory >= need.memory for memory in worker.gpus.memory[: need.gpus]) == need.gpus
        return fit and worker.gpus.ranks >= need.ranks

    def suffice(self, workers: Mapping[Pool, Collection[str]], job: PlannedJob) -> bool:
        if not job.gpus:
            return all(len(workers[pool]) >= n for pool, n in job.needs.items())
        return all(sum(self.does(id, job) for id in workers[pool]) >= n for pool, n in job.needs.items())

    def share(self, view: ClusterView, name: str) -> float:
        tenant = self.tenants[name]
        return max(n / max(1, len(view.alive[pool])) for pool, n in tenant.least.items()) / tenant.limits.weight

    def blocked(self, view: ClusterView, job: PlannedJob) -> str:
        if not self.suffice(view.alive, job):
            return "too few workers"
        if job.absent:
            return "no env worker"
        if view.now < job.retry_at:
            return "back-off"
        if job.unready:
            return "its last workers"
        return self._over_quota(self.tenants[job.tenant], sum(job.needs.values()))

    @staticmethod
    def _over_quota(tenant: Tenant, more: int) -> str:
        limits, held = tenant.limits, sum(tenant.least.values())
        if limits.running_jobs is not None and tenant.running >= limits.running_jobs:
            return "quota of jobs"
        if Model._has_used_up(tenant):
            return "quota of seconds"
        return "quota of workers" if limits.workers is not None and held + more > limits.workers else ""

    @staticmethod
    def _has_used_up(tenant: Tenant) -> bool:
        most = tenant.limits.worker_seconds_per_day
        return most is not None and tenant.used_s >= most

    def _check_choice(self, view: ClusterView, gaps: dict[Pool, set[str]], decision: Start) -> None:
        """What has more GPUs is left to who needs them."""
        job = self.jobs[decision.job]
        if not self.with_gpus:
            return
        for id in decision.workers:
            chosen = self.workers[id]
            left = [self.workers[other] for other in gaps[chosen.pool] - {*decision.workers} if self.does(other, job)]
            fewer = any(len(other.gpus.memory) < len(chosen.gpus.memory) for other in left)
            assert not fewer or self._is_kept(view, gaps, job), f"{job} is given {chosen}, and {left} would do"

    def _check_turn(self, view: ClusterView, gaps: dict[Pool, set[str]], decision: Start) -> None:
        """Nobody who could start with what is there had the turn before: fairness is bounded by one job."""
        job = self.jobs[decision.job]
        own = self.share(view, job.tenant)
        waited = {each.id for each in view.jobs if not each.held}
        for other in self.jobs.values():
            if other.id not in waited or other.held or other is job or not self.suffice(gaps, other):
                continue  # one that goes back to the queue with this look has its turn with the next
            if self.blocked(view, other):
                continue
            if other.tenant == job.tenant:
                first = (-other.priority, other.created) < (-job.priority, job.created)
            else:
                first = (-other.priority, self.share(view, other.tenant)) < (-job.priority, own)
            assert not first or self._is_kept(view, gaps, other), f"{other} should start before {job}"

    def _is_kept(self, view: ClusterView, gaps: dict[Pool, set[str]], wanted_by: PlannedJob) -> bool:
        """Something that this job could have may be kept for one that cannot start yet: it waits for long, or for what
        is on its way. Who needs other workers keeps none of these."""
        waiting = [job for job in self.jobs.values() if not job.held and not self.blocked(view, job)]
        if self.with_gpus:
            waiting = [job for job in waiting if job.tenant == wanted_by.tenant or self._compete(job, wanted_by, gaps)]
        coming = any(view.coming.values()) or any(
            w.busy_until > self.now or (w.lease is not None and w.lease.leaving) for w in self.workers.values()
        )
        return any(coming or self.now - job.since >= RULES.reserve_after_s for job in waiting)

    def _compete(self, one: PlannedJob, other: PlannedJob, gaps: dict[Pool, set[str]]) -> bool:
        pools = one.needs.keys() & other.needs.keys()
        return any(self.does(id, one) and self.does(id, other) for pool in pools for id in gaps[pool])

    def _check_rest(
        self, view: ClusterView, gaps: dict[Pool, set[str]], decisions: list[Decision], waiting: dict[str, str]
    ) -> None:
        for name, tenant in self.tenants.items():
            limits = tenant.limits
            assert limits.running_jobs is None or tenant.running <= limits.running_jobs
            assert limits.workers is None or tenant.held <= limits.workers, f"{name} holds {tenant.held} workers"
        gone = {decision.job for decision in decisions if isinstance(decision, Preempt | Requeue)}
        some = any(gaps.values())
        for job in self.jobs.values():
            if job.held or job.id in gone:
                continue
            assert waiting[job.id], f"{job.id} waits and does not say for what"
            # What somebody gave back in this look counts with the next.
            if some and not gone and self.suffice(gaps, job):
                stuck = not self.blocked(view, job) and not self._is_kept(view, gaps, job)
                assert not stuck, f"{job} could start: {gaps} are free"

    def drain(self) -> None:
        """Nothing more comes and nothing more breaks: whatever can start at all comes to its end."""
        for worker in self.workers.values():
            worker.alive = True
        for job in self.paused.values():
            self.queue(job)
        self.paused.clear()
        total = {pool: [id for id, worker in self.workers.items() if worker.pool == pool] for pool in POOLS}
        for id in [id for id, job in self.jobs.items() if not self.suffice(total, job)]:
            self.leave(self.jobs[id])
        for _ in range(60 * (len(self.jobs) + 1) + int(DAY_S / 10.0)):
            if not self.jobs:
                return
            self.look()
            self.pass_time(10.0)
            for worker in self.workers.values():
                if worker.lease is not None and worker.lease.leaving:
                    self.release(worker)
            whole = [job for job in self.jobs.values() if job.held and self._is_whole(job)]
            for job in whole:
                if self.now - job.since >= 30.0 and self.random.random() < 0.2:
                    self.leave(job)
        raise AssertionError(f"stuck: {self.jobs}, {self.workers}")

    def _is_whole(self, job: PlannedJob) -> bool:
        has = self.held_by(job.id)
        return all(has[pool] >= n for pool, n in job.needs.items())
