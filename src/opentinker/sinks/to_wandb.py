"""A run of Weights & Biases under the job's id: sending a job a second time continues the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = "step"
"""The axis: points of several sources share steps, and W&B's own step only grows."""


class WandB:
    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({**values, STEP: step, "_timestamp": time})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("succeeded", "running") else 1)


def open_sink(where: str, job: Mapping[str, Any]) -> WandB:
    import wandb

    entity, _, project = where.rpartition("/")
    return WandB(
        wandb.init(
            entity=entity or None,
            project=project,
            id=job["id"],
            name=job["name"],
            config=dict(job.get("spec") or {}),
            resume="allow",
        )
    )
