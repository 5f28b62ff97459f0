"""Decides for a job with `resources.trainer = "auto"` whether its trainer is shared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from opentinker.services.scheduler.jobs import check_model
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.services.scheduler.placement.shared_bases import shared_bases
from opentinker.shared.data.model_families import VISION_FAMILIES
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.engines import bank_name, may_share, trained_models


async def choose_trainer(ctx: Context, spec: JobSpec, plain: Mapping[str, Any]) -> str:
    """Return `shared` or `own`. `plain`: the spec with resolved paths.

    Shared, if the job can share a trainer, and a shared one with free places for its policies trains their base; or
    trains nothing, and the base is a local model that is known to go there.
    """
    if spec.resources.trainer != "auto":
        return spec.resources.trainer
    banks = [worker for worker in await ctx.store.workers() if worker.bank]
    workers = [worker for worker in banks if worker.gpus or not spec.resources.trainer_gpus]
    if not workers or not may_share(spec):
        return "own"
    leases = await ctx.store.leases()
    waits_since = time.time() - ctx.settings.queue_reserve_after_s
    bases, kept = shared_bases(workers, leases, await ctx.store.active_jobs(), waits_since)
    taken = {lease.worker for lease in leases} | {worker.id for worker in workers if worker.job is not None} | kept
    places = Counter((worker.bank, bases[worker.id]) for worker in workers if worker.id not in taken)
    free = {base for (_, base), count in places.items() if count >= max(1, len(spec.policies))}
    config = await on_disk(ctx, check_model.config_of, trained_models(plain)[0]["base"])
    fits_empty = bool(config) and config.get("model_type") not in VISION_FAMILIES
    return "shared" if bank_name(plain) in free or ("" in free and fits_empty) else "own"
