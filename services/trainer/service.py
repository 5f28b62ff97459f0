"""Trainer process: holds one lease at a time and trains that job, or with `bank_jobs` several that share a base."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from typing import Any

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.distributed.member_ranks import host_ranks
from opentinker.services.trainer.distributed.rank_connections import RankLost
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.services.trainer.distributed.trainer_group import formed, spec_of_group
from opentinker.services.trainer.job_training import close, release_memory, train
from opentinker.services.trainer.learners.base import SimulatedLearner, device_of
from opentinker.services.trainer.shared_service import serve_shared
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import Lease, Pool, parts_of
from opentinker.shared.types.errors import Conflict, Fenced, NotFound


async def serve(ctx: Context) -> None:
    # For deterministic jobs; cuBLAS reads it with its first handle, even one of an earlier job. Ranks inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if ctx.settings.preload and not ctx.settings.bank_jobs:
        # Before the first heartbeat: imports block the interpreter for seconds, and a silent worker counts as dead.
        await asyncio.to_thread(_learners, 1)
    if ctx.settings.bank_jobs:
        await serve_shared(ctx)
    else:
        await LeasedWorker(ctx, Pool.TRAINER, work).serve()


async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    if not lease.leads:
        await host_ranks(worker, lease)
        return
    try:
        async with formed(worker.ctx, lease) as listener:
            await _train(worker, lease, spec, listener)
    except RankLost as error:
        with suppress(Conflict, Fenced, NotFound):  # the job is over, or another epoch's
            detail = {"why": error.why, **({"worker": error.worker} if error.worker else {})}
            await worker.ctx.store.update(lease.job, epoch=lease.epoch, event="rank_lost", detail=detail)
        raise


async def _train(worker: LeasedWorker, lease: Lease, spec: JobSpec, listener: RankListener | None) -> None:
    for part in parts_of(lease.job, list(spec.policies)):
        root = worker.ctx.settings.data_dir / "jobs" / part / "checkpoints"
        worker.leftovers.append(checkpoint.orphan_pattern(root, lease.epoch))
    async with AsyncExitStack() as held:
        held.callback(release_memory)
        learners = {}
        for policy in spec.policies or ("",):
            own = spec_of_group(spec_of(spec, policy), lease)
            learners[policy] = await asyncio.to_thread(make_learner, own, listener)
            held.push_async_callback(close, learners[policy])
        await train(worker, lease, spec, learners)


def make_learner(spec: JobSpec, listener: RankListener | None = None) -> Any:
    """Return a `Learner` for rl, a `RowLearner` for the other kinds. `listener`: for ranks of other trainers."""
    if spec.train.learner == "simulated":
        return SimulatedLearner(spec)
    kind, device = _learners(spec.resources.ranks)[spec.kind], device_of(spec)
    return kind(spec, device) if listener is None else kind(spec, device, listener)


def _learners(ranks: int) -> dict[str, type]:
    """Return learner classes by kind of job. Imports torch and transformers, which takes seconds: see `preload`."""
    from opentinker.services.trainer.distributed.multi_rank_learner import MultiRankRlLearner, MultiRankRowLearner
    from opentinker.services.trainer.distributed.rank_main import LEARNERS

    return {"rl": MultiRankRlLearner, "sft": MultiRankRowLearner, "dpo": MultiRankRowLearner} if ranks > 1 else LEARNERS
