"""Sessions of an env worker without a transport: one answer per turn, and no environment can hurt another."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.envs.base import user
from opentinker.envs.registry import find
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.child_process import EnvironmentChild
from opentinker.envs.runtime.child_protocol import ChildAnswer, frame
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.services.env_worker.service import check_environment
from opentinker.shared.messaging.reply_validation import OBSERVATION_BYTES, PROMPT_IDS, sound
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending, Message, StopReason
from opentinker.shared.types.env_protocol import (
    IMPORTED,
    OPEN,
    CloseSession,
    EnvCheck,
    OpenSession,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.errors import SpecError
from tests.conftest import soon, until
from tests.samples import env_samples
from tests.samples.slow_imports import Gate, alive, write_module
from tests.support import playing
from tests.support.playing import step

BLOCKWISE = "tests.samples.env_samples:Blockwise"
COUNTING, MISBEHAVING, BLOCKING = (
    f"tests.samples.env_samples:{name}" for name in ("Counting", "Misbehaving", "Blocking")
)


def opening(session: str = "s", environment: str = COUNTING, deadline_s: float = 30.0, **config: Any) -> OpenSession:
    return playing.opening(environment, session, row=3, seed=4, deadline_s=deadline_s, **config)


def patient(session: str, room_within_s: float = 60.0) -> OpenSession:
    """It stands in line."""
    return msgspec.structs.replace(opening(session), room_within_s=room_within_s)


@pytest.fixture
async def host() -> AsyncIterator[ChildPool]:
    host = ChildPool(children=2, per_child=2, modules=True)
    yield host
    await host.close()


@pytest.fixture
async def sessions(host: ChildPool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sessions]:
    monkeypatch.setattr("opentinker.envs.runtime.sessions.CLOSE_S", 0.5)
    env_samples.Counting.calls.clear()
    env_samples.LET_GO.clear()
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host)
    yield sessions
    env_samples.LET_GO.set()
    await sessions.drain(0.01)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def called(tag: str = "") -> list[str]:
    return [call.removeprefix(tag).strip() for call in env_samples.Counting.calls if call.split(" ")[0] == tag]


# --- the ordinary life ----------------------------------------------------------------------------------------------


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


# --- limits ---------------------------------------------------------------------------------------------------------


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


async def test_answers_of_ended_sessions_expire(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.envs.runtime.sessions.REMEMBERED", 10)
    for number in range(50):
        await sessions.open(opening(session=str(number), turns=1))
        assert (await sessions.step(step(0, session=str(number)))).done
    assert len(sessions._sessions) <= 10
    assert (await sessions.step(step(0, session="49"))).done
    assert (await sessions.step(step(0, session="0"))).failure == Ending.ENV_LOST


# --- environments that misbehave ------------------------------------------------------------------------------------

BAD = {
    "raise": (Ending.ENV_ERROR, "the board is on fire"),
    "raise_surrogate": (Ending.ENV_ERROR, "RuntimeError: ?"),
    "exit": (Ending.ENV_ERROR, "SystemExit: 3"),
    "cancel": (Ending.ENV_ERROR, "CancelledError"),
    "hang": (Ending.ENV_TIMEOUT, "0.5 s"),
    "ignore_cancel": (Ending.ENV_TIMEOUT, "0.5 s"),
    "nan": (Ending.ENV_BAD_REPLY, "reward must be finite, not nan"),
    "infinite_metric": (Ending.ENV_BAD_REPLY, "metrics['x'] must be finite"),
    "text_reward": (Ending.ENV_BAD_REPLY, "reward must be a number, not str '1.0'"),
    "huge_reward": (Ending.ENV_BAD_REPLY, "too large"),
    "truncated_alone": (Ending.ENV_BAD_REPLY, "truncated without done"),
    "tuple": (Ending.ENV_BAD_REPLY, "must return a Step, not tuple"),
    "done_text": (Ending.ENV_BAD_REPLY, "done must be True or False, not str 'yes'"),
    "text_messages": (Ending.ENV_BAD_REPLY, "list of Message, not str"),
    "dict_message": (Ending.ENV_BAD_REPLY, "one item is dict"),
    "number_content": (Ending.ENV_BAD_REPLY, "content must be str, not int 3"),
    "surrogate": (Ending.ENV_BAD_REPLY, "not valid Unicode"),
    "oversized": (Ending.ENV_BAD_REPLY, f"at most {OBSERVATION_BYTES:,} are allowed"),
    "oversized_call": (Ending.ENV_BAD_REPLY, f"at most {OBSERVATION_BYTES:,} are allowed"),
    "unsendable_call": (Ending.ENV_BAD_REPLY, "cannot be sent"),
    "oversized_name": (Ending.ENV_BAD_REPLY, f"at most {OBSERVATION_BYTES:,} are allowed"),
    "many_ids": (Ending.ENV_BAD_REPLY, f"at most {PROMPT_IDS:,} are allowed"),
    "many_metrics": (Ending.ENV_BAD_REPLY, "at most 64"),
}


@pytest.mark.parametrize("how", BAD)
async def test_misbehaving_environment_ends_its_own_episode_with_a_reason(sessions: Sessions, how: str) -> None:
    ending, text = BAD[how]
    other = await sessions.open(opening(session="other", tag="other"))
    assert other.failure is None
    deadline_s = 0.5 if ending == Ending.ENV_TIMEOUT else 30.0
    assert (await sessions.open(opening(environment=MISBEHAVING, deadline_s=deadline_s, how=how))).failure is None
    reply = await sessions.step(step(0))
    assert reply.failure == ending
    assert text in reply.error
    assert codec.decode(SessionReply, codec.encode(reply)) == reply, "it can be sent"
    assert sessions.active == 1
    assert (await sessions.step(step(0))) == reply, "the failure is remembered"
    assert (await sessions.step(step(0, session="other"))).reward == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        SessionReply(worker="w", messages=[env_samples.calling({"x": "x" * OBSERVATION_BYTES})]),
        SessionReply(worker="w", messages=[Message(role="tool", tool_call_id="x" * OBSERVATION_BYTES)]),
        SessionReply(worker="w", prompt_ids=[1] * (PROMPT_IDS + 1)),
    ],
)
def test_the_same_holds_for_replies_of_strangers(reply: SessionReply) -> None:
    judged = sound(reply, "here", player=False)
    assert (judged.failure, judged.worker) == (Ending.ENV_BAD_REPLY, "here") and "are allowed" in judged.error
    assert sound(SessionReply(worker="w", prompt_ids=[1] * PROMPT_IDS), "here").failure is None


async def test_scalars_of_numpy_are_taken_for_flags_and_numbers_and_no_coroutine_for_an_answer() -> None:
    player, _ = await playing.local_episode(opening(environment=BLOCKWISE))
    reply = await player.step(step(0))
    assert (reply.reward, reply.done, reply.metrics) == (1.0, True, {"won": 1.0})
    player, _ = await playing.local_episode(opening(environment=BLOCKWISE, forgets="step"))
    reply = await player.step(step(0))
    assert reply.failure == Ending.ENV_BAD_REPLY
    assert reply.error == "Blockwise.step must be declared `async def`: it returned Step"


@pytest.mark.parametrize("how", ["raise", "exit", "hang", "tuple"])
async def test_environment_may_misbehave_in_open_too(sessions: Sessions, how: str) -> None:
    reply = await sessions.open(opening(environment=MISBEHAVING, deadline_s=0.5, how=how, in_open=True))
    expected = {"hang": Ending.ENV_TIMEOUT, "tuple": None}.get(how, Ending.ENV_ERROR)
    assert reply.failure == expected


@pytest.mark.parametrize(
    ("environment", "config", "problem"),
    [
        ("copy_digit", {}, "did you mean copy_digits"),
        ("copy_digits", {"digits": "many", "colour": 1}, "environment.config.digits"),
        ("no_module:X", {}, "cannot be imported"),
    ],
)
async def test_wrong_environment_or_config_is_explained(
    sessions: Sessions, environment: str, config: dict[str, Any], problem: str
) -> None:
    reply = await sessions.open(opening(environment=environment, **config))
    assert reply.failure == Ending.ENV_ERROR
    assert problem in reply.error
    assert sessions.active == 0


async def test_slow_open_is_answered_in_time_and_polled(sessions: Sessions, tmp_path: Path) -> None:
    files: dict[str, Any] = {name: str(tmp_path / name) for name in ("opens", "gate")}
    request = msgspec.structs.replace(
        opening(environment="tests.samples.env_samples:Slow", **files), answer_within_s=0.01
    )
    for _ in range(3):
        reply = await sessions.open(request)
        assert msgspec.structs.replace(reply, importing_s=0.0) == SessionReply(worker="w", opening=True)
    asked = [asyncio.create_task(sessions.step(step(OPEN))) for _ in range(2)]
    await asyncio.to_thread(Path(files["gate"]).touch)
    assert [reply.messages[0].text for reply in await asyncio.gather(*asked)] == ["row 3 seed 4"] * 2
    assert (await sessions.step(step(0))).reward == 1.0
    assert (await sessions.step(step(OPEN))).messages[0].text == "row 3 seed 4"
    assert (await sessions.step(step(OPEN, session="other"))).failure == Ending.ENV_LOST


async def test_deadline_covers_the_whole_episode(sessions: Sessions) -> None:
    await sessions.open(opening(deadline_s=0.1))
    await until(lambda: sessions.active == 0)
    late = await sessions.step(step(0))
    assert late.failure == Ending.ENV_TIMEOUT
    assert "0.1 s" in late.error
    await until(lambda: called() == ["open", "close"])


async def start_children(sessions: Sessions, number: int) -> None:
    """Have the child processes up, so that a short deadline does not run while they start."""
    names = [f"start-{i}" for i in range(number)]
    await asyncio.gather(*(sessions.open(opening(session=name, environment=BLOCKING)) for name in names))
    for name in names:
        await sessions.close(CloseSession(session=name))
    await until(lambda: not sessions._closing)


async def test_an_import_that_takes_long_blocks_nobody_and_runs_once(
    host: ChildPool, sessions: Sessions, modules: Path
) -> None:
    began, gate = modules / "began", modules / "gate"
    code = f"""
