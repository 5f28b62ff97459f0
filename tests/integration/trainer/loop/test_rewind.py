"""A trainer that goes back to the last good checkpoint when an alarm rings, and what is left when it is killed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.learners.base import SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import read_stored
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.errors import JobFailed, RestartNeeded
from opentinker.shared.types.manifest import REWIND
from opentinker.shared.types.trajectories import Group
from tests.integration.trainer.loop.trainer_jobs import JOB, Clumsy, after, events, saved_steps, train
from tests.support.factories import make_spec, not_called

STEPS, CLIFF, BATCH = 60, 31, 2


class Falling(Clumsy):
    """The reward of its policy falls off a cliff at step CLIFF, and rises again with weights that are `cured`."""

    cured = False

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        values = super().step(groups, version)
        reward = 0.1 if self.steps >= CLIFF and not self.cured else 0.8
        return values | {"reward/mean": reward, "reward/min": 0.0, "reward/max": 1.0, "zero_variance": 0.0}


class Cured(Falling):
    cured = True


async def prepare(ctx: Context, learner: type[Clumsy] = Falling, **train: Any) -> TrainerJob:
    settings = {
        "learner": "simulated",
        "steps": STEPS,
        "simulated_step_s": 0.0,
        "checkpoint_every": 5,
        "keep_checkpoints": 10,
        "rewind_on": ["reward_cliff", "non_finite"],
        **train,
    }
    plain = make_spec(algorithm__max_staleness=10).model_dump(mode="json")
    spec = read_stored({**plain, "train": settings})  # a simulated learner refuses no step, and these do
    await ctx.store.create_job(id=JOB, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(JOB, JobState.STARTING, epoch=1)
    worker = LeasedWorker(ctx, Pool.TRAINER, not_called)
    lease = Lease(job=JOB, worker=ctx.worker, incarnation=worker.info.incarnation, epoch=1, pool=Pool.TRAINER)
    return TrainerJob(worker, lease, spec, learner(spec))


def next_of(job: TrainerJob, learner: type[SimulatedLearner]) -> TrainerJob:
    found = after(job)
    found.reporter.learner = found.learner = learner(job.spec)
    return found


async def goes_back(job: TrainerJob) -> int:
    """Train until an alarm makes the job go back. Returns the step at which it rang."""
    with pytest.raises(RestartNeeded, match="goes back to step"):
        await train(job)
    return job.step


def lines_of(job: TrainerJob) -> list[dict[str, Any]]:
    return [*map(orjson.loads, (job.reporter.root.parent / "metrics.jsonl").read_bytes().splitlines())]


async def check_accounts(ctx: Context, job: TrainerJob, rewound: int) -> None:
    """Nothing was trained twice, and versions never went backwards."""
    record = await ctx.store.job(JOB)
    assert (record.state, record.step) == (JobState.SUCCEEDED, STEPS)
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert ledger.balanced and ledger.trained == STEPS * BATCH
    assert ledger.discarded.get("rewound", 0) == rewound * BATCH
    lines = lines_of(job)
    versions = [(line["epoch"], line["step"]) for line in lines]
    assert versions == sorted(set(versions))
    groups = [group for line in lines for group in line["seqs"]]
    assert len(groups) == len(set(groups)) == (STEPS + rewound) * BATCH
    assert lines[-1]["dropped/rewound"] == rewound * BATCH


async def test_a_trainer_goes_back_to_before_the_cliff_and_new_groups_are_trained(ctx: Context) -> None:
    job = await prepare(ctx)
    rang = await goes_back(job)
    assert CLIFF + 5 < rang < CLIFF + 18
    (ring,) = await events(ctx, "collapse_alarm")
    good = (ring["since"] - 1) // 5 * 5
    assert good in saved_steps(job) and max(saved_steps(job)) > good
    second = next_of(job, Cured)
    await train(second)
    (said,) = await events(ctx, "rewound")
    assert (said["from"], said["to"], said["alarm"], said["rewind"]) == (rang, good, "reward_cliff", 1)
    assert said["removed"] == [step for step in range(good + 5, rang + 1, 5)]
    first = next(line for line in lines_of(second) if line["epoch"] == 2)
    assert (first["step"], first["alarm/reward_cliff"]) == (good + 1, 0.0)
    await check_accounts(ctx, second, rang - good)
    newest = checkpoint.find_newest(second.reporter.root)
    assert newest is not None and (newest[1].epoch, newest[1].step, newest[1].rewinds) == (2, STEPS, 1)


async def test_a_trainer_that_is_killed_before_it_has_written_anything_is_followed_by_one_that_goes_back(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await prepare(ctx)

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_rewind", killed)
        with pytest.raises(RuntimeError, match="killed"):
            await train(job)
    second = next_of(job, Falling)
    rang = await goes_back(second)
    third = next_of(second, Cured)
    await train(third)
    (said,) = await events(ctx, "rewound")
    lines = [line for line in lines_of(third) if line["epoch"] < 3]
    assert said["from"] == rang and lines[-1]["step"] == rang
    record = await ctx.store.job(JOB)
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert record.state == JobState.SUCCEEDED and ledger.balanced and ledger.trained == STEPS * BATCH


async def test_a_job_that_cannot_write_where_it_goes_back_to_fails_and_keeps_its_last_step(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await prepare(ctx)

    def full(*_: object) -> None:
        raise JobFailed("the job cannot go back: No space left on device")

    monkeypatch.setattr(checkpoint, "write_rewind", full)
    with pytest.raises(JobFailed, match="No space left"):
        await train(job)
    assert job.step % 5 and max(saved_steps(job)) == job.step > CLIFF


@pytest.mark.parametrize("steps", [0, 2])
async def test_a_trainer_that_is_killed_after_it_went_back_is_followed_by_one_that_does_the_same(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Also after two steps: their groups are trained again, as those of any steps after the newest checkpoint."""
    job = await prepare(ctx)
    rang = await goes_back(job)
    second = next_of(job, Cured)
    save = second._save

    async def killed(*, last: bool = False) -> None:
        """Nothing is saved any more."""

    monkeypatch.setattr(second, "_save", killed)
    check = second.rewinder.check

    async def die(step: int) -> None:
        await check(step)
        if lines_of(second)[-1]["epoch"] == 2 or not steps:
            steps_made = sum(line["epoch"] == 2 for line in lines_of(second))
            if steps_made >= steps:
                raise RuntimeError("killed")

    monkeypatch.setattr(second.rewinder, "check", die)
    with pytest.raises(RuntimeError, match="killed"):
        await train(second)
    assert save is not None and (second.reporter.root / REWIND).exists()
    third = next_of(second, Cured)
    await train(third)
    (said,) = await events(ctx, "rewound")
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED
    assert ledger.balanced and ledger.trained == STEPS * BATCH
    assert ledger.discarded["rewound"] == (rang - said["to"]) * BATCH
    counted = [line["seqs"] for line in lines_of(third) if line["epoch"] != 2]
    groups = [group for seqs in counted for group in seqs]
    assert len(groups) == len(set(groups))


