"""One trainer's job over real servers, with groups from the test's hand: what a full disk and a NaN do to it."""

from __future__ import annotations

import asyncio
import errno
import resource
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest

from opentinker.services.trainer import checkpoint, service
from opentinker.services.trainer.learners.base import NonFinite, SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.asyncio_tools import cancel_and_wait, finish_uncancelled
from opentinker.shared.config import Settings
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.messaging.subjects import GROUP, METRIC, METRICS
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.types import codec
from opentinker.shared.types.core import JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest, start_of
from opentinker.shared.types.trajectories import Group
from tests.conftest import WAIT_S, soon, until
from tests.support.factories import make_group, make_spec, not_called
from tests.support.scheduling import kinds, running

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
    **faults: Any,
) -> TrainerJob:
    """6 steps of 2 groups, a checkpoint after every second one."""
    train = {"learner": "simulated", "steps": steps, "simulated_step_s": 0.0, "checkpoint_every": 2}
    train |= {"target": {target: 0.5}} if target else {}
    spec = make_spec(algorithm__max_staleness=staleness, train=train, start=start)
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


async def test_checkpoint_that_cannot_be_written_is_said_and_the_job_goes_on(ctx: Context) -> None:
    job = await prepare(ctx, full_at=(2, 4))
    await train(job)
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED
    failed = await events(ctx, "checkpoint_failed")
    assert [event["step"] for event in failed] == [2, 4]
    assert all("No space left" in event["error"] and "keep_checkpoints" in event["error"] for event in failed)
    assert saved_steps(job) == [6]


async def test_job_fails_when_its_last_checkpoint_cannot_be_written(ctx: Context) -> None:
    job = await prepare(ctx, full_at=(6,))
    await fails(job, r"step 6 .*No space left")
    assert saved_steps(job) == [2, 4]


