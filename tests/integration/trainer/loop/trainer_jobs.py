"""A trainer's job of this process, and groups for it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.learners.base import NonFinite, SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.asyncio_tools import finish_uncancelled
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.trajectories import Group
from tests.conftest import soon
from tests.support.factories import make_group, make_spec, not_called
from tests.support.scheduling import running

JOB = "j-loop"


class Clumsy(SimulatedLearner):
    """Refuses steps as NaN and saves as a full disk would, where it is told to."""

    def __init__(self, spec: JobSpec, *, nan_at: int = 0, full_at: tuple[int, ...] = ()) -> None:
        super().__init__(spec)
        self.nan_at, self.full_at = nan_at, full_at

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        if self.steps + 1 == self.nan_at:
            raise NonFinite("the loss is nan")
        return super().step(groups, version)

    def save(self, directory: Path) -> None:
        super().save(directory)
        if self.steps in self.full_at:
            raise OSError(errno.ENOSPC, "No space left on device")


async def prepare(
    ctx: Context,
    target: str = "",
    steps: int = 6,
    start: dict[str, Any] | None = None,
    staleness: int = 10,
    parts: dict[str, Any] | None = None,
    **faults: Any,
) -> TrainerJob:
    """6 steps of 2 groups, a checkpoint after every second one. `parts`: others of the spec."""
    train = {"learner": "simulated", "steps": steps, "simulated_step_s": 0.0, "checkpoint_every": 2}
    train |= {"target": {target: 0.5}} if target else {}
    spec = make_spec(algorithm__max_staleness=staleness, train=train, start=start, **(parts or {}))
    await ctx.store.create_job(id=JOB, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(JOB, JobState.STARTING, epoch=1)
    await ctx.bus.purge("GROUPS", GROUP.at(job=JOB))
    worker = LeasedWorker(ctx, Pool.TRAINER, not_called)
    lease = Lease(job=JOB, worker=ctx.worker, incarnation=worker.info.incarnation, epoch=1, pool=Pool.TRAINER)
    return TrainerJob(worker, lease, spec, Clumsy(spec, **faults))


def after(job: TrainerJob) -> TrainerJob:
    """The same job in the hands of the next trainer."""
    lease = msgspec.structs.replace(job.lease, epoch=job.lease.epoch + 1)
    return TrainerJob(job.worker, lease, job.spec, Clumsy(job.spec))


async def train(job: TrainerJob, **changes: Any) -> None:
    """Until its end, on groups with these changes; raises what it raises."""
    async with running(feed(job, **changes)):
        await soon(job.run())


async def fails(job: TrainerJob, match: str) -> None:
    with pytest.raises(JobFailed, match=match):
        await train(job)


async def feed(job: TrainerJob, **changes: Any) -> None:
    """As rollout workers do: room becomes groups, and none is lost when a worker is stopped."""
    while True:
        await finish_uncancelled(_feed(job, **changes))
        await asyncio.sleep(0.02)


async def deliver(job: TrainerJob, seq: int, version: WeightVersion, **changes: Any) -> None:
    """A group of this version, once for every trainer: the tests share a server, which drops what it saw before."""
    group = make_group(job=JOB, seq=seq, versions=[version], **changes)
    unique = f"{group.key}:{job.worker.info.incarnation}.{job.lease.epoch}"
    await job.ctx.bus.publish(GROUP, group, unique, job=JOB)


async def _feed(job: TrainerJob, **changes: Any) -> None:
    admission = Admission(job.ctx.store.redis, JOB)
    await admission.set_version(job.step)
    version, seqs = await admission.issue(100)
    for seq in seqs:
        await deliver(job, seq, version, **changes)


def newest(job: TrainerJob) -> Manifest:
    found = checkpoint.find_newest(job.reporter.root)
    assert found is not None
    return found[1]


def saved_steps(job: TrainerJob) -> list[int]:
    return [manifest.step for _, manifest in checkpoint.list_checkpoints(job.reporter.root)]


async def events(ctx: Context, kind: str) -> list[dict[str, Any]]:
    return [event for event in await ctx.store.events(JOB) if event["event"] == kind]


def steps_of(path: Path) -> list[int]:
    return [orjson.loads(line)["step"] for line in path.read_bytes().splitlines()]
