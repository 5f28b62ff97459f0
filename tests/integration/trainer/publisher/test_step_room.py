"""Engines that sleep during optimizer steps: which are told, when, and for how long that may take."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from opentinker.services.rollout_worker.engines.base import SwapError
from opentinker.services.trainer.weights import publisher
from opentinker.services.trainer.weights.swap_requests import SwapFailure
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.swap import SwapCommand, SwapReply
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, soon, until
from tests.integration.trainer.publisher.published_weights import BRIEF_S, FAKE, FakeWorker, Trainer, takes, training
from tests.support.factories import version
from tests.support.scheduling import messages, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_engines_without_room_sleep_during_a_step_and_no_weights_move_meanwhile(ctx: Context) -> None:
    sleeper, other = FakeWorker(ctx, "sleeper", takes, sleeps=True), FakeWorker(ctx, "other", takes)
    async with running(sleeper.live()), running(other.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        await until(lambda: sleeper.version == other.version == version(1))
        before = len(sleeper.asked)
        async with trainer.publisher.room_for_step():
            assert sleeper.asked[before:] == ["sleep"]
            await trainer.offer(2)
            await asyncio.sleep(0.2)  # many times as long as it takes to publish
            assert "receive" not in sleeper.asked[before:] and other.version == version(1)
        await trainer.serves()
        await until(lambda: sleeper.version == version(2))
    assert sleeper.asked[before : before + 3] == ["sleep", "wake", "receive"]
    assert not {"sleep", "wake"} & {*other.asked}


async def test_time_in_which_engines_fall_asleep_and_wake_is_on_the_timeline(ctx: Context) -> None:
    async def take(command: SwapCommand) -> None:
        await asyncio.sleep(0.3 if command.action == "wake" else 0.0)

    sleeper = FakeWorker(ctx, "sleeper", take, sleeps=True)
    parts = await messages(ctx.bus, TIMELINE, job=FAKE, worker="trainer-0")
    async with running(sleeper.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        async with trainer.publisher.room_for_step():
            pass
        await trainer.lanes.report()
        await until(lambda: parts)
    (part,) = parts
    seconds = {one.kind: one.end - one.start for one in part.segments if one.lane == "swap"}
    assert seconds.keys() - {"find"} == {"join", "publish", "sleep", "wake"} and seconds["wake"] >= 0.3


async def test_engines_wake_after_a_step_that_failed(ctx: Context) -> None:
    sleeper = FakeWorker(ctx, "sleeper", takes, sleeps=True)
    async with running(sleeper.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        with pytest.raises(JobFailed, match="out of memory"):
            async with trainer.publisher.room_for_step():
                raise JobFailed("out of memory")
    assert sleeper.asked[-2:] == ["sleep", "wake"]


async def test_engines_are_remembered_while_another_group_forms(ctx: Context) -> None:
    joins, refuse = asyncio.Event(), False
    joins.set()

    async def take(command: SwapCommand) -> None:
        if command.action == "receive" and refuse:
            raise SwapError("the disk is on fire")
        if command.action == "join":
            await joins.wait()

    sleeper, other = FakeWorker(ctx, "sleeper", takes, sleeps=True), FakeWorker(ctx, "other", take)
    async with running(sleeper.live()), running(other.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        await until(lambda: sleeper.version == other.version == version(1))
        refuse, before = True, other.asked.count("join")
        joins.clear()
        await trainer.serve(2)  # breaks the group
        await until(lambda: other.has_done("join", before + 1))  # and the next one does not form
        asked = len(sleeper.asked)

        async def step() -> None:
            async with trainer.publisher.room_for_step():
                assert sleeper.asked[-1] == "sleep"

        async with running(step()) as stepping:
            await asyncio.sleep(0.1)
            assert not stepping.done() and "sleep" not in sleeper.asked[asked:]
            refuse = False
            joins.set()
            await soon(asyncio.shield(stepping))


async def test_the_first_step_of_a_trainer_finds_the_engines_of_its_predecessor(ctx: Context) -> None:
    sleeper = FakeWorker(ctx, "sleeper", takes, sleeps=True)
    async with running(sleeper.live()):
        await until(ctx.store.workers)
        one = Trainer(ctx, FAKE, "none").publisher
        async with one.room_for_step():
            assert sleeper.asked == ["sleep"]
            before = one.room.asleep_s
            assert 0.0 < before < one.room.asleep_s
        after = one.room.asleep_s
    assert sleeper.asked == ["sleep", "wake"] and after == one.room.asleep_s


@pytest.mark.parametrize("why", ["busy", "lost"])
async def test_a_predecessors_engine_sleeps_whose_first_answer_is_refused_or_lost(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    sleeper = FakeWorker(ctx, "sleeper", takes, sleeps=True)
    sleeper.busy = why == "busy"
    one = Trainer(ctx, FAKE, "none").publisher
    ping_all, lost = one._calls.ping_all, iter([why == "lost"])

    async def ping(workers: Sequence[WorkerInfo]) -> list[SwapReply | SwapFailure]:
        return [SwapFailure("no reply", absent=True)] if next(lost, False) else await ping_all(workers)

    monkeypatch.setattr(one._calls, "ping_all", ping)
    async with running(sleeper.live()):
        await until(ctx.store.workers)
        async with one.room_for_step():
            assert sleeper.asked == ["sleep"]


async def test_an_engine_that_hangs_outside_the_group_neither_delays_a_step_nor_breaks_the_group(ctx: Context) -> None:
    async def hang(_: SwapCommand) -> None:
        await asyncio.Event().wait()

    sleeper, other = FakeWorker(ctx, "sleeper", hang, sleeps=True), FakeWorker(ctx, "other", takes)
    sleeper.busy = True
    async with running(sleeper.live()), running(other.live()), training(ctx, FAKE, "none") as trainer:
        await trainer.serve(1)
        await until(lambda: trainer.publisher.room.sleepers)
        for _ in range(2):
            async with asyncio.timeout(WAIT_S), trainer.publisher.room_for_step():
                assert sleeper.asked[-1] == "sleep"
        await trainer.serve(2)
        assert other.asked.count("join") == 1


@pytest.mark.parametrize("action", ["sleep", "wake"])
async def test_an_engine_that_does_not_obey_delays_a_step_no_longer_than_a_swap_and_joins_again(
    ctx: Context, action: str
) -> None:
    goes_on = asyncio.Event()
    brief = dataclasses.replace(ctx, settings=ctx.settings.model_copy(update={"swap_timeout_s": BRIEF_S}))

    async def take(command: SwapCommand) -> None:
        if command.action == action:
            await goes_on.wait()

    sleeper = FakeWorker(ctx, "sleeper", take, sleeps=True)
    async with running(sleeper.live()), training(brief, FAKE, "none") as trainer:
        await trainer.serve(1)
        async with asyncio.timeout(WAIT_S), trainer.publisher.room_for_step():
            assert sleeper.asked[-1] == "sleep"
        joined = sleeper.asked.count("join")
        goes_on.set()
        await until(lambda: sleeper.has_done("join", joined + 1))
        await trainer.serve(2)


async def test_an_engine_whose_process_is_gone_is_not_told_to_sleep(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = FakeWorker(ctx, "sleeper", takes, sleeps=True), FakeWorker(ctx, "other", takes)
    async with running(other.live()), training(ctx, FAKE, "none") as trainer:
        async with running(sleeper.live()):
            await trainer.serve(1)
            await until(lambda: sleeper.version == version(1))
        async with trainer.publisher.room_for_step():
            pass
        assert not trainer.publisher.room.sleepers
        await until(lambda: trainer.publisher.workers == 1)
        released = Mock()
        monkeypatch.setattr(publisher, "release_unused", released)
        async with trainer.publisher.room_for_step():
            pass
        released.assert_called_once()  # the engine may start again and measure
