"""Limits of sessions of an env worker, its waiting line, and its drain."""

from __future__ import annotations

import asyncio

import msgspec

from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    CloseSession,
    OpenSession,
)
from tests.conftest import until
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import called, opening


def patient(session: str, room_within_s: float = 60.0) -> OpenSession:
    """It stands in line."""
    return msgspec.structs.replace(opening(session), room_within_s=room_within_s)


async def test_full_worker_says_busy_and_takes_sessions_again_later(sessions: Sessions) -> None:
    await fill(sessions)
    assert (await sessions.open(opening(session="ninth"))).busy
    assert not (await sessions.open(opening(session="0"))).busy, "a repeated open needs no room"
    await sessions.close(CloseSession(session="0"))
    assert not (await sessions.open(opening(session="ninth"))).busy


async def fill(sessions: Sessions) -> None:
    for number in range(8):
        assert not (await sessions.open(opening(session=str(number)))).busy


async def in_line(sessions: Sessions, count: int) -> None:
    await until(lambda: len(sessions._queue) == count)


async def test_who_stands_in_line_gets_places_in_turn(sessions: Sessions) -> None:
    await fill(sessions)
    waiting = []
    for name in "abc":
        waiting.append(asyncio.create_task(sessions.open(patient(name))))
        await in_line(sessions, len(waiting))
    again = asyncio.create_task(sessions.open(patient("b")))
    await in_line(sessions, 4)
    assert REGISTRY.get_sample_value("opentinker_env_waiting") == 4
    assert (await sessions.open(patient("late", 0.01))).busy, "it does not wait for ever"
    await sessions.close(CloseSession(session="0"))
    assert not (await waiting[0]).busy
    assert not waiting[1].done() and not waiting[2].done() and sessions.active == 8
    await sessions.close(CloseSession(session="1"))
    assert not (await waiting[1]).busy
    await sessions.close(CloseSession(session="2"))
    assert not (await waiting[2]).busy
    assert (sessions.active, sessions.load) == (8, 8.0)
    await sessions.close(CloseSession(session="3"))
    assert await again == await waiting[1], "one session, asked for twice"
    assert (sessions.active, sessions.load) == (7, 7.0)


async def test_room_that_a_cheap_environment_leaves_goes_to_who_stands_in_line() -> None:
    sessions = Sessions("w", limit=2, resolver=Resolver(modules=True))
    cheap = "tests.samples.env_samples:Cheap"  # each counts as 1 until its cost is known, which is 0.5
    first = [asyncio.create_task(sessions.open(opening(session=name, environment=cheap))) for name in "ab"]
    third = asyncio.create_task(sessions.open(msgspec.structs.replace(patient("c"), environment=cheap)))
    assert [(await task).busy for task in (*first, third)] == [False] * 3
    assert not (await sessions.open(opening(session="d", environment=cheap))).busy, "nobody is left in the line"
    await sessions.drain(0.01)


async def test_who_has_left_the_line_is_in_nobodys_way(sessions: Sessions) -> None:
    await fill(sessions)
    assert (await sessions.open(patient("late", 0.01))).busy
    await sessions.close(CloseSession(session="0"))
    assert not (await sessions.open(opening(session="next"))).busy


async def test_an_episode_that_stood_in_line_has_less_time_left(sessions: Sessions) -> None:
    await fill(sessions)
    waiting = asyncio.create_task(sessions.open(patient("a")))
    await in_line(sessions, 1)
    await sessions.close(CloseSession(session="0"))
    await waiting
    assert sessions._sessions["a"].request.deadline_s < 30.0


async def test_whoever_stands_in_line_at_a_worker_that_drains_asks_another(sessions: Sessions) -> None:
    await fill(sessions)
    waiting = asyncio.create_task(sessions.open(patient("a")))
    await in_line(sessions, 1)
    await sessions.drain(0.01)
    assert (await waiting).busy
    assert sessions.active == 0


async def test_draining_worker_finishes_its_sessions_and_takes_no_new_ones(sessions: Sessions) -> None:
    await sessions.open(opening(turns=1))
    draining = asyncio.create_task(sessions.drain(10.0))
    await until(lambda: sessions.draining)
    assert (await sessions.open(opening(session="t"))).busy
    assert not draining.done()
    assert (await sessions.step(step(0))).done
    assert await draining == 0
    assert called()[-1] == "close"


async def test_drain_gives_up_on_what_does_not_finish(sessions: Sessions) -> None:
    await sessions.open(opening())
    assert await sessions.drain(0.05) == 1
    assert sessions.active == 0
    assert called()[-1] == "close"


async def test_answers_of_ended_sessions_expire(sessions: Sessions) -> None:
    for number in range(50):
        await sessions.open(opening(session=str(number), turns=1))
        assert (await sessions.step(step(0, session=str(number)))).done
    assert len(sessions._sessions) <= 10
    assert (await sessions.step(step(0, session="49"))).done
    assert (await sessions.step(step(0, session="0"))).failure == Ending.ENV_LOST
