"""State of tenants and jobs during one plan (`planner.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentinker.services.scheduler.placement.gpu_matching import FreeWorkers
from opentinker.services.scheduler.placement.quotas import Used
from opentinker.services.scheduler.placement.types import LEASED, Job
from opentinker.shared.config import TenantLimits
from opentinker.shared.types.core import Pool


def _none() -> dict[Pool, int]:
    return dict.fromkeys(LEASED, 0)


def _nobody() -> dict[Pool, list[str]]:
    return {Pool.TRAINER: [], Pool.ROLLOUT: []}


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's holdings during the plan."""

    id: str
    limits: TenantLimits
    used: Used
    queue: list[Job] = field(default_factory=list)
    """By rank."""
    tried: int = 0
    """So many of them had their turn."""
    running: int = 0
    least: dict[Pool, int] = field(default_factory=_none)
    """The minimum of its jobs that have begun."""
    share: float = 0.0
    """Its share of the cluster, divided by its weight."""
    total: dict[Pool, int] = field(default_factory=_none)
    """The same with what is lent to them."""
    promised_jobs: int = 0
    """Part of its quota promised to its jobs with reservations."""
    promised_workers: int = 0


@dataclass(slots=True, eq=False)
class RunningJob:
    """A running job, and its remaining workers during the plan."""

    job: Job
    tenant: Tenant
    has: dict[Pool, int] = field(default_factory=_none)
    own: dict[Pool, list[str]] = field(default_factory=_nobody)
    """Its own workers, up to its minimum."""
    lent: list[str] = field(default_factory=list)
    """Rollout workers that it could do without."""
    goes: bool = False
    """Back to the queue."""

    def holds(self, pool: Pool) -> list[str]:
        return self.own[pool] + self.lent if pool == Pool.ROLLOUT else self.own[pool]


@dataclass(slots=True, eq=False)
class Reservation:
    """Workers reserved for a job that has waited long and cannot start soon."""

    job: Job
    free: dict[Pool, list[str]] = field(default_factory=_nobody)
    """Reserved free workers; they may be lent until then."""
    coming: dict[Pool, list[str]] = field(default_factory=_nobody)
    owed: list[str] = field(default_factory=list)
    """Rollout workers that are lent now, and would be its when they come back: they stay where they are."""
    lacks: dict[Pool, int] = field(default_factory=_none)
    """Missing beyond these."""

    def holds(self, pool: Pool) -> list[str]:
        return self.free[pool] + self.coming[pool] + (self.owed if pool == Pool.ROLLOUT else [])

    def let_go(self, given: Mapping[Pool, Sequence[str]], free: FreeWorkers, coming: FreeWorkers) -> int:
        """They are kept no longer; returns how many of them are lent."""
        lent = 0
        for pool, workers in given.items():
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
