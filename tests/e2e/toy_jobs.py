"""Quick and slow jobs of the simulated engine and learner, and the end of their work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentinker.services.trainer import checkpoint
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Pool
from tests.conftest import until
from tests.support.cluster import Cluster
from tests.support.factories import make_spec


def job_spec(model: Path, **changes: Any) -> JobSpec:
    """10 quick steps of 4 groups of 4."""
    quick: dict[str, Any] = {
        "algorithm": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 2},
        "train": {"learner": "simulated", "steps": 10, "simulated_step_s": 0.02, "checkpoint_every": 4},
    }
    return make_spec(model={"base": str(model)}, **{**quick, **changes})


async def free(cluster: Cluster) -> None:
    """Until no trainer and no rollout worker works for a job."""

    async def idle() -> bool:
        leased = [w for w in await cluster.store.workers() if w.pool in (Pool.TRAINER, Pool.ROLLOUT)]
        return bool(leased) and all(w.status == "idle" and w.job is None for w in leased)

    await until(idle)


def steps_of(cluster: Cluster, job: str) -> list[int]:
    """Of its checkpoints."""
    return [manifest.step for _, manifest in checkpoint.list_checkpoints(cluster.data / "jobs" / job / "checkpoints")]


def slow_spec(model: Path, **changes: Any) -> JobSpec:
    """Episodes of a fifth of a second, steps without end."""
    slow = {
        "rollout": {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.05}},
        "train": {"learner": "simulated", "steps": 10_000, "checkpoint_every": 5, "simulated_step_s": 0.05},
    }
    return job_spec(model, **{**slow, **changes})
