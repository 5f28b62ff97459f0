"""The trainer process: takes one lease at a time and trains that job."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.learners.base import SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import Lease, Pool


async def serve(ctx: Context) -> None:
    # For deterministic jobs; cuBLAS reads it with its first handle, be that an earlier job's. Ranks inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if ctx.settings.preload:
        # Before the first heartbeat: imports hold the interpreter for seconds, and a silent worker counts as dead.
        await asyncio.to_thread(_learners, 1)
    await LeasedWorker(ctx, Pool.TRAINER, work).serve()


async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    root = worker.ctx.settings.data_dir / "jobs" / lease.job / "checkpoints"
    worker.leftovers.append(checkpoint.unfinished(root, lease.epoch))
    learner = await asyncio.to_thread(make_learner, spec)
    try:
        if spec.kind == "rl":
            await TrainerJob(worker, lease, spec, learner).run()
        else:
            await SupervisedJob(worker, lease, spec, learner).run()
    finally:
        # Cancelled before a thread is free, it would never run, and other ranks would live on.
        await finish_uncancelled(asyncio.to_thread(learner.close))
        del learner
        gc.collect()


def make_learner(spec: JobSpec) -> Any:
    """A `Learner` for rl, a `RowLearner` for the others."""
    if spec.train.learner == "simulated":
        return SimulatedLearner(spec)
    return _learners(spec.resources.ranks)[spec.kind](spec, "cuda" if spec.resources.trainer_gpus else "cpu")


def _learners(ranks: int) -> dict[str, type]:
    """By kind of job. Imports torch and transformers: seconds, so it is done before the first job comes."""
    from opentinker.services.trainer.distributed.multi_rank_learner import RankedLearner, RankedRows
    from opentinker.services.trainer.distributed.rank_main import LEARNERS

    return {"rl": RankedLearner, "sft": RankedRows, "dpo": RankedRows} if ranks > 1 else LEARNERS
