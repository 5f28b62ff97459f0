"""A trainer that slept beyond its lease wakes in the very window in which its successor still loads the model: the
job's epoch has risen with the lease, and nothing else is written yet. Every write of the old one is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from opentinker.services.rollout_worker.weight_receiver import WeightReceiver
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.intake import consumer_name
from opentinker.services.trainer.job_reporter import JobReporter
from opentinker.services.trainer.learners.base import SimulatedLearner
from opentinker.services.trainer.rl_loop import TrainerJob
from opentinker.services.trainer.supervised_loop import SupervisedJob
from opentinker.shared.messaging.subjects import GROUP
from opentinker.shared.runtime.leased_worker import LeasedWorker
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.admission import Admission
from opentinker.shared.types.core import Discard, JobState, Lease, Pool, WeightVersion
from opentinker.shared.types.errors import Fenced
from opentinker.shared.types.manifest import Manifest
from opentinker.shared.types.swap import SIMULATED, SwapCommand
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, NewContext, soon, until
from tests.integration.trainer.test_supervised import Student, rows, spec_of
from tests.support.factories import make_group, make_spec, not_called
from tests.support.scheduling import running

JOB = "j-waking"
STOPS_AT = 4


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    async with new_context("trainer-0") as ctx:
        await ctx.bus.purge("GROUPS", GROUP.at(job=JOB))
        yield ctx


class Stopping:
    """SIGSTOP in the middle of a step, and SIGCONT, for a learner of this process."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.woken = threading.Event()

    def at(self, step: int) -> None:
        if step == STOPS_AT:
            self.stopped.set()
            assert self.woken.wait(WAIT_S)


class Sleeper(SimulatedLearner):
    def __init__(self, spec: JobSpec, stopping: Stopping) -> None:
        super().__init__(spec)
        self.stopping = stopping

    def step(self, groups: Any, version: WeightVersion) -> dict[str, float]:
        self.stopping.at(self.steps + 1)
        return super().step(groups, version)


class SleepingStudent(Student):
    def __init__(self, stopping: Stopping) -> None:
        super().__init__()
        self.stopping = stopping

    def step(self, batch: list[Example]) -> dict[str, float]:
        self.stopping.at(len(self.seen) + 1)
        return super().step(batch)


async def leased(ctx: Context, spec: JobSpec) -> tuple[LeasedWorker, Lease]:
    """Epoch 1 of a new job."""
    await ctx.store.create_job(id=JOB, spec=spec.model_dump(mode="json"), tenant="default")
    await ctx.store.transition(JOB, JobState.STARTING, epoch=1)
    worker = LeasedWorker(ctx, Pool.TRAINER, not_called)
    return worker, Lease(job=JOB, worker="trainer-0", incarnation=worker.info.incarnation, epoch=1, pool=Pool.TRAINER)


async def successor(ctx: Context) -> None:
    """The scheduler gives the job to another trainer, which has done nothing yet."""
    lease = Lease(job=JOB, worker="trainer-1", incarnation="i", epoch=2, pool=Pool.TRAINER)
    await ctx.store.transition(JOB, JobState.STARTING, epoch=2, leases=[lease], tenant="default")


def rl_spec() -> JobSpec:
    train = {"learner": "simulated", "steps": 9, "simulated_step_s": 0.0, "checkpoint_every": 3}
    return make_spec(algorithm__max_staleness=10, train=train)


async def feed(ctx: Context) -> None:
    """Room becomes groups."""
    admission, sent = Admission(ctx.store.redis, JOB), 0
    while True:
        version, seqs = await admission.issue(100)
        for seq in seqs:
            sent += 1
            group = make_group(job=JOB, seq=seq, versions=[version])
            await ctx.bus.publish(GROUP, group, f"{ctx.settings.data_dir}/{sent}", job=JOB)
        await asyncio.sleep(0.02)


def written(home: Path) -> dict[str, bytes]:
    """Every file of the job but the locks."""
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("kind", ["rl", "sft"])
async def test_trainer_that_wakes_in_a_step_while_its_successor_loads_writes_nothing(ctx: Context, kind: str) -> None:
    stopping = Stopping()
    if kind == "rl":
        spec = rl_spec()
        worker, lease = await leased(ctx, spec)
        job: TrainerJob | SupervisedJob = TrainerJob(worker, lease, spec, Sleeper(spec, stopping))
    else:
        spec = spec_of(train={"steps": 9, "checkpoint_every": 3})
        worker, lease = await leased(ctx, spec)
        job = SupervisedJob(worker, lease, spec, SleepingStudent(stopping), lambda *_: rows(40))
    feeding = feed(ctx) if kind == "rl" else asyncio.sleep(0)
    async with running(feeding):
        task = asyncio.create_task(job.run())
        await until(lambda: stopping.stopped.is_set() or task.done())
        await successor(ctx)
        home = ctx.settings.data_dir / "jobs" / JOB
        before, record = written(home), await ctx.store.job(JOB)
        events = await ctx.store.events(JOB)
        stopping.woken.set()
        with pytest.raises(Fenced, match="epoch 2"):
            await soon(task)
    assert written(home) == before, "neither a log line nor a checkpoint"
    assert await ctx.store.job(JOB) == record and await ctx.store.events(JOB) == events
    assert record.step == STOPS_AT - 1


