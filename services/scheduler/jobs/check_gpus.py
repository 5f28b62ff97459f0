"""Refuses a submitted spec whose rollout workers need more GPUs than any machine of the server has."""

from __future__ import annotations

from typing import Any

from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Pool


async def check_gpus(ctx: Context, spec: JobSpec | None) -> list[dict[str, Any]]:
    """A model that is divided among GPUs stays on one machine. Says nothing where rollout workers may still come: none
    runs, or the scheduler starts them."""
    wanted = 0 if spec is None else spec.resources.rollout_gpus
    if wanted <= 1 or ctx.settings.launcher != "none":
        return []
    workers = await ctx.store.workers()
    found: dict[str, set[str]] = {}
    for worker in workers:
        found.setdefault(worker.machine or worker.host, set()).update(gpu.uuid for gpu in worker.gpus)
    most = max(map(len, found.values()), default=0)
    if most >= wanted or not any(worker.pool == Pool.ROLLOUT for worker in workers):
        return []
    there = f"the largest has {most}" if most else "none has any"
    advice = f"take {most} at most" if most else "take 0"
    problem = f"is more than any machine here has ({there}): {advice}, or start a rollout worker on a larger machine"
    return [{"field": "resources.rollout_gpus", "value": wanted, "problem": problem}]