async def test_a_step_that_is_not_finite_makes_the_job_go_back_and_its_groups_are_not_tried_again(ctx: Context) -> None:
    job = await prepare(ctx, Cured)
    job.reporter.learner = job.learner = Cured(job.spec, nan_at=13)
    assert await goes_back(job) == 12
    second = next_of(job, Cured)
    await train(second)
    (said,) = await events(ctx, "rewound")
    assert (said["from"], said["to"], said["alarm"]) == (12, 10, "non_finite")
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert ledger.balanced and ledger.trained == STEPS * BATCH
    assert ledger.discarded["rewound"] == 3 * BATCH, "those of the refused step too"
    groups = [group for line in lines_of(second) for group in line["seqs"]]
    assert len(groups) == len(set(groups))


async def test_a_job_that_falls_again_and_again_fails_with_a_reason(ctx: Context) -> None:
    job = await prepare(ctx, rewinds=2)
    for _ in range(2):
        await goes_back(job)
        job = next_of(job, Falling)
    with pytest.raises(JobFailed, match=r"reward_cliff rang at step .* gone back 2 times \(train\.rewinds = 2\)"):
        await train(job)
    assert [said["rewind"] for said in await events(ctx, "rewound")] == [1, 2]


async def test_without_an_earlier_checkpoint_the_job_continues_and_says_so(ctx: Context) -> None:
    job = await prepare(ctx, checkpoint_every=50)
    await train(job)
    (said,) = await events(ctx, "not_rewound")
    assert "train.checkpoint_every" in said["problem"]
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED


async def test_an_alarm_that_is_not_named_only_rings(ctx: Context) -> None:
    job = await prepare(ctx, rewind_on=["kl"])
    await train(job)
    assert len(await events(ctx, "collapse_alarm")) == 1
    assert not await events(ctx, "rewound") and (await ctx.store.job(JOB)).state == JobState.SUCCEEDED
