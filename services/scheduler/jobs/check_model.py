"""Refuses a submitted spec whose models no worker could load, told by their config.json."""

from __future__ import annotations

from typing import Any

from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.shared.data.dry_run import is_served, loads_weights
from opentinker.shared.data.model_families import read_config, unsupported_family, unsupported_on_cpu
from opentinker.shared.durable_files import local_path
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Pool

Mistakes = list[dict[str, Any]]


async def look_at(ctx: Context, spec: JobSpec | None) -> Mistakes:
    """Check local model directories, if the whole spec is valid."""
    if spec is None or not loads_weights(spec):
        return []
    base, served = spec.model.base, is_served(spec)
    config = await on_disk(ctx, _config_of, base)
    problem = unsupported_family(config, served=served)
    if not problem and served and await _only_cpus(ctx, spec):
        problem = unsupported_on_cpu(config)
    found = [("model.base", base, problem)]
    if spec.teacher is not None:
        teacher = spec.teacher.base
        problem = unsupported_family(await on_disk(ctx, _config_of, teacher), served=False)
        found.append(("teacher.base", teacher, problem))
    return [{"field": field, "value": value, "problem": problem} for field, value, problem in found if problem]


def _config_of(base: str) -> dict[str, Any]:
    path = local_path(base)
    return {} if path is None else read_config(path)


async def _only_cpus(ctx: Context, spec: JobSpec) -> bool:
    """There are rollout workers, and none has a GPU; those that the scheduler would start may have some."""
    if ctx.settings.launcher != "none" or spec.resources.rollout_gpus:
        return False
    gpus = [worker.gpus for worker in await ctx.store.workers() if worker.pool == Pool.ROLLOUT]
    return bool(gpus) and not any(gpus)
