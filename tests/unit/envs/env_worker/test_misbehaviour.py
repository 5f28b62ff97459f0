"""An environment that misbehaves ends its own episode with a reason, and harms no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.messaging.reply_validation import OBSERVATION_BYTES, PROMPT_IDS, sound
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import (
    OPEN,
    SessionReply,
)
from tests.conftest import until
from tests.samples import env_samples
from tests.support import playing
from tests.support.playing import step
from tests.unit.envs.env_worker.requests import MISBEHAVING, called, opening

BLOCKWISE = "tests.samples.env_samples:Blockwise"

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
