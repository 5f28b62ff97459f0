"""The publisher and its rollout workers: processes in a real gloo group, killed and stopped; and workers that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from nats.aio.subscription import Subscription

from opentinker.services.rollout_worker.engines.base import SwapError
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.trainer.learners.base import BUCKET_BYTES, EmptySnapshot
from opentinker.services.trainer.weights.publisher import Publisher
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.messaging.subjects import SWAP
from opentinker.shared.nn import transport
from opentinker.shared.nn.buckets import snapshot
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ToySpec
from opentinker.shared.types.core import Lease, Pool, WeightVersion, WorkerInfo
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SwapCommand, SwapReply
from tests.conftest import WAIT_S, NewContext, Server, soon, until
from tests.support.cluster import PYTHONPATH, Process, toy_model
from tests.support.factories import version
from tests.support.scheduling import context, new_job, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

REAL, FAKE = "real", "fake"
"""Jobs: of processes, and of workers that only answer."""
TIMING: dict[str, dict[str, Any]] = {REAL: {}, FAKE: {"poll_s": 0.02, "retry_s": (0.01, 0.05)}}
TIMEOUT_S = TTL_S = 3 * WAIT_S
"""A death or a hang that holds up the others until one of these is over is not `soon`, so a test fails."""
BRIEF_S = 2.0
"""The same for those that are to be found out by it."""
LARGE = BUCKET_BYTES // 4
"""float32 values; more than sockets buffer, so that a transfer stands still when one member does."""


class Trainer:
    """A publisher at work, what it was offered and what it says was served."""

    def __init__(self, ctx: Context, job: str, device: str, **options: Any) -> None:
        self.newest = version(0)
        self.served: dict[WeightVersion, float] = {}
        lease = Lease(job=job, worker="trainer-0", incarnation="t", epoch=1, pool=Pool.TRAINER)
        self.publisher = Publisher(ctx, lease, device, self._served, **TIMING[job] | options)

    async def _served(self, version: WeightVersion, seconds: dict[str, float]) -> None:
        self.served.setdefault(version, time.monotonic())

    async def offer(self, step: int, values: int = 0) -> None:
        """New weights of so many float32 values."""
        self.newest = version(step)
        made = snapshot(version(step), [("w", torch.randn(values))], BUCKET_BYTES) if values else None
        self.publisher.offer(made or EmptySnapshot(version=version(step)))

    async def serves(self) -> None:
        """Until the newest version counts as served."""
        await until(lambda: self.newest in self.served)

    async def serve(self, step: int, values: int = 0) -> None:
        await self.offer(step, values)
        await self.serves()


@asynccontextmanager
async def training(ctx: Context, job: str, device: str, **options: Any) -> AsyncIterator[Trainer]:
    trainer = Trainer(ctx, job, device, **options)
    async with running(trainer.publisher.run()):
        yield trainer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ctx(
    nats_server: Server, valkey_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Context]:
    directory = tmp_path_factory.mktemp("publisher")
    settings = {"swap_timeout_s": TIMEOUT_S, "worker_ttl_s": TTL_S}
    async with context(nats_server, valkey_server, "trainer-0", directory, **settings) as ctx:
        await ctx.store.redis.flushdb()
        yield ctx


# --- real rollout workers -------------------------------------------------------------------------------------------

MAIN = """
import runpy, opentinker.shared.nn.transport  # torch comes before the first heartbeat, as with `preload`
runpy.run_module("opentinker.services.rollout_worker", run_name="__main__")
"""


class Fleet:
    """Rollout worker processes with toy engines, leased to the job. Of those called `brief` a hang is seen soon."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.processes: dict[str, Process] = {}

    async def start(self, *names: str) -> None:
        """Those that do not run; returns when all are ready for the trainer."""
        missing = [n for n in names if n not in self.processes or self.processes[n].popen is None]
        for name in missing:
            self._launch(name)
        for name in missing:
            await until(functools.partial(self._info, name))
            info = await self._info(name)
            assert info is not None
            lease = Lease(job=REAL, worker=name, incarnation=info.incarnation, epoch=1, pool=Pool.ROLLOUT)
            await self.ctx.store.grant(lease)
        for name in names:
            await self.address(name)

    def _launch(self, name: str) -> None:
        settings = ("nats_url", "redis_url", "data_dir", "swap_timeout_s", "worker_ttl_s")
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
            "OPENTINKER_WORKER_ID": name,
            "OPENTINKER_PRELOAD": "false",
            "OPENTINKER_HEARTBEAT_S": "0.2",
            **{f"OPENTINKER_{key.upper()}": str(getattr(self.ctx.settings, key)) for key in settings},
            **({"OPENTINKER_WORKER_TTL_S": str(BRIEF_S)} if name == "brief" else {}),
        }
        log = self.ctx.settings.data_dir / f"{name}.log"
        self.processes[name] = Process(name, [sys.executable, "-c", MAIN], env, log)
        self.processes[name].start()

    async def _info(self, name: str) -> WorkerInfo | None:
        pid = self.processes[name].pid
        found = [w for w in await self.ctx.store.workers() if w.id == name and w.pid == pid]
        return found[0] if found else None

    async def address(self, name: str) -> str:
        """On SWAP, as soon as it listens there."""
        await until(lambda: self._info(name), lambda info: info is not None and info.status == "ready")
        info = await self._info(name)
        assert info is not None
        return info.address

    async def have(self, wanted: WeightVersion, *names: str) -> None:
        """Until the workers themselves say that they have the version."""
        for name in names:
            await until(functools.partial(self._has, await self.address(name), wanted))

    async def _has(self, address: str, wanted: WeightVersion) -> bool:
        ping = SwapCommand(job=REAL, epoch=1, action="ping", generation=0)
        try:
            return (await self.ctx.bus.request(SWAP, ping, 1.0, worker=address)).version == wanted
        except NoReply:
            return False

    async def asked(self, name: str, action: str) -> Callable[[], Awaitable[None]]:
        """Gives a wait for the next such command to the worker."""
        seen = asyncio.Event()

        async def look(message: Any) -> None:
            if action.encode() in message.data:
                seen.set()

        subscription = await self.ctx.bus.nc.subscribe(SWAP.at(worker=await self.address(name)), cb=look)
        await self.ctx.bus.nc.flush()

        async def wait() -> None:
            await soon(seen.wait())
            await subscription.unsubscribe()  # else the address would still be served when the worker is dead
            await self.ctx.bus.nc.flush()

        return wait

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self.processes[name]
        assert process.popen is not None
        process.signal(number)
        if number == signal.SIGKILL:
            process.popen.wait()
            process.wanted = False
            process.look()

    def end(self) -> None:
        for name, process in self.processes.items():
            if process.popen is not None:
                self.signal(name, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(ctx: Context) -> AsyncIterator[Fleet]:
    model = await asyncio.to_thread(toy_model, ctx.settings.data_dir / "model")
    await new_job(ctx.store, REAL, model={"base": str(model)})
    fleet = Fleet(ctx)
    try:
        yield fleet
    finally:
        fleet.end()


async def test_worker_killed_between_swaps_holds_up_nobody_and_its_successor_joins(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a", "b")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, 1000)
        await fleet.have(version(1), "a", "b")
        fleet.signal("b", signal.SIGKILL)
        killed = time.monotonic()
        await trainer.offer(2, 1000)
        await fleet.have(version(2), "a")
        await trainer.serves()
        print(f"killed between swaps: {trainer.served[version(2)] - killed:.2f} s")
        await trainer.serve(3, 1000)  # its heartbeat has not run out yet
        await fleet.start("b")
        await fleet.have(version(3), "a", "b")
        assert trainer.publisher.workers == 2


async def test_worker_killed_during_a_transfer_holds_up_nobody(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a", "b")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, LARGE)
        await fleet.have(version(1), "a", "b")
        sending = await fleet.asked("b", "receive")
        fleet.signal("b", signal.SIGSTOP)
        await trainer.offer(2, LARGE)
        await sending()  # and stands still: it does not read
        fleet.signal("b", signal.SIGKILL)
        killed = time.monotonic()
        await fleet.have(version(2), "a")
        await trainer.serves()
        print(f"killed during a transfer: {trainer.served[version(2)] - killed:.2f} s")


async def test_worker_that_dies_while_it_joins_holds_up_nobody(ctx: Context, fleet: Fleet) -> None:
    await fleet.start("a")
    died: list[float] = []

    async def dies(command: SwapCommand) -> None:
        await doomed.stop_serving()
        died.append(time.monotonic())
        await asyncio.Event().wait()

    doomed = FakeWorker(ctx, "doomed", dies, REAL)
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, 1000)
        await fleet.have(version(1), "a")
        async with running(doomed.live()):
            await until(lambda: died)
            await trainer.offer(2, 1000)
            await fleet.have(version(2), "a")
            await trainer.serves()
        print(f"killed while it joins: {trainer.served[version(2)] - died[0]:.2f} s")


@pytest.mark.parametrize("values", [1000, LARGE], ids=["buffered", "large"])
async def test_worker_that_hangs_is_left_out_until_it_goes_on(ctx: Context, fleet: Fleet, values: int) -> None:
    await fleet.start("a", "brief")
    async with training(ctx, REAL, "cpu") as trainer:
        await trainer.offer(1, values)
        await fleet.have(version(1), "a", "brief")
        fleet.signal("brief", signal.SIGSTOP)
        stopped = time.monotonic()
        await trainer.serve(2, values)
        print(f"hangs: {trainer.served[version(2)] - stopped:.2f} s")
        await fleet.have(version(2), "a")
        await trainer.serve(3, values)
        await fleet.have(version(3), "a")
        fleet.signal("brief", signal.SIGCONT)
        await fleet.have(version(3), "a", "brief")


# --- workers that fail ----------------------------------------------------------------------------------------------


class FakeWorker:
    """Beats, and answers the trainer as it is told, in this process."""

    def __init__(
        self,
        ctx: Context,
        name: str,
        take: Callable[[SwapCommand], Awaitable[None]],
        job: str = FAKE,
        follows: str = "",
    ) -> None:
        """`follows`: the job whose live policy `job` serves."""
        self.ctx, self.take = ctx, take
        self.info = WorkerInfo(
            id=name,
            incarnation="i",
            pool=Pool.ROLLOUT,
            host="here",
            pid=1,
            job=job,
            epoch=1,
            status="ready",
            address=f"{name}-i",
            detail={"follows": follows} if follows else {},
        )
        self.version: WeightVersion | None = None
        self.asked: list[str] = []
        self.busy = False
        self._subscription: Subscription | None = None

    async def live(self) -> None:
        await self.serve()
        try:
            while True:
                await self.ctx.store.beat(self.info, TTL_S)
                await asyncio.sleep(0.1)
        finally:
            await self.stop_serving()
            await self.ctx.store.leave(self.info)

    async def serve(self) -> None:
        self._subscription = await self.ctx.bus.serve(SWAP, self._answer, worker=self.info.address)

    async def starts_anew(self) -> None:
        """Its lease is taken and given again: the same process with another engine."""
        await self.stop_serving()
        self.info = msgspec.structs.replace(self.info, address=f"{self.info.id}-again")
        self.version, self.asked = None, []
        await self.serve()

    async def stop_serving(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    def has_done(self, action: str, count: int) -> bool:
        return self.asked.count(action) >= count

    async def _answer(self, command: SwapCommand) -> SwapReply:
        error = ""
        if command.action == "ping":
            error = "busy" if self.busy else ""
        else:
            self.busy = True
            self.asked.append(command.action)
            try:
                await self.take(command)
                self.version = command.version or self.version
            except SwapError as failure:
                error = str(failure)
            self.busy = False
        return SwapReply(worker=self.info.id, incarnation="i", ok=not error, error=error, version=self.version)


async def takes(command: SwapCommand) -> None:
    """Every command succeeds."""


async def refuses(command: SwapCommand) -> None:
    if command.action == "receive":
        raise SwapError("the disk is on fire")


@pytest_asyncio.fixture(loop_scope="module")
async def brief(ctx: Context) -> Context:
    """As `ctx`, but swaps must be quick."""
    return dataclasses.replace(ctx, settings=ctx.settings.model_copy(update={"swap_timeout_s": BRIEF_S}))


async def failure_of(publisher: Publisher) -> str:
    with pytest.raises(JobFailed) as failed:
        await soon(publisher.run())
    return str(failed.value)


async def test_job_fails_with_the_reason_when_no_worker_ever_takes_its_weights(ctx: Context) -> None:
    worker, trainer = FakeWorker(ctx, "w", refuses), Trainer(ctx, FAKE, "none")
    await trainer.offer(3)
    async with running(worker.live()):
        reason = await failure_of(trainer.publisher)
    assert "no rollout worker could take weights 1.3, 6 attempts in a row; last: w: the disk is on fire" in reason
    assert worker.asked == ["join", "receive"] * 6 and trainer.served == {}


async def test_worker_that_always_fails_does_not_fail_the_job_of_the_others(ctx: Context) -> None:
    good, bad = FakeWorker(ctx, "good", takes), FakeWorker(ctx, "bad", refuses)
    async with running(good.live()), running(bad.live()), training(ctx, FAKE, "none") as trainer:
        for step in range(1, 13):
            await trainer.offer(step)
            tried = bad.asked.count("receive")
            await trainer.serves()
            assert good.version == version(step)
            await until(functools.partial(bad.has_done, "receive", tried + 1))
        assert good.version == version(12) and bad.version is None and len(trainer.served) == 12


async def test_worker_that_is_tried_again_waits_longer_each_time(ctx: Context) -> None:
    at: list[float] = []

    async def notes(command: SwapCommand) -> None:
        if command.action == "receive":
            at.append(time.monotonic())
            raise SwapError("no")

    good = FakeWorker(ctx, "good", takes)
    async with (
        running(good.live()),
        running(FakeWorker(ctx, "bad", notes).live()),
        training(ctx, FAKE, "none", retry_s=(0.1, 60.0)) as trainer,
    ):
        await trainer.offer(1)
        await until(lambda: len(at) == 4)
    assert at[1] - at[0] >= 0.1 and at[2] - at[1] >= 0.2 and at[3] - at[2] >= 0.4


async def never_joins(command: SwapCommand) -> None:
    if command.action == "join":
        raise SwapError("no way there")


async def test_follower_that_never_joins_does_not_fail_the_job_that_it_follows(ctx: Context) -> None:
    own = FakeWorker(ctx, "own", takes)
    follower = FakeWorker(ctx, "follower", never_joins, job="chat", follows=FAKE)
    async with running(own.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        async with running(follower.live()):
            # Many steps' time without a new version: nothing else is published meanwhile.
            await until(lambda: follower.asked.count("join") > 2 * (trainer.publisher.max_attempts + 2))
            await trainer.serve(2)
    assert own.version == version(2)


async def test_job_whose_own_worker_is_stuck_fails_though_a_follower_is_well(ctx: Context) -> None:
    own, trainer = FakeWorker(ctx, "own", takes), Trainer(ctx, FAKE, "none")
    own.busy = True
    follower = FakeWorker(ctx, "follower", takes, job="chat", follows=FAKE)
    await trainer.offer(1)
    async with running(own.live()), running(follower.live()):
        assert "6 attempts in a row; last: own: busy" in await failure_of(trainer.publisher)
    assert trainer.served == {}


async def gets_stuck(command: SwapCommand) -> None:
    if command.action == "receive":
        await asyncio.Event().wait()


async def test_worker_that_comes_back_with_a_new_engine_gets_the_weights_that_its_old_one_had(ctx: Context) -> None:
    worker = FakeWorker(ctx, "w", takes)
    async with running(worker.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        await worker.starts_anew()
        await until(lambda: worker.version == version(1))
    assert worker.asked == ["join", "receive"]


async def test_worker_that_is_stuck_in_a_swap_is_not_waited_for_again(ctx: Context, brief: Context) -> None:
    good, stuck = FakeWorker(ctx, "good", takes), FakeWorker(ctx, "stuck", gets_stuck)
    async with running(good.live()), running(stuck.live()), training(brief, FAKE, "none") as trainer:
        await trainer.serve(1)
        for step in range(2, 8):
            await trainer.serve(step)
        assert stuck.asked == ["join", "receive"]


async def test_job_fails_when_its_only_worker_is_stuck(ctx: Context, brief: Context) -> None:
    stuck, trainer = FakeWorker(ctx, "stuck", gets_stuck), Trainer(brief, FAKE, "none")
    await trainer.offer(1)
    async with running(stuck.live()):
        assert "6 attempts in a row; last: stuck: busy" in await failure_of(trainer.publisher)


class SlowWorker:
    """A toy engine that is late for the transfer, and then loads for a while."""

    def __init__(self, late_s: float, load_s: float, timeout_s: float) -> None:
        self.late_s = late_s
        self.engine = ToyEngine(ToySpec(swap_seconds=load_s), eos_id=1, vocab_size=8, context_length=8,
                                group_timeout_s=timeout_s)  # fmt: skip

    async def take(self, command: SwapCommand) -> None:
        if command.action == "join":
            await self.engine.join(command)
        else:
            await asyncio.sleep(self.late_s)
            await self.engine.receive(command)


async def test_each_phase_has_its_timeout(monkeypatch: pytest.MonkeyPatch, new_context: NewContext) -> None:
    monkeypatch.setattr(transport, "SLOWEST_LINK", BUCKET_BYTES / 30)
    timeout_s = 1.5
    slow = SlowWorker(late_s=1.8, load_s=1.8, timeout_s=timeout_s)
    settings = {"swap_timeout_s": timeout_s, "worker_ttl_s": TTL_S}
    async with new_context("trainer-0", **settings) as ctx:
        worker = FakeWorker(ctx, "w", slow.take)
        async with running(worker.live()), training(ctx, FAKE, "cpu") as trainer:
            await trainer.offer(1, LARGE)  # 30 s more for each
            await until(lambda: worker.version == version(1))
            assert worker.asked == ["join", "receive"]
        slow.late_s = 0.0
        few = Trainer(ctx, FAKE, "cpu", max_attempts=0)
        await few.offer(2, 1000)
        async with running(worker.live()):
            reason = await failure_of(few.publisher)
        assert "last: w: no answer 1.5 s after" in reason and "swap_timeout_s = 1.5" in reason
        await slow.engine.close()
