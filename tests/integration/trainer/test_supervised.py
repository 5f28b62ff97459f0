"""The loop of sft and dpo over real servers, with a learner of the test's: rows, checkpoints, validation, its ends."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from opentinker.services.trainer import checkpoint
from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example, Examples
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.asyncio_tools import cancel_and_wait
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import JobState, Lease, Pool
from opentinker.shared.types.errors import JobFailed
from tests.conftest import WAIT_S, until
from tests.samples.row_samples import row_spec
from tests.support.factories import not_called
from tests.support.scheduling import kinds, messages

JOB = "j-rows"


def example(number: int) -> Example:
    return Example((Tokens(np.array([1, number + 2], dtype=np.int32), np.array([False, True])),))


def rows(count: int, validation: int = 0) -> Examples:
    return Examples([example(n) for n in range(count)], [example(1000 + n) for n in range(validation)])


class Student:
    """Its state is what it has seen. Refuses steps as NaN and saves as a full disk would, where it is told to."""

    def __init__(self, *, nan_at: int = 0, full_at: tuple[int, ...] = (), pause: asyncio.Event | None = None) -> None:
        self.nan_at, self.full_at = nan_at, full_at
        self.seen: list[list[int]] = []
        self.evaluated: list[int] = []
        """Steps done at each evaluation."""
        self.prepared = 0
        self.total_steps = 0
        self.waits = threading.Event()
        """Set while `evaluate` goes on until it is interrupted."""
        self.endless = False
        self.interrupted = threading.Event()

    def load(self, checkpoint: Path | None) -> None:
        self.seen = [] if checkpoint is None else orjson.loads((checkpoint / "seen.json").read_bytes())

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        raise AssertionError

    def save(self, directory: Path) -> None:
        (directory / "seen.json").write_bytes(orjson.dumps(self.seen))
        if len(self.seen) in self.full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass

    def prepare(self, examples: list[Example], home: Path) -> None:
        self.prepared = len(examples)

    def interrupt(self) -> None:
        self.interrupted.set()

    def step(self, batch: list[Example]) -> dict[str, float]:
        if len(self.seen) + 1 == self.nan_at:
            raise NonFinite("the loss is nan")
        self.seen.append([int(row.parts[0].ids_T[1]) - 2 for row in batch])
        return {"loss": 1.0 / len(self.seen), "accuracy": 1 - 1.0 / len(self.seen), "tokens": float(len(batch))}

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        self.evaluated.append(len(self.seen))
        if self.endless and self.seen:
            self.waits.set()
            assert self.interrupted.wait(WAIT_S)
            raise Interrupted("asked")
        return {"loss": 2.0, "accuracy": 0.5, "tokens": float(len(examples))}


def spec_of(**parts: dict[str, Any]) -> JobSpec:
    return row_spec("m", "rows.jsonl", **parts)


async def prepare(
    ctx: Context, student: Student, spec: JobSpec, examples: Examples | JobFailed, epoch: int = 1, id: str = JOB
) -> SupervisedJob:
    """A lease on a new job, or with a higher epoch on the one there is."""
    if epoch == 1:
        await ctx.store.create_job(id=id, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(id, JobState.STARTING, epoch=epoch)
    worker = LeasedWorker(ctx, Pool.TRAINER, not_called)
    lease = Lease(job=id, worker=ctx.worker, incarnation=worker.info.incarnation, epoch=epoch, pool=Pool.TRAINER)

    def load(_: JobSpec, go_on: Callable[[], None]) -> Examples:
        if isinstance(examples, JobFailed):
            raise examples
        return examples

    return SupervisedJob(worker, lease, spec, student, load)


async def points(ctx: Context, job: SupervisedJob) -> dict[int, dict[str, Any]]:
    """Of metrics.jsonl by step, later lines on top."""
    found: dict[int, dict[str, Any]] = {}
    for line in (job.reporter.root.parent / "metrics.jsonl").read_bytes().splitlines():
        point = orjson.loads(line)
        found.setdefault(point["step"], {}).update(point)
    return found


async def test_epochs_use_every_row_as_often_and_say_how_many_steps_that_is(ctx: Context) -> None:
    student = Student()
    job = await prepare(ctx, student, spec_of(data={"epochs": 3}), rows(10))
    await job.run()
    record = await ctx.store.job(JOB)
    assert (record.state, record.step, record.steps) == (JobState.SUCCEEDED, 8, 8)
    assert [len(batch) for batch in student.seen] == [4] * 7 + [2]
    used = [row for batch in student.seen for row in batch]
    for start in (0, 10, 20):
        assert sorted(used[start : start + 10]) == list(range(10))
    assert used[:10] != used[10:20] != list(range(10))
    assert await kinds(ctx.store, JOB) == [
        *("queued", "starting", "data_loaded", "model_loaded", "running"),
        *["checkpoint"] * 4,
        "succeeded",
    ]
    metrics = await points(ctx, job)
    assert sorted(metrics) == list(range(1, 9))
    assert metrics[8]["epochs"] == 3.0 and metrics[8]["rows"] == 2 and metrics[1]["data"] == student.seen[0]


async def test_waits_for_other_jobs_of_a_shared_trainer_are_on_the_timeline(ctx: Context) -> None:
    class Waiting(Student):
        def step(self, batch: list[Example]) -> dict[str, float]:
            waits = {"trainer/bank_wait_seconds": 0.75, "trainer/bank_other_jobs_seconds": 0.25}
            return {**super().step(batch), **waits}

    parts = await messages(ctx.bus, TIMELINE, job=JOB, worker=ctx.worker)
    job = await prepare(ctx, Waiting(), spec_of(train={"steps": 1}), rows(4))
    await job.run()
    await until(lambda: any(one.kind == "queue" for part in parts for one in part.segments))
    (queue,) = [one for part in parts for one in part.segments if one.kind == "queue"]
    assert queue.lane == "training" and queue.end - queue.start == pytest.approx(0.25)


async def test_rows_in_the_order_of_the_file(ctx: Context) -> None:
    student = Student()
    await (await prepare(ctx, student, spec_of(data={"shuffle": False}), rows(10))).run()
    assert student.seen[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


async def test_resumed_job_leaves_no_row_out_and_takes_none_twice(ctx: Context) -> None:
    unbroken, first, second = Student(), Student(nan_at=4), Student()
    spec = spec_of(data={"epochs": 2})
    job = await prepare(ctx, first, spec, rows(10))
    with pytest.raises(JobFailed, match=r"step 4 was refused: the loss is nan; the last good checkpoint is step 2"):
        await job.run()
    assert (await ctx.store.job(JOB)).state == JobState.RUNNING, "whoever holds the lease fails it"
    resumed = await prepare(ctx, second, spec, rows(10), epoch=2)
    await resumed.run()
    manifest = checkpoint.find_newest(job.reporter.root)
    assert manifest is not None and manifest[1].data is not None and manifest[1].data.position == 20
    assert len(second.seen) == 5 and second.seen[:3] == first.seen
    await (await prepare(ctx, unbroken, spec, rows(10), id="j-unbroken")).run()
    assert unbroken.seen == second.seen


async def test_job_whose_rows_have_changed_does_not_go_on(ctx: Context) -> None:
    job = await prepare(ctx, Student(nan_at=4), spec_of(), rows(10))
    with pytest.raises(JobFailed, match="nan"):
        await job.run()
    with pytest.raises(JobFailed, match=r"step-000002 was made from other rows .*the data\s+has changed"):
        await (await prepare(ctx, Student(), spec_of(), rows(11), epoch=2)).run()


async def test_validation_comes_before_the_first_step_on_schedule_and_at_the_end(ctx: Context) -> None:
    student = Student()
    spec = spec_of(data={"validation": 0.5, "validate_every": 4})
    parts = await messages(ctx.bus, TIMELINE, job=JOB, worker=ctx.worker)
    job = await prepare(ctx, student, spec, rows(10, validation=3))
    await job.run()
    assert student.evaluated == [0, 4, 6] and student.prepared == 13
    told = [("evaluation", f"1.{step}") for step in (0, 4, 6)]
    await until(lambda: {(one.kind, one.version) for part in parts for one in part.segments} >= {*told})
    lines = [orjson.loads(line) for line in (job.reporter.root.parent / "validation.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 6]
    assert lines[0]["val/tokens"] == 3 and lines[0]["val/loss"] == 2.0
    assert sorted(await points(ctx, job)) == [1, 2, 3, 4, 5, 6]
    progress = orjson.loads((await ctx.store.job(JOB)).progress)
    assert progress["loss"] == pytest.approx(1 / 6) and progress["step_seconds"] > 0


async def test_job_that_meets_its_target_is_validated_and_saved_there(ctx: Context) -> None:
    student = Student()
    spec = spec_of(data={"validation": 0.5}, train={"steps": 1000, "target": {"accuracy": 0.9}})
    await (await prepare(ctx, student, spec, rows(10, validation=3))).run()
    record = await ctx.store.job(JOB)
    assert (record.state, record.reason) == (JobState.SUCCEEDED, "target reached")
    assert student.evaluated == [0, record.step] and 10 < record.step < 40


async def test_target_may_be_one_of_the_validation(ctx: Context) -> None:
    student = Student()
    data = {"validation": 0.5, "validate_every": 4}
    spec = spec_of(data=data, train={"steps": 1000, "target": {"val/accuracy": 0.5}})
    await (await prepare(ctx, student, spec, rows(10, validation=3))).run()
    assert (await ctx.store.job(JOB)).step == 0, "what it starts from is good enough"
    assert student.evaluated == [0]


async def test_resumed_job_remembers_its_evaluations_and_the_window_of_its_target(ctx: Context) -> None:
    """The target is met where it is without the break."""
    spec = spec_of(data={"validation": 0.5, "validate_every": 4}, train={"steps": 99, "target": {"accuracy": 0.93}})
    examples, student = rows(10, validation=3), Student()
    await (await prepare(ctx, Student(), spec, examples, id="j-unbroken")).run()
    with pytest.raises(JobFailed, match="nan"):
        await (await prepare(ctx, Student(nan_at=14), spec, examples)).run()
    await (await prepare(ctx, student, spec, examples, epoch=2)).run()
    unbroken, broken = await ctx.store.job("j-unbroken"), await ctx.store.job(JOB)
    assert unbroken.step == broken.step > 16
    assert student.evaluated == [16, broken.step], "not that of step 12 again"


async def test_checkpoint_that_cannot_be_written_is_said_and_only_the_last_is_a_must(ctx: Context) -> None:
    job = await prepare(ctx, Student(full_at=(2, 6)), spec_of(), rows(10))
    with pytest.raises(JobFailed, match=r"step 6 .*No space left"):
        await job.run()
    failed = [event["step"] for event in await ctx.store.events(JOB) if event["event"] == "checkpoint_failed"]
    assert failed == [2, 6] and [manifest.step for _, manifest in checkpoint.list_checkpoints(job.reporter.root)] == [4]


async def test_service_that_stops_saves_first(ctx: Context) -> None:
    class Slow(Student):
        def step(self, batch: list[Example]) -> dict[str, float]:
            if len(self.seen) == 2:
                ctx.stopping.set()
            return super().step(batch)

    job = await prepare(ctx, Slow(), spec_of(), rows(10))
    await job.run()
    assert (await ctx.store.job(JOB)).state == JobState.RUNNING
    assert [manifest.step for _, manifest in checkpoint.list_checkpoints(job.reporter.root)] == [2, 3]


async def test_cancelled_job_saves_the_steps_it_did(ctx: Context) -> None:
    student = Student()
    job = await prepare(ctx, student, spec_of(train={"steps": 10**6, "checkpoint_every": 10**6}), rows(10))
    task = asyncio.create_task(job.run())
    await until(lambda: len(student.seen) > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [manifest.step for _, manifest in checkpoint.list_checkpoints(job.reporter.root)] == [len(student.seen)]


async def test_rows_that_are_wrong_are_found_before_the_model_is_loaded(ctx: Context) -> None:
    class Untouched(Student):
        def load(self, checkpoint: Path | None) -> None:
            raise AssertionError

    with pytest.raises(JobFailed, match="line 7"):
        await (await prepare(ctx, Untouched(), spec_of(), JobFailed("data: a.jsonl, line 7: no"))).run()


async def test_warmup_longer_than_what_the_epochs_make_is_refused(ctx: Context) -> None:
    spec = spec_of(data={"epochs": 1}, train={"warmup_steps": 4})
    with pytest.raises(JobFailed, match=r"warmup_steps = 4 is larger than the 3 steps that data\.epochs = 1 makes"):
        await (await prepare(ctx, Student(), spec, rows(10))).run()


async def test_what_was_left_out_is_said(ctx: Context) -> None:
    examples = rows(10)
    examples.counts.update({"rows": 12, "longer": 2, "dropped": 2})
    await (await prepare(ctx, Student(), spec_of(), examples)).run()
    (said,) = [event for event in await ctx.store.events(JOB) if event["event"] == "data_loaded"]
    assert (said["rows"], said["longer"], said["dropped"], said["steps"]) == (10, 2, 2, 6) and "cut" not in said


async def test_cancelled_job_gives_up_its_evaluation_and_saves_the_weights(ctx: Context) -> None:
    student = Student()
    student.endless = True
    job = await prepare(
        ctx, student, spec_of(data={"validate_every": 3, "validation": "more.jsonl"}), rows(10, validation=2)
    )
    training = asyncio.create_task(job.run())
    await until(student.waits.is_set)
    await cancel_and_wait(training)
    assert training.cancelled() and student.interrupted.is_set()
    found = checkpoint.find_newest(job.reporter.root)
    assert found is not None and found[1].step == 3


async def test_cancelled_job_gives_up_reading_rows_at_the_next_one(ctx: Context) -> None:
    student, reads = Student(), threading.Event()
    job = await prepare(ctx, student, spec_of(train={"steps": 3}), rows(8))

    def endless(_: JobSpec, go_on: Callable[[], None]) -> Examples:
        while True:
            go_on()
            reads.set()

    job._load = endless
    task = asyncio.create_task(job.run())
    await until(reads.is_set)
    task.cancel()
    await until(task.done)
    assert task.cancelled() and student.seen == []
