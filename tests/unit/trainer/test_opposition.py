"""Opponents in matches of training: teammates are none, nor are bots, checkpoints and models behind URLs beside other
policies and pools, because their seats may be neutral, such as a judge's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from opentinker.services.trainer.batch.assembler import Assembler
from opentinker.services.trainer.intake import Intake
from opentinker.services.trainer.joint_progress import JointProgress
from opentinker.shared.evaluation.job_ratings import JobRatings
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.match_results import IdleSeat, MatchResult
from opentinker.shared.types.trajectories import Group
from tests.support.factories import V0, group_of, make_spec, make_trajectory

CHECKPOINT = "j-0123456789@50"
FROZEN = {"frozen": CHECKPOINT}
URL = {"url": "https://models.example/v1", "model": "past"}
POOLS = {"past": {"policy": "p", "every": 1}}


async def taken(spec: JobSpec, policy: str, group: Group) -> Group:
    """Return the policy's part of a group as its trainer takes it."""

    async def accept(_: int) -> str:
        return "ok"

    reporter: Any = SimpleNamespace(ctx=None, lease=None, policy=policy, spec=spec_of(spec, policy))
    joint: Any = SimpleNamespace(watch=lambda _: None)
    admission: Any = SimpleNamespace(accept=accept)
    assembler = Assembler(max_staleness=1, epoch=1)
    intake = Intake(reporter, admission, assembler, joint, lambda: 0)
    delivery: Any = SimpleNamespace(noun=group, size=1, seq=1, key=group.key)
    await intake._receive(delivery)
    return assembler.pending[1]


def debate(policies: list[str], seats: dict[str, Any], team: list[str] | None = None) -> JobSpec:
    own: dict[str, Any] = {name: {} for name in policies}
    if team:
        own["p"] = {"algorithm": {"team": {"debaters": team}}}
    pools = {"pools": POOLS} if {"pool": "past"} in seats.values() else {}
    return make_spec(environment={"name": "debate"}, policies=own, seats=seats, train={"steps": 3}, **pools)


def played(players: dict[str, str], bots: dict[str, float] | None = None) -> Group:
    """A match in which the first seat earns 1 and all others lose 1."""
    rewards = {seat: 1.0 if place == 0 else -1.0 for place, seat in enumerate(players)}
    return group_of(
        [
            make_trajectory(index=0, seat=seat, policy=name, reward=rewards[seat], bots=bots or {})
            for seat, name in players.items()
        ]
    )


@pytest.mark.parametrize("judge", [FROZEN, URL, {"bot": "perfect"}])
async def test_a_judge_that_does_not_learn_is_nobody_s_opponent(judge: dict[str, Any]) -> None:
    spec = debate(["p", "q"], {"first": "p", "second": "q", "judge": judge})
    name, bots = spec.seats["judge"].player, {"perfect": 5.0} if "bot" in judge else {}
    group = played({"first": "p", "second": "q", **({"judge": name} if name else {})}, bots)
    for policy, outcome in (("p", 1.0), ("q", 0.0)):
        (match,) = (await taken(spec, policy, group)).matches
        (met,) = match.opponents.items()
        assert met[0] == ("q" if policy == "p" else "p") and met[1].outcome == outcome
        assert match.rewards.keys() >= {"first", "second"}
        ratings = JobRatings(spec.policies)
        ratings.add_matches(policy, [match])
        assert all(player in ("p@0.0", "q@0.0") for pair in ratings.results() for player in pair)


async def test_a_judge_is_no_opponent_of_a_pool_s_policy_even_where_it_had_no_turn() -> None:
    spec = debate(["p"], {"first": "p", "second": {"pool": "past"}, "judge": FROZEN})
    idle = {"judge": IdleSeat(policy=CHECKPOINT, reward=3.0, version=V0)}
    views = [("first", "p"), ("second", "past@0.0")]
    group = group_of([make_trajectory(index=0, seat=seat, policy=name, idle=idle) for seat, name in views])
    (match,) = (await taken(spec, "p", group)).matches
    assert match.opponents.keys() == {"past@0.0"} and match.rewards["judge"] == 3.0


