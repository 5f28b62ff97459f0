"""Replacement of child processes, and the share of a worker that one environment may take."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

import pytest

from opentinker.envs.base import user
from opentinker.envs.registry import find
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.child_process import EnvironmentChild
from opentinker.envs.runtime.child_protocol import ChildAnswer, frame
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.env_protocol import (
    CloseSession,
    SessionReply,
)
from opentinker.shared.types.errors import SpecError
from tests.conftest import soon, until
from tests.samples.slow_imports import alive
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import opening


async def process_of(sessions: Sessions, name: str, environment: str) -> int:
    opened = await sessions.open(opening(session=name, environment=environment))
    assert opened.failure is None, opened.error
    return int(opened.messages[0].text)


async def test_a_child_is_replaced_after_so_many_episodes_but_never_in_the_middle_of_one() -> None:
    host = ChildPool(children=1, per_child=2, modules=True)
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    leaky = "tests.samples.env_samples:Leaky"
    try:
        first = await process_of(sessions, "a", leaky)
        assert await process_of(sessions, "b", leaky) == first
        await sessions.close(CloseSession(session="b"))
        await until(lambda: not sessions._closing)
        assert (await sessions.open(opening(session="c", environment=leaky))).busy, "a place, but not for a third"
        assert (await sessions.step(step(0, session="a"))).reward == 1.0 and alive(first)
        await sessions.close(CloseSession(session="a"))
        await until(lambda: not sessions._closing)
        second = await process_of(sessions, "c", leaky)
        assert second != first
        await until(lambda: not alive(first))
        assert (await sessions.step(step(0, session="c"))).reward == 1.0
    finally:
        await sessions.drain(0.01)
        await host.close()


async def test_a_child_that_holds_too_much_is_replaced_once_its_session_is_over(sessions: Sessions) -> None:
    fat = "tests.samples.env_samples:Fat"
    first = await process_of(sessions, "a", fat)
    assert (await sessions.step(step(0, session="a"))).failure is None
    assert (await sessions.step(step(1, session="a"))).failure is None and alive(first)
    assert await process_of(sessions, "b", fat) != first
    await sessions.close(CloseSession(session="a"))
    await until(lambda: not alive(first))
    assert (await sessions.step(step(0, session="b"))).failure is None


async def test_sessions_take_as_much_of_a_worker_as_their_environment_costs() -> None:
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True))
    costly, cheap = "tests.samples.env_samples:Costly", "tests.samples.env_samples:Cheap"
    for name in "abc":
        assert not (await sessions.open(opening(session=name, environment=costly))).busy
    assert (await sessions.open(opening(session="d", environment=costly))).busy
    assert not (await sessions.open(opening(session="e", environment=cheap))).busy
    assert (sessions.active, sessions.load) == (4, 8.0)
    assert (await sessions.open(opening(session="f", environment=cheap))).busy
    await sessions.close(CloseSession(session="a"))
    assert sessions.load == 5.5
    small = Sessions("w", limit=1, resolver=Resolver(modules=True))
    assert not (await small.open(opening(environment=costly))).busy, "alone it may"
    for each in (sessions, small):
        await each.drain(0.01)
        assert (each.active, each.load) == (0, 0.0)


def test_what_costs_nothing_or_recycles_no_process_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Free\.cost must be above 0, not 0\.0"):
        find("tests.samples.env_samples:Free", modules=True)
    with pytest.raises(SpecError, match="set blocking = True"):
        find("tests.samples.env_samples:NoProcess", modules=True)


def answering(*answers: ChildAnswer) -> EnvironmentChild:
    """A child that gives these answers once it has been called, whatever that was."""

    class Process:
        def __init__(self, descriptor: int) -> None:
            self.reason = ""
            self.over = asyncio.Event()
            self.socket = socket.socket(fileno=os.dup(descriptor))
            self.socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self.socket, self.answer)

        def answer(self) -> None:
            self.socket.recv(1 << 16)
            self.socket.send(b"".join(map(frame, answers)))
            asyncio.get_running_loop().remove_reader(self.socket)

        def kill(self, reason: str) -> None:
            self.reason = self.reason or reason
            self.over.set()

        async def wait(self) -> int:
            await self.over.wait()
            self.socket.close()
            return -9

    async def start(descriptor: int) -> Process:
        return Process(descriptor)

    return EnvironmentChild(start, "x of j", checked=True)


@pytest.mark.parametrize("more", [range(2, 20), [1]])
async def test_answers_to_calls_that_were_not_made_end_the_child(more: Sequence[int]) -> None:
    good = SessionReply(worker="", messages=[user("x")])
    child = answering(ChildAnswer(1, good), *(ChildAnswer(serial, good) for serial in more))
    assert (await soon(child.call("open", CloseSession(session="s")))).reply == good
    await soon(child.ended())
    assert "was not made or is answered" in child.gone