import time
from pathlib import Path
from tests.samples.env_samples import Counting
with Path({str(began)!r}).open("a") as file:
    file.write("once")
while not Path({str(gate)!r}).exists():
    time.sleep(0.01)
"""
    write_module(modules, "slow_module", code)
    await sessions.open(opening(session="other", turns=1000))
    threads = threading.active_count()
    slow = "slow_module:Counting"
    opens = [asyncio.create_task(sessions.open(opening(session=f"s{i}", environment=slow))) for i in range(5)]
    checked = asyncio.create_task(check_environment(EnvCheck(name=slow, config={"x": 1}), sessions._resolver, host))
    await until(began.exists)
    for turn in range(20):
        assert (await sessions.step(step(turn, session="other"))).failure is None
        assert threading.active_count() <= threads + 1
    assert not any(task.done() for task in (*opens, checked))
    gate.touch()
    await asyncio.wait([*opens, checked])
    assert began.read_text() == "once"
    assert [opened.result().failure for opened in opens] == [None] * 5
    assert [error["field"] for error in (await checked).errors] == ["environment.config.x"]


async def test_an_endless_import_times_out(modules: Path) -> None:
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), import_timeout_s=0.3)
    code = "import threading\nEND = threading.Event()\nEND.wait(30)\n"
    write_module(modules, "endless_module", code)
    endless = opening(session="endless", environment="endless_module:X")
    reply, other = await asyncio.gather(sessions.open(endless), sessions.open(opening(session="other")))
    assert (reply.failure, other.failure) == (Ending.ENV_TIMEOUT, None)
    sys.modules["endless_module"].END.set()


async def test_a_check_has_a_time_limit_and_says_so(
    host: ChildPool, sessions: Sessions, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(modules, "stuck_module", "import threading\nEND = threading.Event()\nEND.wait(30)\n")
    monkeypatch.setattr("opentinker.envs.runtime.resolver.CHECK_S", 0.2)
    check = EnvCheck(name="stuck_module:X", config={})
    (mistake,) = (await soon(check_environment(check, sessions._resolver, host))).errors
    assert mistake["field"] == "environment.name" and "took more than 0.2 s" in mistake["problem"]
    sys.modules["stuck_module"].END.set()


async def test_the_library_of_what_blocks_is_imported_by_children_alone(host: ChildPool, sessions: Sessions) -> None:
    for size, problem in ((1, ""), (9, "tabnanny has no such size")):
        check = EnvCheck(name="tests.samples.env_samples:Heavy", config={"size": size})
        found = (await check_environment(check, sessions._resolver, host)).errors
        assert [problem in mistake["problem"] for mistake in found] == [True] * bool(problem)
    assert "tabnanny" not in sys.modules


async def test_settings_are_read_in_a_thread_before_the_event_loop_needs_them(sessions: Sessions) -> None:
    threads = env_samples.Reading.Config.threads
    threads.clear()
    for name in "abc":
        opened = await sessions.open(opening(name, "tests.samples.env_samples:Reading", tag="x"))
        assert opened.failure is None, opened.error
    first, *later = threads
    assert first == "environment-import" and later == [threading.main_thread().name] * 3


@pytest.mark.parametrize("code", ["import sys\nsys.exit(3)", "raise StopIteration", "1 / 0"])
async def test_a_module_that_raises_is_explained_and_tried_again(
    host: ChildPool, sessions: Sessions, modules: Path, code: str
) -> None:
    name = f"raising_{abs(hash(code))}"
    write_module(modules, name, code)
    reply = await sessions.open(opening(environment=f"{name}:Counting"))
    assert reply.failure == Ending.ENV_ERROR and name in reply.error
    errors = (await check_environment(EnvCheck(name=f"{name}:Counting", config={}), sessions._resolver, host)).errors
    assert [error["field"] for error in errors] == ["environment.name"]
    write_module(modules, name, "from tests.samples.env_samples import Counting")
    assert (await sessions.open(opening(session="again", environment=f"{name}:Counting"))).failure is None


# --- imports that take long -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [False, True])
async def test_import_does_not_count_as_time_of_the_episode(sessions: Sessions, modules: Path, blocking: bool) -> None:
    gate = Gate(modules, blocking=blocking)
    began, deadline_s = time.monotonic(), 1.0
    request = msgspec.structs.replace(opening(environment=gate.environment, deadline_s=deadline_s), answer_within_s=0.0)
    told = await sessions.open(request)
    assert told.opening and deadline_s < told.importing_s <= 120.0
    imported = asyncio.create_task(sessions.step(step(IMPORTED)))
    await until(lambda: time.monotonic() > began + deadline_s)
    assert not imported.done()
    gate.file.touch()
    assert (await imported).failure is None
    assert (await sessions.step(step(OPEN))).messages
    hung = await sessions.open(opening("h", gate.environment, deadline_s=0.3, tag="hang"))
    assert hung.failure == Ending.ENV_TIMEOUT and "the episode's 0.3 s were over (last request: open)" in hung.error


async def test_a_hung_child_import_ends(host: ChildPool, modules: Path) -> None:
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host, import_timeout_s=2.0)
    gate = Gate(modules, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    late = await sessions.open(opening(environment=gate.environment, deadline_s=0.1))
    assert late.failure == Ending.ENV_TIMEOUT
    assert "was not imported within 2 s (operator setting env_import_timeout_s)" in late.error
    await until(lambda: not alive(gate.importers()[-1]))
    gate.file.touch()
    assert (await sessions.open(opening("n", gate.environment))).failure is None
    await sessions.drain(0.01)


async def test_an_abandoned_import_ends(sessions: Sessions, modules: Path) -> None:
    gate = Gate(modules, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    opened = asyncio.create_task(sessions.open(opening(environment=gate.environment)))
    await until(lambda: len(gate.importers()) == 2)
    await sessions.close(CloseSession(session="s"))
    assert (await opened).failure == Ending.CANCELLED
    await until(lambda: not alive(gate.importers()[-1]))


# --- environments that block ----------------------------------------------------------------------------------------


async def test_blocking_environment_runs_in_a_child_and_blocks_nobody(sessions: Sessions, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    opened = await sessions.open(opening(environment=BLOCKING, gate=str(gate)))
    child = int(opened.messages[0].text)
    await sessions.open(opening(session="other"))
    blocked = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    assert (await sessions.step(step(0, session="other"))).reward == 1.0
    assert not blocked.done()
    gate.touch()
    assert (await blocked).reward == 1.0
    assert child != os.getpid()


async def test_hung_child_is_killed_and_others_are_unharmed(sessions: Sessions) -> None:
    await start_children(sessions, 2)
    hung = await sessions.open(opening(environment=BLOCKING, deadline_s=2.0, gate="never"))
    neighbour = await sessions.open(opening(session="n", environment=BLOCKING))
    assert hung.messages != neighbour.messages, "idle children are used first"
    reply = await sessions.step(step(0))
    assert reply.failure == Ending.ENV_TIMEOUT
    assert (await sessions.step(step(0, session="n"))).reward == 1.0
    await until(lambda: not alive(int(hung.messages[0].text)))
    again = await sessions.open(opening(session="again", environment=BLOCKING))
    assert again.failure is None


async def test_crashed_child_costs_only_its_own_sessions(sessions: Sessions) -> None:
    await sessions.open(opening(environment=BLOCKING, how="crash"))
    await sessions.open(opening(session="n", environment=BLOCKING))
    reply = await sessions.step(step(0))
    assert reply.failure == Ending.ENV_ERROR
    assert "exit status 7" in reply.error
    assert (await sessions.step(step(0, session="n"))).reward == 1.0


@pytest.mark.parametrize("crash", [True, False])
async def test_what_a_child_has_started_ends_with_it(sessions: Sessions, host: ChildPool, crash: bool) -> None:
    await sessions.open(opening(environment=BLOCKING, how="spawn"))
    started = int((await sessions.step(step(0))).messages[0].text)
    assert alive(started)
    if crash:
        assert "exit status 7" in (await sessions.step(step(1))).error
    else:
        await host.close()
    await until(lambda: not alive(started))


async def test_sessions_beside_a_hung_one_in_the_same_child_end_with_a_reason(host: ChildPool) -> None:
    sessions = Sessions(
        "w", limit=8, resolver=Resolver(modules=True), host=ChildPool(children=1, per_child=2, modules=True)
    )
    await start_children(sessions, 1)
    await sessions.open(opening(environment=BLOCKING, deadline_s=2.0, gate="never"))
    await sessions.open(opening(session="n", environment=BLOCKING))
    assert (await sessions.open(opening(session="third", environment=BLOCKING))).busy, "all places are taken"
    hung = asyncio.create_task(sessions.step(step(0)))
    await asyncio.sleep(0)
    beside = await sessions.step(step(0, session="n"))
    assert (await hung).failure == Ending.ENV_TIMEOUT
    assert beside.failure == Ending.ENV_ERROR
    assert "did not return in time in one of its sessions" in beside.error
    fresh = await sessions.open(opening(session="third", environment=BLOCKING))
    assert fresh.failure is None
    await sessions.drain(0.01)
    assert sessions._host is not None
    await sessions._host.close()


async def test_what_user_code_prints_stays_out_of_the_protocol(sessions: Sessions) -> None:
    await sessions.open(opening(environment=BLOCKING, how="print"))
    assert (await sessions.step(step(0))).reward == 1.0


async def test_children_do_not_see_the_service_variables(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_REDIS_URL", "redis://user:secret@host")
    await sessions.open(opening(environment=BLOCKING, how="variables"))
    assert "OPENTINKER" not in (await sessions.step(step(0))).messages[0].text


async def test_children_end_with_the_worker(sessions: Sessions, host: ChildPool) -> None:
    opened = await sessions.open(opening(environment=BLOCKING))
    await host.close()
    assert not alive(int(opened.messages[0].text))


# --- any order of any requests --------------------------------------------------------------------------------------

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


# --- what an environment says of its appetite ----------------------------------------------------------------------


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
