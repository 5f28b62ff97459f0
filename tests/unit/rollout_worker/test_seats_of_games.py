"""Environments with several seats, as an env worker serves them: the environment says who acts, and nobody else may."""

from __future__ import annotations

import msgspec
import pytest

from opentinker.shared.types.core import Ending, Message, StopReason
from opentinker.shared.types.env_protocol import StepSession
from tests.support.playing import local_episode
from tests.unit.envs.env_worker.requests import opening

RACE = "tests.samples.seat_samples:Race"


def say(text: str, turn: int, seat: str) -> StepSession:
    return StepSession(session="s", turn=turn, text=text, stop=StopReason.EOS, seat=seat)


async def test_replies_name_the_seat_the_stream_and_what_limits_the_turn() -> None:
    player, opened = await local_episode(opening(environment=RACE))
    assert (opened.seat, opened.stream, opened.max_tokens, opened.stop) == ("first", "s", 3, ["."])
    moved = await player.step(say("a", 0, "first"))
    assert (moved.seat, moved.messages) == ("second", [Message(role="user", content="first said a")])
    won = await player.step(say("win", 1, "second"))
    assert (won.reward, won.rewards, won.done) == (1.0, {"first": {"lost": -1.0}}, True)


async def test_a_seat_that_is_not_asked_may_not_act() -> None:
    player, _ = await local_episode(opening(environment=RACE))
    refused = await player.step(say("a", 0, "second"))
    assert refused.failure == Ending.ENV_ERROR and "turn 0 is for seat 'first'" in refused.error


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("next", "a", "seat 'third' acts next; the seats are: 'first', 'second'"),
        ("rewarded", "win", "rewards must be a dict by seat; the seats are: first, second"),
    ],
)
async def test_seats_that_are_not_there_are_a_bad_reply(option: str, text: str, said: str) -> None:
    player, _ = await local_episode(opening("s", RACE, 30.0, **{option: "third"}))
    reply = await player.step(say(text, 0, "first"))
    assert reply.failure == Ending.ENV_BAD_REPLY and said in reply.error


def test_messages_with_parts_and_calls_survive_the_wire() -> None:
    image = '{"type":"image","data":"UE5H","media_type":"image/png"}'
    message = msgspec.json.decode(f'{{"role":"user","content":[{{"type":"text","text":"a"}},{image}]}}', type=Message)
    assert (message.text, message.images[0].data) == ("a", b"PNG")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message
