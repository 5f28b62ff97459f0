"""Episodes of several seats: tokens, turns, rewards and streams of each; who plays which."""

from __future__ import annotations

from typing import Any

from opentinker.services.rollout_worker.episode import Episode
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import SessionReply
from opentinker.shared.types.match_results import IdleSeat
from tests.support.factories import V0, make_spec, make_ticket
from tests.unit.rollout_worker.scripted_episode import Chars, Env, Script, episode, reply, say


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
