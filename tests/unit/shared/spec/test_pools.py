"""[pools] of a spec: what is refused, all at once; and the results of a group against each player."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from opentinker.sdk.evaluation_spec import evaluation_of
from opentinker.sdk.http import ApiError
from opentinker.services.rollout_worker.seat_map import LoadedPolicy, SeatMap
from opentinker.shared.evaluation.pool_draws import win_rate
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.engines import engines
from opentinker.shared.spec.matches.policies import pool_spec_of
from opentinker.shared.spec.matches.pools import MAX_POOLS, mistakes_in_pools, pool_player, pools_in, pools_of
from opentinker.shared.spec.matches.schedules import MAX_ABSENT_BATCHES
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.match_results import IdleSeat, Opponent
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, make_trajectory, refusals

BASE: dict[str, Any] = {
    "name": "game",
    "model": {"base": "m"},
    "environment": {"name": "matching_pennies"},
    "algorithm": {"group_size": 4, "groups_per_batch": 4},
    "rollout": {"engine": "toy"},
    "train": {"steps": 100},
    "seats": {"odd": {"pool": "past"}},
    "pools": {"past": {"every": 10}},
}
TWO: dict[str, Any] = {
    "policies": {"a": {}, "b": {"model": {"base": "n"}}},
    "seats": {"one": "a", "two": "b", "three": {"pool": "past"}},
    "pools": {"past": {"policy": "b", "every": 10, "rule": "pfsp_hard"}},
}


def refused(**changes: Any) -> dict[str, str]:
    return refusals(parse_spec, {**BASE, **changes})


def test_a_pool_holds_versions_of_one_policy_and_has_an_engine() -> None:
    alone = parse_spec(BASE)
    pool = alone.pools["past"]
    assert (pool.keep, pool.add_if, pool.latest, pool.rule, pool.stretch) == (10, None, 0.5, "uniform", 1)
    assert pools_in(alone.seats) == ["past"] and list(pools_of(alone, "")) == ["past"] and len(engines(alone)) == 2
    two = parse_spec({**BASE, **TWO})
    assert (list(pools_of(two, "a")), list(pools_of(two, "b"))) == ([], ["past"]) and len(engines(two)) == 3
    assert pool_spec_of(two, "past").model.base == "n"
    assert parse_spec(two.model_dump(mode="json")) == two


def test_every_mistake_is_reported_at_once() -> None:
    found = refused(
        seats={"odd": {"pool": "elsewhere"}},
        pools={"past": {"every": 10, "policy": "a"}, "more": {"every": 100}},
        match={"rotate": False, "schedule": "drop"},
        validation={"every": 10},
        train={"steps": 100, "deterministic": True},
    )
    assert "its pools are: past, more" in found["seats.odd.pool"]
    assert "plays no seat" in found["pools.past"] and "plays no seat" in found["pools.more"]
    assert "it has no [policies]: leave it out" in found["pools.past.policy"]
    assert "below train.steps = 100" in found["pools.more.every"]
    assert "needs two" in found["match.schedule"]
    assert "name fixed opponents" in found["validation.against"]
    assert "timing decides" in found["train.deterministic"]
    wrong = refused(pools={"past": {"every": 10, "add_if": 1.5}})
    assert list(wrong) == ["pools.past.add_if"], "a seat that names it is not wrong for that"


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"pools": {}}, "seats.odd.pool", r"the job has no \[pools\]"),
        ({"pools": {"Past": {"every": 1}}}, "pools.Past", "must begin with a small letter"),
        ({"pools": {"past": {}}}, "pools.past.every", "is needed"),
        ({"pools": {"past": {"every": 10, "keep": 0}}}, "pools.past.keep", "greater than or equal to 1"),
        ({"pools": {"past": {"every": 10, "add_if": 1.0}}}, "pools.past.add_if", "never get a member"),
        ({"pools": {"past": {"every": 10, "latest": 2.0}}}, "pools.past.latest", "less than or equal to 1"),
        ({"pools": {"past": {"every": 10, "rule": "hardest"}}}, "pools.past.rule", "uniform"),
        ({"seats": {"odd": {"pool": "past", "bot": "random"}}}, "seats.odd.pool", "one player"),
        ({**TWO, "pools": {"past": {"every": 10}}}, "pools.past.policy", r"is needed: whose versions enter \(a, b\)"),
        ({**TWO, "pools": {"past": {"every": 1, "policy": "c"}}}, "pools.past.policy", "policies are: a, b"),
        (
            {"train": {"steps": 100, "learner": "simulated"}, "rollout": {"engine": "vllm"}},
            "train.learner",
            "has no weights",
        ),
        (
            {
                "pools": {f"p{n}": {"every": 10} for n in range(MAX_POOLS + 1)},
                "seats": {f"s{n}": {"pool": f"p{n}"} for n in range(MAX_POOLS + 1)},
            },
            "pools",
            f"at most {MAX_POOLS}",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    found = refused(**changes)
    assert field in found, found
    assert re.search(problem, found[field]), found


def best_rate(games: int, candidates: int) -> float:
    """The win rate at the last of these candidates if the policy has won every game."""
    recent = rate = 0.0
    for _ in range(candidates):
        recent += games
        rate = win_rate(recent, 0, 0)
        recent /= 2
    return rate


@pytest.mark.parametrize(("every", "steps", "size", "batch"), [(1, 100, 2, 1), (10, 15, 2, 1), (3, 12, 4, 2)])
def test_a_pool_that_no_win_rate_would_let_grow_is_named(every: int, steps: int, size: int, batch: int) -> None:
    most = every * batch * (1 + MAX_ABSENT_BATCHES + 2)  # those without a turn of the policy count too
    best = best_rate(most * size, (steps - 1) // every)

    def found(add_if: float, **algorithm: Any) -> list[dict[str, Any]]:
        changes = {
            "train": {"steps": steps, "learner": "torch"},
            "algorithm": {"group_size": size, "groups_per_batch": batch, "max_staleness": 1, **algorithm},
            "pools": {"past": {"every": every, "add_if": add_if}},
        }
        return mistakes_in_pools(parse_spec({**BASE, **changes}))  # stored specs must still be read

    assert found(best) == found(0.5) == []
    (one,) = found(math.nextafter(best, 2) + 1e-12)
    assert one["field"] == "pools.past.add_if" and "is out of reach" in one["problem"]
    assert f"at most {most * size} games" in one["problem"]
    assert found(0.9999) != []
    assert found(0.9999, drop_zero_variance=True) == [], "games of discarded groups count as well"


def test_win_rates_of_trees_decide_nothing() -> None:
    """Their games go on from the best candidates."""

    def found(algorithm: str, **pool: Any) -> dict[str, str]:
        changes = {"algorithm": {"name": algorithm, "group_size": 4}, "pools": {"past": {"every": 10, **pool}}}
        return {one["field"]: one["problem"] for one in mistakes_in_pools(parse_spec({**BASE, **changes}))}

    refused = found("at_grpo", add_if=0.55, rule="pfsp_hard")
    assert list(refused) == ["pools.past.add_if", "pools.past.rule"]
    assert "the best of several candidates" in refused["pools.past.add_if"]
    assert found("at_grpo", rule="pfsp_even").keys() == {"pools.past.rule"}
    assert found("at_grpo", latest=0.2, keep=3) == found("grpo", add_if=0.55, rule="pfsp_hard") == {}


def test_a_policy_that_is_evaluated_against_itself_alone_is_named() -> None:
    """The players in [seats] would play its evaluations, and a member of a pool cannot."""
    seats = {"first": "a", "second": "b", "judge": {"pool": "past"}}
    pools = {"past": {"policy": "a", "every": 20}}

    def found(*against: dict[str, str], **changes: Any) -> list[dict[str, Any]]:
        job = {**BASE, "environment": {"name": "debate"}, "policies": {"a": {}, "b": {}}, "seats": seats,
               "pools": pools, "validation": {"every": 20, "against": list(against)}, **changes}  # fmt: skip
        return mistakes_in_pools(parse_spec(job))  # stored specs must still be read

    (one,) = found({"policy": "b"})
    assert one["field"] == "validation.against" and "no opponent for policy 'b' but itself" in one["problem"]
    assert found({"policy": "b"}, {"bot": "random"}) == found({"policy": "a"}, {"policy": "b"}) == []
    assert found({"policy": "b"}, pools={}, seats={**seats, "judge": {"bot": "random"}}) == []
    assert found({"policy": "b"}, validation=None) == []


def test_a_pool_belongs_to_training() -> None:
    evaluation = {name: BASE[name] for name in ("name", "model", "environment", "rollout", "seats")}
    with pytest.raises(SpecError) as error:
        parse_spec({**evaluation, "kind": "eval"})
    assert [mistake["field"] for mistake in error.value.mistakes] == ["seats.odd.pool"]
    job = {"id": "j-0123456789", "kind": "rl", "spec": parse_spec(BASE).model_dump(mode="json")}
    with pytest.raises(ApiError, match=r"seats\.odd = \{ frozen = 'j-0123456789@STEP' \}"):
        evaluation_of(job)


def test_a_group_knows_who_won_against_whom() -> None:
    past = pool_player("past", "1.20")
    assert past == "past@1.20" and pool_player("past") == "past@"
    rewards = [(1.0, 0.0, 0.0), (0.0, 1.0, -1.0), (0.1 + 0.2, 0.3, 0.3), (1.0, 1.0, 1.0)]
    played = [
        make_trajectory(index=index, seat=seat, policy=policy, reward=reward, number=number)
        for index, sample in enumerate(rewards)
        for number, (seat, policy, reward) in enumerate(
            zip(("one", "two", "three"), ("", past, past), sample, strict=True)
        )
    ]
    group = group_of(played)
    own = group.of("")
    assert [(one.group, one.sample, one.opponents[past].outcome) for one in own.matches] == [
        *((group.seq, 0, 1.0), (group.seq, 1, 0.5), (group.seq, 2, 0.5), (group.seq, 3, 0.5))
    ]
    assert own.matches[1].rewards == {"one": 0.0, "two": 1.0, "three": -1.0}, "of all seats"
    assert {own.matches[0].version, own.matches[0].opponents[past].version} == {str(own.oldest)}
    assert own.outcomes == {past: (1, 3, 0)}, "means of the seats are compared: 0 and (1 - 1) / 2 are a draw"
    assert {t.policy for t in own.trajectories} == {""} and own.opponents.keys() == {past}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=Group).outcomes == own.outcomes
    absent = [t for t in played if t.policy or t.index == 0]
    assert group_of(absent).of("").outcomes == {past: (1, 0, 0)}, "without a turn of the policy there is no result"


def test_a_game_that_was_over_before_a_player_had_a_turn_has_a_result() -> None:
    """An illegal first move loses the game for the policy, or for the member of the pool."""

    def sample(index: int, *, loser: str, winner: str) -> Trajectory:
        idle = {"two": IdleSeat(policy=winner, reward=1.0, version=WeightVersion(1, 7))}
        return make_trajectory(index=index, seat="one", policy=loser, reward=-1.0, idle=idle)

    past = "past@1.7"
    group = group_of([sample(0, loser="", winner=past), sample(1, loser=past, winner="")])
    group.check()
    lost, won = group.of("").matches
    assert lost.opponents == {past: Opponent(outcome=0.0, version="1.7")} and lost.rewards == {"one": -1.0, "two": 1.0}
    assert (won.version, won.opponents[past].outcome, won.rewards) == ("1.7", 1.0, lost.rewards)
    assert len(group.of("").trajectories) == 1 and group.of("").totals == {0: {"one": -1.0}, 1: {"one": -1.0}}
    with pytest.raises(ValueError, match="finite"):
        bad = {"two": IdleSeat(policy="", reward=float("nan"), version=WeightVersion(1, 7))}
        group_of([make_trajectory(idle=bad)]).check()


def test_groups_of_an_older_rollout_worker_are_read() -> None:
    fields = msgspec.to_builtins(group_of([make_trajectory(bots={"random": 0.0})]), builtin_types=(bytes,))
    for one in fields["trajectories"]:
        del one["idle"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Group).of("").outcomes == {
        "bot:random": (1, 0, 0)
    }


def test_seats_without_a_turn_are_those_that_were_paid_or_all_others_of_a_game_with_one_player() -> None:
    spec = parse_spec({**BASE, "pools": {}, "policies": {"a": {}, "b": {}}, "seats": {"x": "a", "y": "b", "z*": "b"}})
    engines = {name: SimpleNamespace(version=WeightVersion(1, step)) for step, name in enumerate("ab")}
    seats = SeatMap(spec, [LoadedPolicy(name, spec, engine, None) for name, engine in engines.items()])  # type: ignore[arg-type]
    b = IdleSeat(policy="b", reward=0.0, version=WeightVersion(1, 1))
    assert seats.idle_seats({"x"}, {}) == {"y": b}
    assert seats.idle_seats({"x"}, {"z1": 2.0}) == {"z1": msgspec.structs.replace(b, reward=2.0)}
    assert seats.idle_seats({"x", "z1"}, {}) == {}, "it may not be part of the game"
    assert seats.idle_seats({"y"}, {})["x"] == IdleSeat(policy="a", reward=0.0, version=WeightVersion(1, 0))


def test_a_bot_is_an_opponent_whose_rewards_come_with_the_match() -> None:
    played = [
        make_trajectory(index=index, reward=reward, bots={"random": theirs, "heads": 0.0})
        for index, (reward, theirs) in enumerate([(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)])
    ]
    assert group_of(played).of("").outcomes == {"bot:random": (1, 1, 1), "bot:heads": (1, 1, 1)}
    spec = parse_spec({**BASE, "pools": {}, "seats": {"odd": {"bot": "random"}, "side_*": {"bot": "heads"}}})
    engine: Any = object()
    seats = SeatMap.single(spec, engine, engine)
    paid = {"even": 5.0, "odd": -5.0, "side_1": 1.0, "side_2": 2.0}
    assert seats.bot_rewards(paid) == {"random": -5.0, "heads": 1.5}
    assert seats.bot_rewards({"even": 5.0}) == {"random": 0.0, "heads": 0.0}, "paid nothing"
