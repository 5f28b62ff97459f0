"""Jobs on a cluster at one moment, and the plan for them."""

from __future__ import annotations

from typing import Any

from opentinker.services.scheduler.placement.planner import plan
from opentinker.services.scheduler.placement.types import ClusterView, Held, PlacementPlan, PlannedJob, Start
from opentinker.shared.types.core import Pool

TRAINER, ROLLOUT = Pool.TRAINER, Pool.ROLLOUT
NOW = 1e6


def job(id: str, **changes: Any) -> PlannedJob:
    fields: dict[str, Any] = {"tenant": "t", "priority": 0, "created": NOW - 10, "since": NOW - 10, "most": 1}
    return PlannedJob(id=id, **{**fields, "needs": {TRAINER: 1, ROLLOUT: 1}, **changes})


def held(id: str, *workers: str, **changes: Any) -> tuple[PlannedJob, list[Held]]:
    """A job that has begun an hour ago, and its leases."""
    leases = [Held(worker, id, Pool(worker.split("-")[0])) for worker in workers]
    return job(id, held=True, **{"since": NOW - 3600, "created": NOW - 3600, **changes}), leases


def planned(
    *jobs: PlannedJob | tuple[PlannedJob, list[Held]], trainers: int = 0, rollouts: int = 0, **view: Any
) -> PlacementPlan:
    """`trainers`, `rollouts`: in all; those that nobody holds are free."""
    leases = [lease for one in jobs if isinstance(one, tuple) for lease in one[1]]
    taken = {lease.worker for lease in leases}
    ids = {TRAINER: [f"trainer-{i}" for i in range(trainers)], ROLLOUT: [f"rollout-{i}" for i in range(rollouts)]}
    fields: dict[str, Any] = {
        "now": NOW,
        "jobs": [one[0] if isinstance(one, tuple) else one for one in jobs],
        "free": {pool: [id for id in found if id not in taken] for pool, found in ids.items()},
        "alive": ids,
        "leases": leases,
    }
    return plan(ClusterView(**(fields | view)))


def started(found: PlacementPlan) -> list[str]:
    return [decision.job for decision in found.decisions if isinstance(decision, Start)]
