"""The trainer process: takes one lease at a time and trains that job."""

from __future__ import annotations

import asyncio
import gc

from opentinker.services.trainer.learner import Learner, SimulatedLearner
from opentinker.services.trainer.loop import TrainerJob
from opentinker.shared.leasing import LeasedWorker
from opentinker.shared.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Lease, Pool


async def serve(ctx: Context) -> None:
    if ctx.settings.preload:
        # Before the first heartbeat: imports hold the interpreter for seconds, and a silent worker counts as dead.
        await asyncio.to_thread(_learner, 1)
    await LeasedWorker(ctx, Pool.TRAINER, work).serve()


async def work(worker: LeasedWorker, lease: Lease, spec: JobSpec) -> None:
    learner = await asyncio.to_thread(make_learner, spec)
    try:
        await TrainerJob(worker, lease, spec, learner).run()
    finally:
        await asyncio.to_thread(learner.close)
        del learner
        gc.collect()


def make_learner(spec: JobSpec) -> Learner:
    if spec.train.learner == "simulated":
        return SimulatedLearner(spec)
    learner: Learner = _learner(spec.resources.ranks)(spec, "cuda" if spec.resources.trainer_gpus else "cpu")
    return learner


def _learner(ranks: int) -> type:
    """Imports torch and transformers: seconds, so it is done before the first job comes."""
    from opentinker.services.trainer.ranked_learner import RankedLearner
    from opentinker.services.trainer.torch_learner import TorchLearner

    return RankedLearner if ranks > 1 else TorchLearner
