"""One trainer's job over real servers, with groups from the test's hand: what a full disk and a NaN do to it."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from opentinker.services.trainer import checkpoint, job_training, service
from opentinker.services.trainer.learners.base import EmptySnapshot, SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.shared.config import Settings
from opentinker.shared.data.step_log import StepLog
from opentinker.shared.messaging.subjects import GROUP, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.admission import Admission
from opentinker.shared.types import codec
from opentinker.shared.types.core import JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import Manifest, start_of
from opentinker.shared.types.match_results import IdleSeat
from opentinker.shared.types.trajectories import Group
from tests.conftest import WAIT_S, soon, until
from tests.integration.trainer.loop.trainer_jobs import (
    JOB,
    Clumsy,
    after,
    deliver,
    events,
    fails,
    newest,
    prepare,
    saved_steps,
    steps_of,
    train,
)
from tests.support.factories import make_spec
from tests.support.scheduling import kinds, messages, running


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


async def test_a_trainer_that_copies_a_version_says_so(ctx: Context) -> None:
    """Or it would be called silent, and maybe killed."""

    class Slow(Clumsy):
        def snapshot(self, version: WeightVersion) -> EmptySnapshot:
            time.sleep(0.2)
            return super().snapshot(version)

    job = await prepare(ctx, steps=2)
    job.reporter.learner = job.learner = Slow(job.spec)
    parts = await messages(ctx.bus, TIMELINE, job=JOB, worker=ctx.worker)
    await train(job)

    def copying() -> dict[str, float]:
        copies = [one for part in parts for one in part.segments if one.kind == "snapshot"]
        return {v: sum(one.end - one.start for one in copies if one.version == v) for v in ("1.0", "1.1", "1.2")}

    await until(lambda: min(copying().values()) > 0.15)


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


async def test_a_resumed_trainer_knows_the_results_of_games_that_ended_before_the_opponent_had_a_turn(
    ctx: Context,
) -> None:
    game = {"environment": {"name": "matching_pennies"}, "seats": {"odd": {"pool": "past"}}}
    job = await prepare(ctx, staleness=0, nan_at=5, parts={**game, "pools": {"past": {"every": 2}}})
    first = {"odd": IdleSeat(policy="past@0.0", reward=0.5, version=WeightVersion(0, 0))}
    with pytest.raises(JobFailed):
        await train(job, seat="even", idle=first)
    await ctx.bus.purge("GROUPS", GROUP.at(job=JOB))  # it makes no step
    resumed = after(job)
    async with running(resumed.run()):
        await until(lambda: resumed.intake._consumer is not None)
        told = (await resumed.admission.pools())["past"]
    assert told.outcomes == {"0.0": (8, 0, 8), "1.2": (0, 0, 0), "1.4": (0, 0, 0)}
    assert told.ratings.keys() == {"0.0", "1.2"}, "1.4 has not played"


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


async def test_what_a_resting_policy_discarded_after_its_checkpoint_stays_in_the_books(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await prepare(ctx)
    admission = Admission(ctx.store.redis, JOB)
    monkeypatch.setattr(job.joint, "rests", lambda _: job.step == 2)

    async def resting() -> int:
        return (await admission.ledger()).discarded.get("resting", 0)

    async with running(train(job)):
        await until(lambda: saved_steps(job) == [2])
        saved = newest(job)
        await until(resting, lambda count: count > saved.ledger.get("discarded/resting", 0) + 5)
    before = await admission.ledger()
    assert newest(job) == saved, "it makes no step and saves nothing"
    later = after(job)
    await train(later)
    ledger = await admission.ledger()
    assert ledger.balanced and ledger.discarded == before.discarded and ledger.trained == 6 * 2
    assert newest(later).ledger["discarded/resting"] == before.discarded["resting"]


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

    monkeypatch.setattr(job_training, "TrainerJob", Job)
    monkeypatch.setattr(service, "make_learner", lambda spec, listener: Closes(spec))
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
