"""Two policies that train on the same matches and save at different steps: whenever the trainer is killed, both would
resume from checkpoints that fit each other and are not far behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.trainer.checkpoint import list_checkpoints
from opentinker.services.trainer.job_training import train_all
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.services.trainer.policy_checkpoints import recovery_line
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.trajectories import Group
from tests.conftest import soon
from tests.integration.trainer.loop.trainer_jobs import JOB, Clumsy
from tests.support.factories import group_of, make_spec, make_trajectory, not_called
from tests.support.scheduling import running

STEPS = 16
SEATS = {"speaker": "often", "listener": "rarely"}


class Watched(Clumsy):
    """Notes before each step what a kill would cost now."""

    def __init__(self, spec: JobSpec, name: str, pair: Pair) -> None:
        super().__init__(spec)
        self.name, self.pair = name, pair

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        self.pair.look(self.name, self.steps)
        if self.name == "rarely" and self.steps == STEPS - 1:  # the other one is to finish first
            often = self.pair.roots["often"]
            end = time.monotonic() + 20.0
            while not any(one.step == STEPS for _, one in list_checkpoints(often)):
                assert time.monotonic() < end
                time.sleep(0.01)
        return super().step(groups, version)


class Pair:
    """Both policies in one trainer."""

    def __init__(self, ctx: Context, spec: JobSpec) -> None:
        worker = LeasedWorker(ctx, Pool.TRAINER, not_called)
        lease = Lease(job=JOB, worker=ctx.worker, incarnation=worker.info.incarnation, epoch=1, pool=Pool.TRAINER)
        joint = JointProgress.of(spec)
        self.jobs = {}
        for name in spec.policies:
            own = spec_of(spec, name)
            self.jobs[name] = TrainerJob(worker, lease, own, Watched(own, name, self), name, joint)
        self.roots: dict[str, Path] = {name: job.reporter.root for name, job in self.jobs.items()}
        self.lost: dict[str, list[int]] = {name: [] for name in spec.policies}
        """Steps that a kill before each step of a policy would undo."""

    def look(self, name: str, step: int) -> None:
        line = recovery_line(self.roots)
        assert not line.pinned, "each could go back as far as it must"
        found = line.found[self.roots[name]]
        self.lost[name].append(step - (0 if found is None else found[1].step))

    async def play(self) -> None:
        """As rollout workers do: room becomes matches, with the newest weights of both."""
        redis = next(iter(self.jobs.values())).ctx.store.redis
        while True:
            for name, job in self.jobs.items():
                await Admission(redis, JOB, policies=list(self.jobs), policy=name).set_version(job.step)
            _, seqs = await Admission(redis, JOB, policies=list(self.jobs)).issue(8)
            for seq in seqs:
                await self.deliver(seq)
            await asyncio.sleep(0.01)

    async def deliver(self, seq: int) -> None:
        played = [
            make_trajectory(index=index, seat=seat, policy=name, versions=[WeightVersion(1, self.jobs[name].step)])
            for index in range(2)
            for seat, name in SEATS.items()
        ]
        ctx = next(iter(self.jobs.values())).ctx
        group = group_of(played, seq, JOB)
        await ctx.bus.publish(GROUP, group, f"{group.key}:{id(self)}", job=JOB)


async def prepare(ctx: Context, **rarely: Any) -> Pair:
    spec = make_spec(
        environment={"name": "signalling"},
        algorithm={"group_size": 2, "groups_per_batch": 2, "max_staleness": 4},
        train={"learner": "simulated", "steps": STEPS, "simulated_step_s": 0.01, "checkpoint_every": 1},
        policies={"often": {}, "rarely": {"train": {"checkpoint_every": 1000, "simulated_step_s": 0.05, **rarely}}},
        seats=SEATS,
    )
    await ctx.store.create_job(id=JOB, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(JOB, JobState.STARTING, epoch=1)
    await ctx.bus.purge("GROUPS", GROUP.at(job=JOB))
    return Pair(ctx, spec)


async def test_a_kill_costs_few_steps_though_the_other_policy_never_saves_by_itself(ctx: Context) -> None:
    pair = await prepare(ctx)
    async with running(pair.play()):
        await soon(train_all(list(pair.jobs.values())))
    lost = pair.lost["often"]
    assert len(lost) == STEPS and max(lost) <= 3, str(lost)


async def test_a_policy_that_has_finished_is_not_made_to_go_back(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await prepare(ctx)
    joint, ended = pair.jobs["often"].joint, []

    def cover(policy: str) -> None:
        found = recovery_line(pair.roots).found[pair.roots[policy]]
        ended.append((policy, 0 if found is None else found[1].step))

    monkeypatch.setattr(joint, "cover", cover)
    async with running(pair.play()):
        await soon(train_all(list(pair.jobs.values())))
    assert sorted(ended) == [("often", STEPS), ("rarely", STEPS)]
