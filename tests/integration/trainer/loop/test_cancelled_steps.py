"""A trainer that is cancelled or fails during a step: what is kept, and what the next trainer makes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.subjects import METRIC, METRICS
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import JobState, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group
from tests.conftest import WAIT_S, soon, until
from tests.integration.trainer.loop.trainer_jobs import (
    JOB,
    Clumsy,
    after,
    fails,
    feed,
    newest,
    prepare,
    steps_of,
    train,
)
from tests.support.scheduling import running


async def test_cancel_keeps_a_computed_step(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await prepare(ctx)
    await cancel_in_third_step(job, monkeypatch)
    saved = newest(job)
    assert (saved.step, saved.version, saved.ledger["trained"]) == (3, WeightVersion(1, 3), 6)
    assert (await ctx.store.job(JOB)).state != JobState.SUCCEEDED


async def test_lost_points_are_sent_by_the_next_trainer(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await prepare(ctx, staleness=0)
    await cancel_in_third_step(job, monkeypatch)
    assert METRICS.name is not None
    await ctx.bus.js.delete_stream(METRICS.name)  # a purged one would take what comes again for a repetition
    await ctx.bus.ensure_streams()
    await goes_on(ctx, job)
    points = [point for _, point in await ctx.bus.history(METRIC, 0, 100, job=JOB, source="trainer")]
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
    lines = [orjson.loads(line) for line in (job.reporter.root.parent / "metrics.jsonl").read_bytes().splitlines()]
    assert [[point.incarnation, point.seq] for point in points] == [line["point"] for line in lines]
    assert all(point.values.items() <= line.items() for point, line in zip(points, lines, strict=True))


async def test_cancel_gives_up_a_long_step(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the groups of that step are trained by whoever goes on."""
    job = await prepare(ctx, staleness=0)
    learner = job.learner
    assert isinstance(learner, Clumsy)
    step, began = learner.step, asyncio.Event()
    long = learner.spec.train.model_copy(update={"simulated_step_s": 2 * WAIT_S})
    loop_of_test = asyncio.get_running_loop()

    def third_step_is_long(groups: list[Group], version: WeightVersion) -> dict[str, float]:
        if version.step == 2:
            learner.spec = learner.spec.model_copy(update={"train": long})
            loop_of_test.call_soon_threadsafe(began.set)
        return step(groups, version)

    monkeypatch.setattr(learner, "step", third_step_is_long)
    async with running(feed(job)):
        training = asyncio.create_task(job.run())
        await soon(began.wait())
        await soon(cancel_and_wait(training))
    assert (newest(job).step, newest(job).ledger["trained"]) == (2, 4)
    await goes_on(ctx, job)


async def goes_on(ctx: Context, job: TrainerJob) -> None:
    """The next trainer makes the steps that are left, and each once."""
    await ctx.store.transition(JOB, JobState.STARTING, epoch=2)
    await train(after(job))
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED
    assert steps_of(job.reporter.root.parent / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert ledger.balanced and (ledger.trained, ledger.pending) == (12, 0)


async def cancel_in_third_step(
    job: TrainerJob, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> None:
    """The step is computed, or raises, after the job was cancelled and before the learner hears of it."""
    began, go_on = threading.Event(), threading.Event()
    step = job.learner.step

    def third_step_waits(groups: list[Group], version: WeightVersion) -> dict[str, float]:
        if version.step == 2:
            began.set()
            go_on.wait(WAIT_S)
            if error is not None:
                raise error
        return step(groups, version)

    monkeypatch.setattr(job.learner, "step", third_step_waits)
    monkeypatch.setattr(job.learner, "interrupt", lambda: None)
    async with running(feed(job)):
        training = asyncio.create_task(job.run())
        await until(began.is_set)
        ending = asyncio.create_task(cancel_and_wait(training))
        for _ in range(5):
            await asyncio.sleep(0)
            training.cancel()  # a worker that has waited long enough asks again
        go_on.set()
        await ending
    assert training.done()


@pytest.mark.parametrize("staleness", [0, 2])
async def test_job_resumes_a_stopped_step(ctx: Context, monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """The step counts, in the ledger and in the record: no group is waited for that was trained already."""
    job = await prepare(ctx, staleness=staleness)
    await cancel_in_third_step(job, monkeypatch)
    await goes_on(ctx, job)


async def test_weights_in_doubt_are_not_saved_on_cancel(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await prepare(ctx)
    await cancel_in_third_step(job, monkeypatch, error=RuntimeError("out of memory"))
    assert newest(job).step == 2


async def test_job_that_fails_keeps_its_last_step(ctx: Context) -> None:
    job = await prepare(ctx)
    job.publisher.run = fails_once(lambda: job.step >= 3)  # type: ignore[method-assign]
    await fails(job, "nobody takes the weights")
    assert newest(job).step == job.step >= 3


def fails_once(ready: Callable[[], bool]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        await until(ready)
        raise JobFailed("nobody takes the weights")

    return run
