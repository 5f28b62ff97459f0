"""Rounds, as an env worker plays them: who acts is a set of seats, and the environment gets their actions together."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from opentinker.envs.base import play_gold
from opentinker.envs.registry import make
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.messaging.reply_validation import sound
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending, Message, StopReason, ToolCall
from opentinker.shared.types.env_protocol import OpenSession, SeatAction, SeatPrompt, SessionReply, StepSession
from tests.support import playing

SAMPLES = "tests.samples.seat_samples"
VOTE = f"{SAMPLES}:Vote"
ALL = ("voter_0", "voter_1", "voter_2", "voter_3")


def opening(environment: str = VOTE, **options: Any) -> OpenSession:
    return playing.opening(environment, row=3, seed=4, **options)


def votes(turn: int, calls: tuple[str, ...] = (), /, **texts: str) -> StepSession:
    """Those of `calls` call the tool `rounds`."""
    called = [ToolCall(id="t00000n00", name="rounds", arguments={})]
    actions = [
        SeatAction(seat=seat, text=text, stop=StopReason.EOS, tool_calls=called if seat in calls else [])
        for seat, text in texts.items()
    ]
    return StepSession(session="s", turn=turn, text="", stop=StopReason.EOS, round=actions)


def seen(reply: SessionReply) -> dict[str, list[str]]:
    assert reply.failure is None, reply.error
    return {prompt.seat: [message.text for message in prompt.messages] for prompt in reply.round}


async def test_every_seat_of_a_round_sees_its_own_prompt_and_the_actions_arrive_together_in_seat_order() -> None:
    player, opened = await playing.local_episode(opening())
    assert seen(opened) == {seat: [f"row 3: {seat}?"] for seat in ALL}
    assert (opened.seat, opened.messages, {prompt.stream for prompt in opened.round}) == ("", [], {"s"})
    reply = await player.step(votes(0, voter_3="a", voter_1="b", voter_0="out", voter_2="a"))
    assert seen(reply) == {"voter_1": ["you: b"], "voter_2": ["you: a"], "voter_3": ["you: a"]}
    assert reply.rewards == {"voter_2": {"vote": 1.0}, "voter_3": {"vote": 1.0}}
    environment: Any = player.environment
    assert [(one.seat, one.text, one.turn) for one in environment.played[0]] == [
        ("voter_0", "out", 0), ("voter_1", "b", 0), ("voter_2", "a", 0), ("voter_3", "a", 0),
    ]  # fmt: skip
    last = await player.step(votes(1, voter_2="a", voter_1="a", voter_3="b"))
    assert (last.done, last.round) == (True, [])


@pytest.mark.parametrize(
    "texts",
    [{"voter_0": "a"}, {"voter_0": "a", "voter_1": "a", "voter_2": "a", "stranger": "a"}, {}],
)
async def test_a_round_takes_an_action_of_every_seat_once_and_of_nobody_else(texts: dict[str, str]) -> None:
    player, _ = await playing.local_episode(opening())
    refused = await player.step(votes(0, **texts))
    assert refused.failure == Ending.ENV_ERROR
    assert "turn 0 is a round of the seats 'voter_0', 'voter_1', 'voter_2', 'voter_3', not" in refused.error


async def test_a_seat_cannot_act_twice_in_a_round() -> None:
    player, _ = await playing.local_episode(opening(seats=2))
    both = votes(0, voter_0="a", voter_1="b")
    twice = await player.step(msgspec.structs.replace(both, round=[both.round[0], both.round[1], both.round[0]]))
    assert twice.failure == Ending.ENV_ERROR and "'voter_0', 'voter_1', 'voter_0'" in twice.error


async def test_turns_and_rounds_may_follow_each_other() -> None:
    player, opened = await playing.local_episode(opening(f"{SAMPLES}:Deal"))
    assert (opened.seat, opened.round) == ("dealer", [])
    dealt = await player.step(playing.step(0, "0", seat="dealer"))
    assert seen(dealt) == {"left": ["left, guess"], "right": ["right, guess"]} and dealt.reward == 0.25
    alone = await player.step(playing.step(1, "0", seat="left"))
    assert alone.failure == Ending.ENV_ERROR and "turn 1 is a round of the seats" in alone.error
    last = await player.step(votes(1, left="0", right="1"))
    assert last.done and last.rewards == {"left": {"guess": 1.0}, "right": {"guess": 0.0}}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("", "Many.open() names 129 seats in acting; at most 128 may act at the same time"),
        ("unknown", "Wrong.open() names seat 'c' in acting; the seats are: 'a', 'b'"),
        ("empty", "Wrong.open() names no seat in acting"),
        ("list", "Wrong.open(): acting must be a dict by seat, not list"),
        ("text", "Wrong.open(): acting['a'] must be a Prompt or a list of Message, not str"),
        ("beside", "Wrong.open() gives both acting and a seat or prompt"),
        ("silent", "open() gave no message for seat 'b'"),
        ("large", "open(), seat 'a', gave 300,"),
    ],
)
async def test_a_wrong_set_of_seats_is_a_bad_reply_that_names_the_environment(how: str, said: str) -> None:
    _, reply = await playing.local_episode(opening(f"{SAMPLES}:{'Wrong' if how else 'Many'}", how=how))
    assert reply.failure == Ending.ENV_BAD_REPLY and said in reply.error


@pytest.mark.parametrize(
    ("config", "failure", "said"),
    [
        ({"how": "reward"}, Ending.ENV_BAD_REPLY, "Wrong.step_all() gives reward 1.0, which no seat of the round owns"),
        (
            {"how": "next"},
            Ending.ENV_BAD_REPLY,
            "Wrong.step_all() names seat 'nobody' in acting; the seats are: 'a', 'b'",
        ),
        ({}, Ending.ENV_ERROR, "Unfinished names seats in `acting` and does not define step_all"),
    ],
)
async def test_wrong_answers_to_a_round_are_told_too(config: dict[str, str], failure: Ending, said: str) -> None:
    player, _ = await playing.local_episode(opening(f"{SAMPLES}:{'Wrong' if config else 'Unfinished'}", **config))
    reply = await player.step(votes(0, a="x", b="y"))
    assert reply.failure == failure and said in reply.error


async def test_a_redelivered_round_is_answered_from_memory() -> None:
    sessions = Sessions("w", limit=4, resolver=Resolver(modules=True))
    await sessions.open(opening())
    request = votes(0, voter_0="a", voter_1="a", voter_2="b", voter_3="out")
    first, second = await asyncio.gather(sessions.step(request), sessions.step(request))
    assert first is second
    reordered = msgspec.structs.replace(request, round=request.round[::-1])
    assert await sessions.step(reordered) is first
    last = await sessions.step(votes(1, voter_0="a", voter_1="b", voter_2="b"))
    assert last.done and last.rewards == {"voter_1": {"vote": 1.0}, "voter_2": {"vote": 1.0}}
    assert await sessions.step(votes(1, voter_0="a", voter_1="b", voter_2="b")) is last


async def test_a_child_process_plays_rounds() -> None:
    host = ChildPool(children=1, per_child=1, modules=False)
    try:
        request = opening("pettingzoo", id="classic/rps_v2", api="parallel", kwargs={"max_cycles": 1})
        player = host.runner("w", request)
        assert player is not None
        assert list(seen(await player.open(request))) == ["player_0", "player_1"]
        last = await player.step(votes(0, player_0="rock", player_1="paper"))
        assert last.done and last.rewards == {"player_0": {"reward": -1.0}, "player_1": {"reward": 1.0}}
    finally:
        await host.close()


async def test_bots_of_a_round_are_answered_in_the_environment() -> None:
    player, opened = await playing.local_episode(opening(bots={"voter_0": "named", "voter_2": "fixed"}))
    assert list(seen(opened)) == ["voter_1", "voter_3"]
    reply = await player.step(votes(0, voter_3="b", voter_1="out"))
    environment: Any = player.environment
    played = environment._inner.played[0]
    assert [(one.seat, one.text) for one in played] == [
        ("voter_0", "0"), ("voter_1", "out"), ("voter_2", "b"), ("voter_3", "b"),
    ]  # fmt: skip
    assert list(seen(reply)) == ["voter_3"]
    assert reply.rewards == {"voter_2": {"vote": 1.0}, "voter_3": {"vote": 1.0}}, "bots are rewarded like models"
    last = await player.step(votes(1, voter_3="x"))
    assert last.done and [one.seat for one in environment._inner.played[1]] == ["voter_0", "voter_2", "voter_3"]


async def test_a_round_of_bots_alone_is_played_at_once() -> None:
    player, _ = await playing.local_episode(opening(f"{SAMPLES}:Deal", bots={"left": "seven", "right": "seven"}))
    reply = await player.step(playing.step(0, "7", seat="dealer"))
    assert (reply.seat, reply.round, reply.reward) == ("dealer", [], 0.25)
    assert reply.rewards == {"left": {"guess": 1.0}, "right": {"guess": 1.0}}
    assert reply.messages[0].text == "{'left': '7', 'right': '7'}"


async def test_a_bot_that_deals_alone_leaves_the_round_to_the_models() -> None:
    player, opened = await playing.local_episode(opening(f"{SAMPLES}:Deal", bots={"dealer": "seven", "left": "seven"}))
    assert seen(opened) == {"right": ["right, guess"]}
    reply = await player.step(votes(0, right="7"))
    assert seen(reply) == {"right": ["right, guess"]}
    assert reply.rewards == {"dealer": {"reward": 0.5}, "left": {"guess": 1.0}, "right": {"guess": 1.0}}, "both deals"


async def test_random_bots_of_a_round_draw_the_same_whatever_the_order_of_the_actions() -> None:
    drawn = []
    for order in ((2, 3), (3, 2)):
        player, _ = await playing.local_episode(opening(bots={"voter_[01]": "random"}))
        await player.step(votes(0, **{f"voter_{n}": "a" for n in order}))
        environment: Any = player.environment
        drawn.append([(one.seat, one.text) for one in environment._inner.played[0]])
    assert drawn[0] == drawn[1]


async def test_a_tool_of_one_seat_is_answered_while_the_actions_of_the_others_are_held() -> None:
    player, opened = await playing.local_episode(opening(f"{SAMPLES}:ToolVote", seats=3))
    assert [[one.name for one in prompt.tools] for prompt in opened.round] == [["rounds"]] * 3
    again = await player.step(votes(0, ("voter_1", "voter_2"), voter_0="a", voter_1="?", voter_2="?"))
    assert seen(again) == {"voter_1": ["0"], "voter_2": ["0"]}
    wrong = await player.step(votes(1, voter_0="b", voter_1="b", voter_2="b"))
    assert "turn 1 is a round of the seats 'voter_1', 'voter_2'" in wrong.error
    later = await player.step(votes(1, ("voter_2",), voter_1="b", voter_2="?"))
    assert seen(later) == {"voter_2": ["0"]}
    reply = await player.step(votes(2, voter_2="b"))
    assert seen(reply) == {"voter_0": ["you: a"], "voter_1": ["you: b"], "voter_2": ["you: b"]}
    assert (reply.metrics["tool_calls"], [prompt.tools for prompt in reply.round]) == (3.0, [[]] * 3)
    environment: Any = player.environment
    assert [(one.text, one.turn) for one in environment.environment.played[0]] == [("a", 0), ("b", 0), ("b", 0)]


async def test_the_expert_plays_every_seat_of_a_round() -> None:
    played = await play_gold(make(VOTE, {"seats": 3}, modules=True), 0, 0)
    assert (played.rewards, played.turns) == ({"voter_0": 2.0, "voter_1": 2.0, "voter_2": 2.0}, 2)
    with_bot = await play_gold(make(VOTE, {"seats": 3}, modules=True), 0, 0, bots={"voter_0": "fixed"})
    assert with_bot.rewards == {"voter_1": 2.0, "voter_2": 2.0}


def prompt(seat: str, text: str = "go", **changes: Any) -> SeatPrompt:
    return SeatPrompt(seat=seat, messages=[Message(role="user", content=text)], **changes)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (SessionReply(worker="", round=[prompt("a"), prompt("a")]), "seat 'a' is named twice in a round"),
        (SessionReply(worker="", round=[prompt(str(n)) for n in range(129)]), "at most 128 may act at the same time"),
        (SessionReply(worker="", seat="a", round=[prompt("a"), prompt("b")]), "cannot come together"),
        (SessionReply(worker="", round=[prompt(str(n), "x" * 200_000) for n in range(4)]), "round; at most 786,432"),
        (SessionReply(worker="", round=[prompt("a", max_tokens=0), prompt("b")]), "max_tokens must be positive, not 0"),
        (SessionReply(worker="", round=[prompt("a", prompt_ids=[1] * 140_000), prompt("b", prompt_ids=[1] * 140_000)]),
         "280,000 prompt_ids for a round"),
    ],
)  # fmt: skip
def test_a_round_from_elsewhere_is_checked(reply: SessionReply, said: str) -> None:
    checked = sound(reply, "w")
    assert checked.failure == Ending.ENV_BAD_REPLY and said in checked.error


def test_a_round_survives_the_wire() -> None:
    reply = SessionReply(worker="w", round=[prompt("a"), prompt("b")])
    assert codec.decode(SessionReply, codec.encode(reply)) == reply == sound(reply, "w")
    actions = [SeatAction(seat=seat, text="x", stop=StopReason.EOS) for seat in "ab"]
    request = reply.step("s", 3, actions)
    assert codec.decode(StepSession, codec.encode(request)) == request and request.actions == actions
    alone = SessionReply(worker="w", seat="a").step("s", 3, actions[:1])
    assert (alone.seat, alone.text, alone.round) == ("a", "x", [])
