"""A cluster on a fake clock: jobs and workers that do what random events say. What must hold then: placement/model.py.

What a job and a tenant hold is kept as it changes; `recount` counts it anew, from the leases.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from opentinker.services.scheduler.placement.quotas import Used
from opentinker.services.scheduler.placement.types import NO_GPUS, ClusterView, Gpus, Held, Need, PlannedJob, Rules
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Pool

TRAINER, ROLLOUT = Pool.TRAINER, Pool.ROLLOUT
POOLS = (TRAINER, ROLLOUT)
RULES = Rules(reserve_after_s=120.0, preempt_after_s=5.0, min_run_s=60.0, gang_s=15.0)
LIMITS = {
    "a": TenantLimits(weight=2.0, running_jobs=3),
    "b": TenantLimits(workers=5),
    "*": TenantLimits(running_jobs=4, workers=8, worker_seconds_per_day=4500),
}
DAY_S = 3000.0
KINDS = (
    ({TRAINER: 1, ROLLOUT: 1}, 1),
    ({TRAINER: 1, ROLLOUT: 1}, 3),
    ({TRAINER: 1, ROLLOUT: 2}, 4),
    ({TRAINER: 1, ROLLOUT: 4}, 4),
    ({TRAINER: 1}, 0),
    ({TRAINER: 2, ROLLOUT: 1}, 1),
    ({TRAINER: 3}, 0),
    ({ROLLOUT: 1}, 2),
)
"""What a job needs, and how many rollout workers it may have. Those that need both need env workers too."""
GPUS = (NO_GPUS, NO_GPUS, Gpus((40,)), Gpus((80,)), Gpus((80, 80), linked=2), Gpus((40,) * 4, near=2))
"""What a worker may have, in a cluster with GPUs."""
NEEDS = (None, None, Need(1), Need(1, 80), Need(2), Need(2, 80))
"""What a job may need of each worker of a pool there."""
EVENTS = (
    *("submit",) * 6,
    *("finish",) * 4,
    *("cancel", "crash", "crash", "revive", "revive", "expire", "pause", "resume", "lack"),
)
MOST_JOBS = 14


@dataclass(slots=True)
class Worker:
    id: str
    pool: Pool
    gpus: Gpus = NO_GPUS
    alive: bool = True
    lease: Held | None = None
    busy_until: float = 0.0
    """It has not let go of its last job before."""


@dataclass(slots=True)
class Tenant:
    limits: TenantLimits
    running: int = 0
    least: dict[Pool, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    """The minimum of its jobs that have begun."""
    held: int = 0
    """Workers of its jobs, without those that are being taken back."""
    leases: int = 0
    """With them."""
    used_s: float = 0.0
    """Seconds of leases of this day."""


class Cluster:
    """`pools`: how many workers of each; else it is chosen by chance, one at least."""

    def __init__(
        self,
        random: random.Random,
        pools: Mapping[Pool, int] | None = None,
        limits: Mapping[str, TenantLimits] = LIMITS,
        tenants: Sequence[str] = "abc",
        *,
        with_gpus: bool = False,
    ) -> None:
        self.random, self.limits, self.now = random, limits, 1e6
        self.jobs: dict[str, PlannedJob] = {}
        self.paused: dict[str, PlannedJob] = {}
        pools = pools or {TRAINER: random.randint(1, 4), ROLLOUT: random.randint(1, 6)}
        ids = sorted((f"{pool}-{n}", pool) for pool, count in pools.items() for n in range(count))
        self.with_gpus = with_gpus
        self.workers = {id: Worker(id, pool, random.choice(GPUS) if with_gpus else NO_GPUS) for id, pool in ids}
        self.tenants = {name: Tenant(limits.get(name) or limits["*"]) for name in tenants}
        self.has: dict[str, dict[Pool, int]] = {}
        """By job that has begun, workers that are not being taken back."""
        self.saving: dict[str, float] = {}
        """Jobs that came back to the queue: until when their last workers save what they have."""
        self.lacking_until = 0.0
        """Nobody runs env workers."""
        self.made = 0
        self.counts: Counter[str] = Counter()
        """What happened."""

    # --- what happens -------------------------------------------------------------------------------------------

    def event(self) -> None:
        self.pass_time(self.random.expovariate(0.2))
        name = self.random.choice(EVENTS)
        self.counts[name] += 1
        getattr(self, f"_{name}")()
        for worker in self.workers.values():
            if worker.lease is not None and worker.lease.leaving and self.random.random() < 0.5:
                self.release(worker)

    def pass_time(self, seconds: float) -> None:
        day = self.now // DAY_S
        self.now += seconds
        for tenant in self.tenants.values():
            tenant.used_s = tenant.used_s + tenant.leases * seconds if self.now // DAY_S == day else 0.0
        for id, until in list(self.saving.items()):
            if self.now >= until:
                del self.saving[id]
                if id in self.jobs:
                    self._change(id, unready="")
        if self.lacking_until and self.now >= self.lacking_until:
            self.lacking_until = 0.0
            self._say_absent()

    def _one(self, held: bool | None = None) -> PlannedJob | None:
        found = [job for job in self.jobs.values() if held is None or job.held == held]
        return self.random.choice(found) if found else None

    def _submit(self) -> None:
        if len(self.jobs) + len(self.paused) < MOST_JOBS:
            needs, most = self.random.choice(KINDS)
            priority = self.random.choice((-1, 0, 0, 0, 2))
            tenant, chosen = self.random.choice(list(self.tenants)), dict[Pool, Need]()
            if self.with_gpus:
                chosen = {pool: need for pool in needs if (need := self.random.choice(NEEDS)) is not None}
            self.submit(tenant, needs, most, priority, chosen)

    def submit(
        self,
        tenant: str,
        needs: Mapping[Pool, int],
        most: int,
        priority: int = 0,
        gpus: Mapping[Pool, Need] | None = None,
    ) -> None:
        self.made += 1
        id = f"j{self.made}"
        self.jobs[id] = PlannedJob(
            id=id, tenant=tenant, priority=priority, created=self.now, since=self.now, needs=needs, most=most,
            absent=self._absent(needs), gpus=gpus or {},
        )  # fmt: skip

    def _finish(self) -> None:
        self.leave(self._one(held=True))

    def _cancel(self) -> None:
        self.leave(self._one())

    def leave(self, job: PlannedJob | None) -> None:
        if job is not None:
            if job.held:
                self._stop(job)
            del self.jobs[job.id]

    def _crash(self) -> None:
        """With its heartbeat its lease expires."""
        worker = self.random.choice(list(self.workers.values()))
        worker.alive, worker.busy_until = False, 0.0
        self._lose(worker)

    def _expire(self) -> None:
        """The lease alone: its worker lives, and has not let go."""
        leased = [worker for worker in self.workers.values() if worker.lease]
        if leased:
            worker = self.random.choice(leased)
            worker.busy_until = self.now + 20.0
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        if worker.lease is not None:
            if not worker.lease.leaving:
                pause_s = self.random.choice((0.0, 2.0, 30.0))
                self._change(worker.lease.job, lost_at=self.now, retry_at=self.now + pause_s)
            lease = worker.lease
            self._end_lease(worker)
            if worker.pool == TRAINER and not lease.leaving:
                self._lose_group(lease.job)

    def _lose_group(self, job: str) -> None:
        """Trainers that share ranks are lost together; the others let go after a while."""
        for other in self.workers.values():
            if other.pool == TRAINER and other.lease is not None and other.lease.job == job:
                self._end_lease(other)
                other.busy_until = self.now + 5.0

    def _revive(self) -> None:
        for worker in self.workers.values():
            if not worker.alive:
                worker.alive = True
                return

    def _pause(self) -> None:
        job = self._one()
        if job is not None:
            self.leave(job)
            self.paused[job.id] = job

    def _resume(self) -> None:
        if self.paused:
            self.queue(self.paused.pop(self.random.choice(list(self.paused))))

    def _lack(self) -> None:
        """No env worker for a while."""
        self.lacking_until = self.now + 20.0
        self._say_absent()

    def _say_absent(self) -> None:
        for job in list(self.jobs.values()):
            self._change(job.id, absent=self._absent(job.needs))

    def _absent(self, needs: Mapping[Pool, int]) -> str:
        return "env worker" if self.lacking_until and len(needs) > 1 else ""

    # --- what jobs and tenants hold -----------------------------------------------------------------------------

    def _change(self, id: str, **changes: object) -> None:
        self.jobs[id] = replace(self.jobs[id], **changes)

    def begin(self, job: PlannedJob) -> None:
        self._change(job.id, held=True, since=self.now)
        tenant = self.tenants[job.tenant]
        tenant.running += 1
        for pool, n in job.needs.items():
            tenant.least[pool] += n

    def _stop(self, job: PlannedJob) -> None:
        """Of one that has begun."""
        for worker in self.workers.values():
            if worker.lease is not None and worker.lease.job == job.id:
                self.release(worker)
        self.has.pop(job.id, None)
        tenant = self.tenants[job.tenant]
        tenant.running -= 1
        for pool, n in job.needs.items():
            tenant.least[pool] -= n

    def queue(self, job: PlannedJob) -> None:
        unready = "its last workers" if job.id in self.saving else ""
        self.jobs[job.id] = replace(job, held=False, since=self.now, unready=unready, absent=self._absent(job.needs))

    def back(self, job: PlannedJob) -> None:
        own = [worker for worker in self.workers.values() if worker.lease is not None and worker.lease.job == job.id]
        self._stop(job)
        until = max((worker.busy_until for worker in own), default=0.0)
        if until > self.now:
            self.saving[job.id] = until
        self.queue(job)

    def held_by(self, job: str) -> dict[Pool, int]:
        return self.has.get(job) or dict.fromkeys(POOLS, 0)

    def give(self, id: str, job: PlannedJob) -> None:
        worker = self.workers[id]
        assert self.is_free(worker), f"{id} is given to {job.id} and not free: {worker}"
        worker.lease = Held(id, job.id, worker.pool)
        self.has.setdefault(job.id, dict.fromkeys(POOLS, 0))[worker.pool] += 1
        self.tenants[job.tenant].held += 1
        self.tenants[job.tenant].leases += 1

    def take_back(self, worker: Worker) -> None:
        assert worker.lease is not None and not worker.lease.leaving
        worker.lease = replace(worker.lease, leaving=True)
        self.has[worker.lease.job][worker.pool] -= 1
        self.tenants[self.jobs[worker.lease.job].tenant].held -= 1

    def _end_lease(self, worker: Worker) -> None:
        lease, worker.lease = worker.lease, None
        assert lease is not None
        tenant = self.tenants[self.jobs[lease.job].tenant]
        tenant.leases -= 1
        if not lease.leaving:
            self.has[lease.job][worker.pool] -= 1
            tenant.held -= 1

    def release(self, worker: Worker) -> None:
        self._end_lease(worker)
        worker.busy_until = self.now + self.random.choice((0.0, 1.0, 10.0))

    def recount(self) -> None:
        """From the leases alone: no worker twice, and what is kept is right."""
        leases = [worker.lease for worker in self.workers.values() if worker.lease is not None]
        for name, tenant in self.tenants.items():
            own = {id: job for id, job in self.jobs.items() if job.tenant == name}
            begun = [job for job in own.values() if job.held]
            held = [lease for lease in leases if lease.job in own]
            assert all(own[lease.job].held for lease in held), "a lease of a job that has not begun"
            assert tenant.running == len(begun) and tenant.leases == len(held)
            assert tenant.held == sum(not lease.leaving for lease in held)
            assert tenant.least == {pool: sum(job.needs.get(pool, 0) for job in begun) for pool in POOLS}
            for job in begun:
                mine = Counter(lease.pool for lease in held if lease.job == job.id and not lease.leaving)
                assert self.held_by(job.id) == {pool: mine[pool] for pool in POOLS}
        assert all(lease.job in self.jobs for lease in leases), "a lease of a job that is over"

    # --- what the planner sees -----------------------------------------------------------------------------------

    def is_free(self, worker: Worker) -> bool:
        return worker.alive and worker.lease is None and worker.busy_until <= self.now

    def view(self) -> ClusterView:
        free: dict[Pool, list[str]] = {TRAINER: [], ROLLOUT: []}
        alive: dict[Pool, list[str]] = {TRAINER: [], ROLLOUT: []}
        coming: dict[Pool, list[str]] = {TRAINER: [], ROLLOUT: []}
        leases = []
        for id, worker in self.workers.items():
            if worker.alive:
                alive[worker.pool].append(id)
            if worker.lease is not None:
                leases.append(worker.lease)
            elif self.is_free(worker):
                free[worker.pool].append(id)
            elif worker.alive:
                coming[worker.pool].append(id)
        return ClusterView(
            now=self.now,
            jobs=list(self.jobs.values()),
            free=free,
            alive=alive,
            coming=coming,
            gpus={id: worker.gpus for id, worker in self.workers.items() if worker.gpus != NO_GPUS},
            leases=leases,
            limits=self.limits,
            used={name: Used(worker_s=one.used_s) for name, one in self.tenants.items() if one.limits.by_time},
            rules=RULES,
        )