@pytest.mark.parametrize(
    ("seats", "team", "met"),
    [
        ({"first": "p", "second": FROZEN}, None, {CHECKPOINT}),
        ({"first": "p", "second": URL}, None, {"past@https://models.example/v1"}),
        ({"first": "p", "second": {"bot": "random"}}, None, {"bot:random"}),
        ({"first": "p", "second": "p", "judge": FROZEN}, None, set()),
        ({"*": "p", "judge": FROZEN}, None, set()),
        ({"first": "p", "second": "p", "judge": {"bot": "random"}}, None, set()),
        ({"first": "p", "second": "p", "judge": FROZEN}, ["first", "second"], {CHECKPOINT}),
        ({"first": "p", "second": "p", "judge": FROZEN}, ["first", "judge"], set()),
    ],
)
async def test_fixed_players_are_opponents_where_nobody_else_can_be(
    seats: dict[str, Any], team: list[str] | None, met: set[str]
) -> None:
    spec = debate(["p"], seats, team)
    there = {"*": ["first", "second"]}
    named = {own: player for seat, player in spec.seats.items() for own in there.get(seat, [seat])}
    bots = {str(player.bot): -1.0 for player in named.values() if player.bot}
    group = played({seat: player.player for seat, player in named.items() if player.player is not None}, bots)
    matches: list[MatchResult] = (await taken(spec, "p", group)).matches
    assert {name for match in matches for name in match.opponents} == met


def team_game(seats: dict[str, Any], **changes: Any) -> JobSpec:
    """`one` and `two` are a team."""
    us = {"algorithm": {"team": {"us": ["one", "two"]}}}
    named = [player for player in seats.values() if isinstance(player, str)]
    pools = {"pools": POOLS} if {"pool": "past"} in seats.values() else {}
    return make_spec(
        environment={"name": "game"},
        policies=dict.fromkeys(named, us),
        seats=seats,
        train={"steps": 3},
        **changes,
        **pools,
    )


BOT: dict[str, Any] = {"bot": "random"}


@pytest.mark.parametrize(
    ("seats", "met"),
    [
        ({"one": "p", "two": "q", "enemy": BOT}, {"bot:random"}),
        ({"one": "p", "two": "q", "enemy": FROZEN}, {CHECKPOINT}),
        ({"one": "p", "two": {"pool": "past"}, "enemy": BOT}, {"bot:random"}),
        ({"one": "p", "two": BOT, "enemy": FROZEN}, {CHECKPOINT}),
        ({"one": "p", "two": BOT, "enemy": "q"}, {"q"}),
        ({"one": "p", "two": "q", "enemy": "r", "judge": BOT}, {"r"}),
        ({"one": "p", "two": "q"}, set()),
    ],
)
async def test_teammates_are_no_opponents(seats: dict[str, Any], met: set[str]) -> None:
    spec = team_game(seats)
    names = {seat: "past@0.0" if player.pool else player.player for seat, player in spec.seats.items()}
    group = played(
        {seat: name for seat, name in names.items() if name}, {"random": -2.0} if BOT in seats.values() else {}
    )
    matches = (await taken(spec, "p", group)).matches
    assert {name for match in matches for name in match.opponents} == met
    assert all(one.outcome == 1.0 for match in matches for one in match.opponents.values())


async def test_only_its_seats_outside_the_team_make_a_policy_an_opponent() -> None:
    spec = team_game({"one": "p", "two": "q", "enemy": "q"})
    views = [("one", "p", 1.0), ("two", "q", 9.0), ("enemy", "q", -1.0)]
    group = group_of([make_trajectory(index=0, seat=seat, policy=name, reward=paid) for seat, name, paid in views])
    (match,) = (await taken(spec, "p", group)).matches
    assert match.opponents["q"].outcome == 1.0


@pytest.mark.parametrize(
    ("players", "met"),
    [
        ({"one": "p", "two": "q"}, {"bot:random"}),
        ({"two": "p", "enemy": "q"}, {"q"}),  # beside the bot
        ({"enemy": "p", "one": "q"}, {"q"}),
    ],
)
async def test_players_that_rotate_change_teams(players: dict[str, str], met: set[str]) -> None:
    batch = {"algorithm": {"group_size": 6}, "match": {"rotate": True}}
    spec = team_game({"one": "p", "two": "q", "enemy": BOT}, **batch)
    (match,) = (await taken(spec, "p", played(players, {"random": -2.0}))).matches
    assert match.opponents.keys() == met
    ratings = JointProgress.of(spec).ratings
    ratings.add_matches("p", [match])
    assert len(ratings.results()) == len(met)


async def test_the_job_s_one_policy_has_the_fixed_player_as_its_opponent() -> None:
    spec = make_spec(environment={"name": "debate"}, seats={"second": FROZEN})
    (match,) = (await taken(spec, "", played({"first": "", "second": CHECKPOINT}))).matches
    assert match.opponents[CHECKPOINT].outcome == 1.0
