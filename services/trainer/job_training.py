"""Trains a job with a learner for each of its policies, in a trainer alone or in a shared one."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Mapping
from typing import Any

from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import Lease


async def train(worker: LeasedWorker, lease: Lease, spec: JobSpec, learners: Mapping[str, Any]) -> None:
    """`learners`: by policy; of a job with one policy, under the empty name."""
    if spec.kind != "rl":
        await SupervisedJob(worker, lease, spec, learners[""]).run()
        return
    joint = JointProgress.of(spec)
    own = [(spec_of(spec, policy), learner, policy) for policy, learner in learners.items()]
    await train_all([TrainerJob(worker, lease, *one, joint) for one in own])


async def train_all(jobs: list[TrainerJob]) -> None:
    """Train every policy of a job until all have ended. One that fails ends the others, which save what they have."""
    running = [asyncio.create_task(job.run()) for job in jobs]
    first: set[asyncio.Task[None]] = set()
    try:
        first, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_and_wait(*running)
    for task in sorted(running, key=lambda task: task not in first):  # what went wrong in the others came of that
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def release_memory() -> None:
    """Give the memory of a job back, on the GPU too, where torch would keep it for later tensors."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


async def close(learner: Any) -> None:
    """Close without being cancellable: if it were cancelled before a thread is free, other ranks would keep running."""
    await finish_uncancelled(asyncio.to_thread(learner.close))
