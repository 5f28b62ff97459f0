"""Sessions of an env worker without a transport: every request gets one answer, in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.core import Ending, StopReason
from opentinker.shared.types.env_protocol import (
    CloseSession,
    OpenSession,
    SessionReply,
    StepSession,
)
from tests.conftest import until
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import COUNTING, MISBEHAVING, called, opening


async def test_episode_is_played_and_closed(sessions: Sessions) -> None:
    opened = await sessions.open(opening(turns=2))
    assert opened.messages[0].text == "row 3 seed 4"
    assert opened.worker == "w"
    assert sessions.active == 1
    first, last = await sessions.step(step(0)), await sessions.step(step(1))
    assert (first.reward, first.done, last.reward, last.done) == (1.0, False, 1.0, True)
    assert last.messages == []
    assert sessions.active == 0
    await until(lambda: called() == ["open", "step 0", "step 1", "close"])


async def test_repeated_requests_are_answered_from_memory(sessions: Sessions) -> None:
    request = opening(turns=2)
    first = await sessions.open(request)
    assert await sessions.open(request) == first
    played = await sessions.step(step(0))
    assert await sessions.step(step(0)) == played
    assert await sessions.open(request) == first
    last = await sessions.step(step(1))
    assert await sessions.step(step(1)) == last
    await until(lambda: called() == ["open", "step 0", "step 1", "close"])


async def test_request_repeated_while_it_is_played_waits_for_the_same_answer(sessions: Sessions) -> None:
    await sessions.open(opening(environment=MISBEHAVING, deadline_s=1.0, how="hang"))
    replies = await asyncio.gather(*(sessions.step(step(0)) for _ in range(5)))
    assert len({id(reply) for reply in replies}) == 1
    opens = await asyncio.gather(*(sessions.open(opening(session="t")) for _ in range(5)))
    assert len({id(reply) for reply in opens}) == 1


async def test_a_repeat_that_is_given_up_does_not_disturb_the_turn(sessions: Sessions) -> None:
    await sessions.open(opening(environment=MISBEHAVING, deadline_s=0.4, how="hang"))
    playing = asyncio.create_task(sessions.step(step(0)))
    repeat = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    repeat.cancel()
    assert (await playing).failure == Ending.ENV_TIMEOUT


@pytest.mark.parametrize("turn", [-3, 1, 2, 10**9])
async def test_turn_out_of_order_is_refused_and_the_session_goes_on(sessions: Sessions, turn: int) -> None:
    await sessions.open(opening())
    refused = await sessions.step(step(turn))
    assert refused.failure == Ending.ENV_ERROR
    assert "out of order" in refused.error
    assert (await sessions.step(step(0))).failure is None


async def test_unknown_session_is_lost(sessions: Sessions) -> None:
    assert (await sessions.step(step(0, session="nobody"))).failure == Ending.ENV_LOST
    assert (await sessions.close(CloseSession(session="nobody"))).failure is None


async def test_step_after_the_end_is_refused(sessions: Sessions) -> None:
    await sessions.open(opening(turns=1))
    assert (await sessions.step(step(0))).done
    late = await sessions.step(step(1))
    assert late.failure == Ending.ENV_ERROR
    assert "ended (done)" in late.error


async def test_close_ends_a_turn_in_play(sessions: Sessions) -> None:
    await sessions.open(opening(environment=MISBEHAVING, how="hang"))
    playing = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    await sessions.close(CloseSession(session="s"))
    assert (await playing).failure == Ending.CANCELLED
    assert sessions.active == 0


IDS = st.sampled_from(["a", "b"])

OPENS = st.builds(
    OpenSession,
    job=st.just("j"),
    session=IDS,
    environment=st.sampled_from(["copy_digits", "guess_number", COUNTING, MISBEHAVING, "", ":", "no.where:X"]),
    config=st.dictionaries(
        st.sampled_from(["digits", "turns", "how", "x"]), st.one_of(st.integers(-2, 5), st.text(max_size=3)), max_size=2
    ),
    row=st.integers(-(2**63), 2**63 - 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    deadline_s=st.one_of(st.just(5.0), st.floats()),
)

STEPS = st.builds(
    StepSession, session=IDS, turn=st.integers(-1, 4), text=st.text(max_size=8), stop=st.sampled_from(StopReason)
)

CLOSES = st.builds(CloseSession, session=IDS)


@settings(max_examples=150, deadline=None)
@given(requests=st.lists(st.one_of(OPENS, STEPS, STEPS, CLOSES), max_size=25), together=st.booleans())
def test_any_requests_in_any_order_each_get_one_reply(requests: list[Any], together: bool) -> None:
    asyncio.run(exchange(requests, together))


async def test_a_session_that_is_closed_while_it_opens_ends_once() -> None:
    own = opening(environment="copy_digits")
    opens = [msgspec.structs.replace(own, deadline_s=late_s, answer_within_s=0.0) for late_s in (5.0, 0.0)]
    close = CloseSession(session="s")
    await exchange([opens[0], close, opens[1], close], together=False)


async def exchange(requests: list[Any], together: bool) -> None:
    sessions = Sessions("w", limit=2, resolver=Resolver(modules=True))
    ask: dict[type, Callable[[Any], Awaitable[SessionReply]]] = {
        OpenSession: sessions.open,
        StepSession: sessions.step,
        CloseSession: sessions.close,
    }
    if together:
        replies = list(await asyncio.gather(*(ask[type(request)](request) for request in requests)))
    else:
        replies = [await ask[type(request)](request) for request in requests]
    assert len(replies) == len(requests)
    for reply in replies:
        assert isinstance(reply, SessionReply)
        assert (reply.failure is None) == (reply.error == "")
    await sessions.drain(0.0)
    assert sessions.active == 0
    assert not (await asyncio.gather(sessions.open(opening())))[0].messages, "a drained worker takes nothing"
