"""The publisher and rollout workers that fail: which failures end a job, and which delay nobody."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time

import pytest
import pytest_asyncio

from opentinker.services.rollout_worker.engines.base import SwapError
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.trainer.learners.base import BUCKET_BYTES
from opentinker.services.trainer.weights.publisher import Publisher
from opentinker.shared.nn import transport
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import ToySpec
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SwapCommand
from tests.conftest import NewContext, soon, until
from tests.integration.trainer.publisher.published_weights import (
    BRIEF_S,
    FAKE,
    LARGE,
    TTL_S,
    FakeWorker,
    Trainer,
    takes,
    training,
)
from tests.support.factories import version
from tests.support.scheduling import running

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
            await trainer.offer(2, 1000, base_bytes=BUCKET_BYTES)  # loading reads them, which do not travel
            slow.late_s = 0.0
            await until(lambda: worker.version == version(2))
            assert worker.asked == ["join", "receive", "receive"]
        few = Trainer(ctx, FAKE, "cpu", max_attempts=0)
        await few.offer(3, 1000)
        async with running(worker.live()):
            reason = await failure_of(few.publisher)
        assert "last: w: no answer 1.5 s after" in reason and "swap_timeout_s = 1.5" in reason
        await slow.engine.close()
