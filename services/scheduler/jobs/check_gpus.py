"""Refuses a submitted spec whose rollout workers need more GPUs than any of the server's has."""

from __future__ import annotations

from typing import Any

from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.train import engine_ranks
from opentinker.shared.types.core import Pool


async def check_gpus(ctx: Context, spec: JobSpec | None) -> list[dict[str, Any]]:
    """A model that is divided among GPUs stays in one rollout worker. Says nothing where one may still come: none runs,
    or the scheduler starts them."""
    if spec is None or engine_ranks(spec) <= 1 or ctx.settings.launcher != "none":
        return []
    ranks, wanted = engine_ranks(spec), spec.resources.rollout_gpus
    workers = [len(worker.gpus) for worker in await ctx.store.workers() if worker.pool == Pool.ROLLOUT]
    most = max(workers, default=0)
    if not wanted and most:
        problem = f"divides the model among GPUs here: set resources.rollout_gpus = {ranks}, which reserves them"
        return [{"field": "rollout.tensor_parallel", "value": ranks, "problem": problem}]
    if most >= wanted or not workers:
        return []
    there = f"the largest has {most}" if most else "none has any"
    advice = f"take {most} at most" if most else "take 0"
    problem = f"is more than any rollout worker here has ({there}): {advice}, or start one with more GPUs"
    return [{"field": "resources.rollout_gpus", "value": wanted, "problem": problem}]
