"""Episodes of several seats: tokens, turns, rewards and streams of each; who plays which."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import SessionReply
from opentinker.shared.types.guide import Guide
from opentinker.shared.types.match_results import IdleSeat
from opentinker.shared.types.trajectories import Group
from tests.support.factories import V0, make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, episode, failure_of, renderer, reply, say


def move(seat: str, *texts: str, stream: str = "", **changes: Any) -> SessionReply:
    return reply(*texts, seat=seat, stream=stream, **changes)


async def test_each_seat_has_its_own_tokens_and_its_own_reward() -> None:
    env = Env(
        [
            move("black", "you begin"),
            move("white", "black played a"),
            move("black", "white played b", reward=0.5),
            move("", done=True, reward=1.0, components={"win": 1.0}, rewards={"white": {"win": -1.0}}),
        ]
    )
    black, white = await episode(Script([say("a$"), say("b$"), say("c$")]), env).run()
    assert [(t.index, t.seat, t.reward) for t in (black, white)] == [(0, "black", 1.0), (0, "white", -0.5)]
    assert black.ids.tolist() == Chars().encode("<u>you begin$\n<a>a$\n<u>white played b$\n<a>c$")
    assert white.ids.tolist() == Chars().encode("<u>black played a$\n<a>b$")
    assert white.turns[0].components == {"win": -1.0} and [t.reward for t in black.turns] == [0.0, 1.0]
    assert [(r.turn, r.seat) for r in env.requests] == [(0, "black"), (1, "white"), (2, "black")]
    for trajectory in (black, white):
        trajectory.check()


async def test_a_seat_that_has_not_acted_yet_gets_its_reward_with_its_first_turn() -> None:
    env = Env(
        [move("black", "go"), move("white", "go", rewards={"white": {"gift": 0.25}}), move("", done=True, reward=1.0)]
    )
    black, white = await episode(Script([say("a$"), say("b$")]), env).run()
    assert (black.reward, white.reward) == (0.0, 1.25)
    alone = Env([move("black", "go"), move("", done=True, reward=1.0, rewards={"white": {"gift": 1.0}})])
    (only,) = await episode(Script([say("a$")]), alone).run()
    assert only.seat == "black" and only.idle == {"white": IdleSeat(policy="", reward=1.0, version=V0)}
    assert black.idle == white.idle == {}


async def test_turns_count_per_seat() -> None:
    replies = [move("a", "go"), move("b", "go"), move("a", "1"), move("b", "2"), move("a", "3")]
    first, second = await episode(Script([say("x$")] * 4), Env(replies), rollout__max_turns=2).run()
    assert (len(first.turns), len(second.turns), first.ending) == (2, 2, Ending.MAX_TURNS)


async def test_a_new_stream_begins_a_new_context_and_an_old_one_goes_on() -> None:
    env = Env(
        [
            reply("plan", stream="main"),
            reply("look up x", stream="helper"),
            reply("the helper says y", stream="main"),
            reply(done=True, reward=1.0),
        ]
    )
    main, helper = await episode(Script([say("a$"), say("y$"), say("b$")]), env).run()
    assert main.ids.tolist() == Chars().encode("<u>plan$\n<a>a$\n<u>the helper says y$\n<a>b$")
    assert helper.ids.tolist() == Chars().encode("<u>look up x$\n<a>y$")
    assert (main.stream, helper.stream, main.reward, helper.reward) == ("main", "helper", 1.0, 0.0)


def judged(spec: Any, *, is_frozen: bool) -> Episode:
    """A match of one turn each: the second player answers under a schema, and has a token without a finite logprob."""
    guide = Guide(schema={"type": "object"})
    env = Env(
        [
            move("player", "go"),
            move("judge", "player said a", guide=guide),
            move("", done=True, rewards={"player": {"win": 1.0}}),
        ]
    )
    verdict = msgspec.structs.replace(say("{}$"), logprobs=[-0.5, -math.inf, -0.5])
    played = episode(Script([say("a$")]), env)
    judge = LoadedPolicy(spec.seats["judge"].player, spec, Script([verdict]), renderer(), is_frozen)  # type: ignore[arg-type]
    player = LoadedPolicy("player", spec, played.seats.first.engine, renderer())
    played.seats = SeatMap(spec, [player, judge])
    return played


@pytest.mark.parametrize("player", [{"frozen": "j-0123456789@50"}, {"pool": "past"}])
async def test_a_player_that_does_not_learn_may_answer_as_nothing_could_be_trained(player: dict[str, str]) -> None:
    pools = {"past": {"policy": "player", "every": 1}} if "pool" in player else {}
    spec = make_spec(policies={"player": {}}, seats={"player": "player", "judge": player}, pools=pools,
                     rollout__engine="toy")  # fmt: skip
    found = await judged(spec, is_frozen=True).run()
    Group(job="j", seq=0, environment="e", worker="w", trajectories=found).check()
    own, verdict = found
    assert (own.reward, own.turns[0].untrainable, verdict.turns[0].untrainable) == (1.0, "", "")
    assert verdict.logprobs[verdict.mask == 1].tolist() == [-0.5, 0.0, -0.5]


async def test_a_policy_that_learns_and_has_no_turn_to_be_trained_voids_the_match() -> None:
    spec = make_spec(policies={"player": {}, "other": {}}, seats={"player": "player", "judge": "other"})
    failed = await failure_of(judged(spec, is_frozen=False))
    assert failed.ending == Ending.UNTRAINABLE and "no turn of seat 'judge' can be trained" in str(failed)


def test_players_rotate_by_position_in_the_submission_order_not_by_number() -> None:
    """A deterministic job plays positions again under other numbers."""
    pair: dict[str, Any] = {"policies": {"a": {}, "b": {}}, "seats": {"x": "a", "y": "b"}, "match": {"rotate": True}}
    spec = make_spec(**pair, algorithm__group_size=4)
    engine: Any = object()
    seats = SeatMap(spec, [LoadedPolicy(name, spec, engine, engine) for name in spec.policies])
    for ticket, player in (
        (make_ticket(seq=9, row=4), "a"),
        (make_ticket(seq=4, row=4), "a"),
        (make_ticket(row=5), "b"),
    ):
        first = Episode(spec, ticket, 0, seats, engine).seats.at("x")
        assert first is not None and first.name == player