def writes(ctx: Context, record: JobReporter) -> dict[str, Callable[[], Awaitable[object]]]:
    """All that a trainer writes, by name."""
    admission = Admission(ctx.store.redis, JOB, 1)
    manifest = Manifest(job=JOB, epoch=1, step=7, version=WeightVersion(1, 7), resumed={1: 0})
    restored = {"step": 7, "max_staleness": 1, "groups_per_batch": 2, "total": 18, "discarded": {}}
    return {
        "state running": record.running,
        "state succeeded": lambda: record.succeed(7),
        "state failed": lambda: ctx.store.transition(JOB, JobState.FAILED, epoch=1, reason="old"),
        "event": lambda: record.event("checkpoint", {"step": 7}),
        "step of the record": lambda: ctx.store.update(JOB, epoch=1, step=7),
        "log line and metrics": lambda: record.step(7, {"loss": 1.0}),
        "checkpoint": lambda: record.commit(manifest, last=False),
        "last checkpoint": lambda: record.commit(manifest, last=True),
        "evaluation": lambda: record.evaluations.add(WeightVersion(1, 7), {"val/loss": 1.0}, {}),
        "transcripts": lambda: record.evaluations.keep(7, [{"index": 0}]),
        "admission restored": lambda: admission.restore(**restored),  # type: ignore[arg-type]
        "version served": lambda: admission.set_version(7),
        "groups trained": lambda: admission.train(7, [0]),
        "groups discarded": lambda: admission.discard(7, Discard.STALE, [0]),
        "groups forgotten": lambda: admission.commit(7),
    }


async def test_every_write_of_an_old_epoch_is_refused(ctx: Context) -> None:
    spec = rl_spec()
    worker, lease = await leased(ctx, spec)
    await Admission(ctx.store.redis, JOB, 1).restore(
        step=0, max_staleness=1, groups_per_batch=2, total=18, discarded={}
    )
    _, (seq, *_) = await Admission(ctx.store.redis, JOB).issue(2)
    assert seq == 0 and await Admission(ctx.store.redis, JOB, 1).accept(0) == "ok"
    record = JobReporter(worker.ctx, lease, spec, SimulatedLearner(spec))
    await successor(ctx)
    home = ctx.settings.data_dir / "jobs" / JOB
    before, ledger = await ctx.store.job(JOB), await Admission(ctx.store.redis, JOB).ledger()
    refused = []
    for name, write in writes(ctx, record).items():
        with pytest.raises(Fenced):
            await soon(write())
        refused.append(name)
    print(f"{len(refused)} writes refused: {', '.join(refused)}")
    assert len(refused) == len(writes(ctx, record)) == 15
    assert written(home) == {}
    assert await ctx.store.job(JOB) == before
    assert await Admission(ctx.store.redis, JOB).ledger() == ledger


class Untouched:
    """An engine that must be left alone."""

    version = WeightVersion(1, 3)
    sleeps = False

    def __init__(self) -> None:
        self.received: list[SwapCommand] = []

    async def wake(self) -> None: ...

    async def join(self, command: SwapCommand) -> None:
        self.received.append(command)

    async def receive(self, command: SwapCommand) -> dict[str, float]:
        self.received.append(command)
        return {}


async def test_rollout_worker_takes_no_weights_of_a_trainer_whose_lease_is_anothers(ctx: Context) -> None:
    await leased(ctx, rl_spec())
    engine = Untouched()
    info = WorkerInfo(id="rollout-0", incarnation="i", pool=Pool.ROLLOUT, host="h", pid=1)
    taken: list[dict[str, float]] = []

    async def note(seconds: dict[str, float]) -> None:
        taken.append(seconds)

    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taker = WeightReceiver(ctx.store, info, JOB, 1, engine, broken, note)  # type: ignore[arg-type]

    def command(epoch: int, action: str) -> SwapCommand:
        version = WeightVersion(epoch, 4)
        return SwapCommand(job=JOB, epoch=epoch, action=action, generation=1, device=SIMULATED, version=version)

    assert (await taker.answer(command(1, "join"))).ok and (await taker.answer(command(1, "receive"))).ok
    await successor(ctx)
    for action in ("join", "receive"):
        answer = await taker.answer(command(1, action))
        assert not answer.ok and "belongs to epoch 2" in answer.error
    assert len(engine.received) == 2 and len(taken) == 1
    assert (await taker.answer(command(2, "join"))).ok
    assert taker.epoch == 2


async def test_old_trainer_takes_no_group_away_from_the_new_one(ctx: Context) -> None:
    """It was stopped with groups in its hands, and wakes up to ask for more."""
    group = [make_group(job=JOB, seq=seq) for seq in range(6)]
    names = [f"{ctx.settings.data_dir}/{seq}" for seq in range(6)]
    old = await ctx.bus.consume(GROUP, consumer_name(JOB, 1), batch=4, start_seq=1, job=JOB)
    for seq in range(4):
        await ctx.bus.publish(GROUP, group[seq], names[seq], job=JOB)
    held = [await old.next(WAIT_S) for _ in range(2)]
    assert None not in held
    new = await ctx.bus.consume(GROUP, consumer_name(JOB, 2), batch=4, start_seq=1, job=JOB)
    for seq in (4, 5):
        await ctx.bus.publish(GROUP, group[seq], names[seq], job=JOB)
    more = [await old.next(WAIT_S) for _ in range(4)]
    for delivery in [*held, *more]:
        assert delivery is not None and await delivery.ack_sync()
    seen = []
    for _ in range(6):
        delivery = await new.next(WAIT_S)
        assert delivery is not None and delivery.noun is not None and delivery.deliveries == 1
        seen.append(delivery.noun.seq)
    assert seen == list(range(6)), "each of them, once, at once"
    await old.close(delete=True)
    await new.close(delete=True)