async def test_target_needs_a_last_checkpoint(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await prepare(ctx, target="reward/mean", full_at=(1,))
    monkeypatch.setattr(job.reporter, "target_met", lambda: job.step == 1)
    await fails(job, r"step 1 .*No space left")
    assert (await ctx.store.job(JOB)).state != JobState.SUCCEEDED


@pytest.mark.parametrize("equal", [True, False])
async def test_a_job_whose_groups_all_had_equal_rewards_succeeds_with_a_warning(ctx: Context, equal: bool) -> None:
    job = await prepare(ctx, steps=4)
    await train(job, **({"reward": 0.5} if equal else {}))
    record = await ctx.store.job(JOB)
    warned = await events(ctx, "nothing_learned")
    assert record.state == JobState.SUCCEEDED
    assert [event["steps"] for event in warned] == ([4] if equal else [])
    why = "nothing was learned: in each group of all steps"
    assert record.reason.startswith(why) if equal else record.reason == ""
    assert [event["why"] for event in warned] == [record.reason] * equal


async def test_nan_fails_the_job_and_names_the_last_good_checkpoint(ctx: Context) -> None:
    job = await prepare(ctx, nan_at=4)
    await fails(job, r"step 4 was refused: the loss is nan; the last good checkpoint is step 2")
    assert newest(job).step == 2
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert ledger.balanced and ledger.trained == 3 * 2, "the refused step's groups are pending still"


async def test_nan_before_any_checkpoint_says_so(ctx: Context) -> None:
    await fails(await prepare(ctx, nan_at=1), r"step 1 was refused.*there is no checkpoint yet")


async def test_metrics_that_a_full_disk_refuses_are_written_later_in_order(ctx: Context) -> None:
    job = await prepare(ctx)
    path = job.reporter.root.parent / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    emit = job.reporter.metrics.emit

    async def there_is_space_again_at_step_4(step: int, values: dict[str, float]) -> Any:
        if step == 4:
            path.unlink()
        return await emit(step, values)

    job.reporter.metrics.emit = there_is_space_again_at_step_4  # type: ignore[method-assign]
    await train(job)
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    (refused,) = await events(ctx, "metrics_log_failed")
    assert refused["step"] == 1 and "No space left" in refused["error"]


async def test_disk_that_stays_full_for_metrics_only_does_not_fail_the_job(ctx: Context) -> None:
    job = await prepare(ctx)
    job.reporter.root.parent.mkdir(parents=True)
    (job.reporter.root.parent / "metrics.jsonl").symlink_to("/dev/full")
    await train(job)
    assert (await kinds(ctx.store, JOB)).count("metrics_log_failed") == 1
    assert (await ctx.store.job(JOB)).state == JobState.SUCCEEDED


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    """A disk may take the beginning of a line before it is full."""
    path = tmp_path / "job" / "metrics.jsonl"
    log = StepLog(path)
    log.add({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.add({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_of(path) == [1]
    log.add({"step": 3})
    assert steps_of(path) == [1, 2, 3]


async def test_a_long_stream_brings_checkpoints_forward(ctx: Context) -> None:
    job = await prepare(ctx)
    job.unsaved_bytes = 1
    await train(job)
    assert {event["step"] for event in await events(ctx, "checkpoint")} > {2, 4, 6}


@asynccontextmanager
async def starving(job: TrainerJob, groups: int, after_s: float) -> AsyncIterator[None]:
    """The job at work, with these groups alone: after so many seconds of waiting it makes room."""
    job.starved_s, job.starved_bytes = after_s, 0
    async with running(job.run()):
        await until(lambda: job.stepped_at > 0)  # it waits for two groups now
        version, seqs = await Admission(job.ctx.store.redis, JOB).issue(groups)
        for seq in seqs:
            await deliver(job, seq, version)
        yield


async def test_starved_trainer_makes_a_checkpoint_to_make_room(ctx: Context) -> None:
    job = await prepare(ctx)
    async with starving(job, groups=1, after_s=0.0):
        await until(lambda: saved_steps(job))
    ((_, saved),) = checkpoint.list_checkpoints(job.reporter.root)
    assert (saved.step, saved.consumed) == (0, [])


async def stored(ctx: Context) -> int:
    """Groups of the job in the stream."""
    info = await ctx.bus.js.stream_info("GROUPS", subjects_filter=GROUP.at(job=JOB))
    return int((info.state.subjects or {}).get(GROUP.at(job=JOB), 0))


async def test_starved_trainer_removes_all_that_it_trained_on(ctx: Context) -> None:
    """Also before its first checkpoint: the stream may be full."""
    job = await prepare(ctx)
    async with starving(job, groups=3, after_s=0.2):
        await until(lambda: stored(ctx), lambda found: job.step == 1 and found == 1)
    *_, (_, saved) = checkpoint.list_checkpoints(job.reporter.root)  # it may have been starved before too
    assert (saved.step, saved.consumed) == (1, [])


async def test_a_starved_trainer_retries_its_checkpoint(ctx: Context) -> None:
    job = await prepare(ctx, full_at=(0,))
    learner = job.learner
    assert isinstance(learner, Clumsy)
    async with starving(job, groups=1, after_s=0.05):
        await until(lambda: events(ctx, "checkpoint_failed"), lambda found: len(found) >= 2)
        learner.full_at = ()
        await until(lambda: saved_steps(job))


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


async def test_target_that_the_job_does_not_report_is_said_at_once(ctx: Context) -> None:
    await train(await prepare(ctx, target="exactt"))
    (said,) = await events(ctx, "target_metric_absent")
    assert said["metrics"] == ["exactt"] and "reward/mean" in said["there_are"]


async def test_resumed_trainer_remembers_what_the_target_is_judged_by(ctx: Context) -> None:
    """The mean of ten steps; a checkpoint holds the eight before it, so two more are enough."""
    job = await prepare(ctx, target="reward/mean", steps=30, nan_at=9)
    await fails(job, "last good checkpoint is step 8")
    resumed = after(job)
    await train(resumed)
    record = await ctx.store.job(JOB)
    assert (record.state, record.step, record.reason) == (JobState.SUCCEEDED, 10, "target reached")


async def test_a_policy_that_says_one_thing_only_is_an_event_once_and_a_metric(ctx: Context) -> None:
    """Also where another trainer goes on."""

    class Stuck(Clumsy):
        def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
            said = {"entropy": 0.0, "zero_variance": 1.0, "reward/mean": 0.27, "reward/min": 0.0, "reward/max": 1.0}
            return super().step(groups, version) | said

    job = await prepare(ctx, steps=26)
    job.reporter.learner = job.learner = Stuck(job.spec, nan_at=23)
    await fails(job, "last good checkpoint is step 22")
    resumed = after(job)
    resumed.reporter.learner = resumed.learner = Stuck(job.spec)
    await train(resumed)
    (event,) = await events(ctx, "collapse_alarm")
    assert (event["step"], event["metric"]) == (20, "entropy") and "algorithm.entropy_coef" in event["hint"]
    assert (event["alarm"], event["bound"], event["setting"]) == ("entropy", 0.01, "train.entropy_alarm")
    lines = [*map(orjson.loads, (job.reporter.root.parent / "metrics.jsonl").read_bytes().splitlines())]
    assert [line["collapse/alarm"] for line in lines] == [0.0] * 19 + [1.0] * 7
    assert [line["alarm/entropy"] for line in lines] == [0.0] * 19 + [1.0] * 7
    assert {line["alarm/zero_variance"] for line in lines} == {0.0}, "one collapse is one event"


def keep_start(job: TrainerJob) -> Path:
    """Put the checkpoint there that the job starts from, and return its directory."""
    kept = start_of(job.ctx.settings.data_dir, JOB)
    elsewhere = Manifest(job="j-other00000", epoch=3, step=7, version=WeightVersion(3, 7))
    kept.parent.mkdir(parents=True)
    return checkpoint.commit(job.ctx.settings.data_dir / "x", elsewhere, job.learner.save).rename(kept)


async def test_job_starts_from_the_checkpoint_kept_for_it_and_only_at_first(ctx: Context) -> None:
    other = "j-other00000@7"
    job = await prepare(ctx, start={"from": other}, nan_at=4)
    keep_start(job)
    await fails(job, "last good checkpoint is step 2")
    await train(after(job))
    events = [e for e in await ctx.store.events(JOB) if e["event"] in ("model_loaded", "resumed")]
    assert [(e["event"], e["step"], e.get("from"), e.get("optimizer")) for e in events] == [
        ("model_loaded", 0, other, False),
        ("resumed", 2, None, None),
    ]


@pytest.mark.parametrize("how", ["gone", "damaged"])
async def test_checkpoint_to_start_from_that_is_damaged_fails_the_job_by_name(ctx: Context, how: str) -> None:
    job = await prepare(ctx, start={"from": "j-other00000@7"})
    if how == "damaged":
        (keep_start(job) / "trainer" / "state.json").write_bytes(b'{"steps":9}')
    said = "state.json does not have its recorded sha256" if how == "damaged" else "No such file"
    await fails(job, rf"cannot start from j-other00000@7: .*{said}.*checkpoints j-other00000")


async def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_taken(ctx: Context) -> None:
    job = await prepare(ctx, nan_at=5)
    await fails(job, "last good checkpoint is step 4")
    root = job.reporter.root
    (root / "step-000004" / "trainer" / "state.json").write_bytes(b"{}")
    await train(after(job))
    (told,) = await events(ctx, "checkpoint_damaged")
    assert told["checkpoint"] == "step-000004" and "instead of" in told["problem"]
    assert [event["step"] for event in await events(ctx, "resumed")] == [2]


async def test_a_job_whose_checkpoints_are_all_damaged_does_not_begin_anew(ctx: Context) -> None:
    job = await prepare(ctx, nan_at=5)
    await fails(job, "last good checkpoint is step 4")
    for directory, _ in checkpoint.list_checkpoints(job.reporter.root):
        (directory / "manifest.json").write_bytes(b"{")
    await fails(after(job), r"none of its [23] checkpoints is intact .* submit the job again")


NO_ROOM = r"step 1: it does not fit into memory: .*tokens_per_micro_batch"


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (MemoryError("no room"), JobFailed, NO_ROOM),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 4 bytes."), JobFailed, NO_ROOM),
        (RuntimeError("a kernel is missing"), RuntimeError, "kernel"),
    ],
)
async def test_out_of_memory_fails_the_job_and_other_errors_crash_the_trainer(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], match: str
) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise error

    job = await prepare(ctx)
    monkeypatch.setattr(job.learner, "step", refuse)
    with pytest.raises(raised, match=match):
        await train(job)


async def test_group_that_cannot_be_decoded_is_discarded_and_replaced(ctx: Context) -> None:
    job = await prepare(ctx)
    real = codec.encode

    def garbled(noun: Any) -> bytes:
        return b"garbled" if isinstance(noun, Group) and noun.seq == 3 else real(noun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentinker.shared.messaging.bus.codec.encode", garbled)
        await train(job)
    ledger = await Admission(ctx.store.redis, JOB).ledger()
    assert ledger.balanced and ledger.trained == 6 * 2 and ledger.discarded == {"invalid": 1}
    (failure,) = await ctx.store.failures(JOB, 10)
    assert (failure["event"], failure["group"], failure["reason"]) == ("group_rejected", 3, "invalid")


async def test_a_learner_is_closed_despite_repeated_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the other ranks would outlive the job."""
    closed, running, free = threading.Event(), asyncio.Event(), threading.Event()

    class Job:
        def __init__(self, *_: Any) -> None: ...

        async def run(self) -> None:
            running.set()
            await asyncio.Event().wait()

    class Closes(SimulatedLearner):
        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(service, "TrainerJob", Job)
    monkeypatch.setattr(service, "make_learner", Closes)
    spec = make_spec(train={"learner": "simulated", "steps": 1})
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    lease = Lease(job=JOB, worker="w", incarnation="i", epoch=1, pool=Pool.TRAINER)
    worker: Any = SimpleNamespace(ctx=SimpleNamespace(settings=Settings()), leftovers=[])
    task = asyncio.create_task(service.work(worker, lease, spec))
    await soon(running.wait())
    busy = asyncio.create_task(asyncio.to_thread(free.wait, WAIT_S))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done() and not closed.is_set()
    free.set()
    await asyncio.wait([task, busy])
    assert task.cancelled() and closed.is_set()
