"""State of tenants and jobs during one plan (`planner.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentinker.services.scheduler.placement.gpu_matching import FreeWorkers
from opentinker.services.scheduler.placement.quotas import Used, over_quota
from opentinker.services.scheduler.placement.types import LEASED, AddTrainers, AddWorker, Counts, PlannedJob
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import ENDLESS, Pool

Turn = tuple[int, float, float, str, str]
"""Priority, share, age; the job and its tenant."""


def _zeros() -> dict[Pool, int]:
    return dict.fromkeys(LEASED, 0)


def _no_workers() -> dict[Pool, list[str]]:
    return {Pool.TRAINER: [], Pool.ROLLOUT: []}


@dataclass(slots=True, eq=False)
class TenantState:
    """A tenant's holdings during the plan."""

    id: str
    limits: TenantLimits
    used: Used
    size: Counts
    """Workers in the cluster."""
    queue: list[PlannedJob] = field(default_factory=list)
    """By rank."""
    tried: int = 0
    """So many of them had their turn."""
    running: int = 0
    least: dict[Pool, int] = field(default_factory=_zeros)
    """The minimum of its jobs that have begun."""
    share: float = 0.0
    """Its share of the cluster, divided by its weight."""
    total: dict[Pool, int] = field(default_factory=_zeros)
    """The same with what is lent to them."""
    promised_jobs: int = 0
    """Part of its quota promised to its jobs with reservations."""
    promised_workers: int = 0

    def share_of(self, held: Counts) -> float:
        """Return the largest part of any pool that this is, divided by the tenant's weight."""
        return max([held[pool] / max(1, self.size[pool]) for pool in LEASED]) / self.limits.weight

    @property
    def total_share(self) -> float:
        return self.share_of(self.total)

    def over_quota(self, job: PlannedJob) -> str:
        """Describe the quota that has no room for the job."""
        return over_quota(
            self.limits,
            self.used,
            jobs=self.running + self.promised_jobs,
            workers=sum(self.least.values()) + self.promised_workers,
            more=sum(job.needs.values()),
        )

    def next_turn(self) -> Turn | None:
        """Return the turn of the first job that had none yet."""
        if self.tried == len(self.queue):
            return None
        job = self.queue[self.tried]
        return -job.priority, self.share, job.created, job.id, self.id


@dataclass(slots=True, eq=False)
class RunningJob:
    """A running job, and its remaining workers during the plan."""

    job: PlannedJob
    tenant: TenantState
    has: dict[Pool, int] = field(default_factory=_zeros)
    own: dict[Pool, list[str]] = field(default_factory=_no_workers)
    """Its own workers, up to its minimum."""
    lent: list[str] = field(default_factory=list)
    """Rollout workers that it could do without."""
    requeued: bool = False
    """Back to the queue."""

    def holds(self, pool: Pool) -> list[str]:
        return self.own[pool] + self.lent if pool == Pool.ROLLOUT else self.own[pool]

    def replace_lost(self, short: Counts, free: FreeWorkers) -> list[AddTrainers | AddWorker]:
        """Take free workers for lost ones: of its trainers all or none, of its rollout workers as many as there are."""
        made: list[AddTrainers | AddWorker] = []
        for pool, n in short.items():
            if pool == Pool.TRAINER and (self.has[pool] or free.count(self.job)[pool] < n):
                continue
            found = free.take(self.job, pool, n)
            if pool == Pool.TRAINER:
                made.append(AddTrainers(self.job.id, tuple(found), self.job.ranks))
            else:
                made += [AddWorker(self.job.id, worker, pool) for worker in found]
            self.has[pool] += len(found)
            self.own[pool] += found
        return made


@dataclass(slots=True, eq=False)
class Reservation:
    """Workers reserved for a job that has waited long and cannot start soon."""

    job: PlannedJob
    free: dict[Pool, list[str]] = field(default_factory=_no_workers)
    """Reserved free workers; they may be lent until then."""
    coming: dict[Pool, list[str]] = field(default_factory=_no_workers)
    owed: list[str] = field(default_factory=list)
    """Rollout workers that are lent now, and would be its when they come back: they stay where they are."""
    lacks: dict[Pool, int] = field(default_factory=_zeros)
    """Missing beyond these."""

    def holds(self, pool: Pool) -> list[str]:
        return self.free[pool] + self.coming[pool] + (self.owed if pool == Pool.ROLLOUT else [])

    def release(self, released: Mapping[Pool, Sequence[str]], free: FreeWorkers, coming: FreeWorkers) -> int:
        """Keep these no longer; return how many of them are lent."""
        lent = 0
        for pool, workers in released.items():
            self.lacks[pool] += len(workers)
            for worker in workers:
                for place, stock in ((self.free[pool], free), (self.coming[pool], coming)):
                    if worker in place:
                        place.remove(worker)
                        stock.put(pool, worker)
                        break
                else:
                    self.owed.remove(worker)
                    lent += 1
        return lent


def with_end(processes: Iterable[list[str]], begun: Iterable[RunningJob], job: PlannedJob) -> list[list[str]]:
    """Return those of `FreeWorkers.processes` in which enough places become free without an interruption."""
    endless = [one for one in begun if one.job.kind in ENDLESS and not one.requeued]
    kept = {worker for one in endless for worker in one.own[Pool.TRAINER]}
    return [one for one in processes if not one or len({*one} - kept) >= job.needs[Pool.TRAINER]]
