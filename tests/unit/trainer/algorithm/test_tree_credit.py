"""Advantages in trees against a reference written from AT-GRPO in another style, and what a batch of trees says."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.credit_assignment import Credit, assign
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.services.trainer.batch.distributions import distributions
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.spec.tree_sampling import turn_rewards
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import V0, group_of, make_group, make_trajectory, trajectory_of

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
Paid = Mapping[str, float]


def with_paid(trajectory: Trajectory, paid: Sequence[Paid]) -> Trajectory:
    turns = [msgspec.structs.replace(turn, paid=dict(one)) for turn, one in zip(trajectory.turns, paid, strict=True)]
    return msgspec.structs.replace(trajectory, turns=turns)


def tree(nodes: Sequence[tuple[str, Sequence[Paid], int]], seq: int = 0) -> Group:
    """`nodes`: of each turn the seat, what each candidate was paid, and which was chosen. Every candidate has two
    tokens."""
    nodes = [(seat, [{seat: 0.0, **paid} for paid in paid_K], best) for seat, paid_K, best in nodes]
    seats = dict.fromkeys(seat for seat, _, _ in nodes)
    chosen = {
        seat: [(number, paid[best]) for number, (own, paid, best) in enumerate(nodes) if own == seat] for seat in seats
    }
    played = []
    for seat, turns in chosen.items():
        mask = [0, *[1, 1, 0] * len(turns)]
        rewards = [paid.get(seat, 0.0) for _, paid in turns]
        numbers = [number for number, _ in turns]
        one = trajectory_of(range(5, 5 + len(mask)), mask, reward=rewards, numbers=numbers, seat=seat)
        played.append(with_paid(one, [paid for _, paid in turns]))
    others = []
    for number, (seat, paid_K, best) in enumerate(nodes):
        left = [paid for place, paid in enumerate(paid_K) if place != best]
        for index, paid in enumerate(left, start=1):
            one = make_trajectory(index=index, number=number, seat=seat, reward=paid.get(seat, 0.0), output=(8, 1))
            others.append(with_paid(one, [paid]))
    made = [*played, *sorted(others, key=lambda one: one.index)]
    group = group_of(made[:1], seq)
    return msgspec.structs.replace(group, trajectories=made, is_tree=True)


def credit(groups: Sequence[Group], **algorithm: Any) -> Credit:
    return assign(groups, AlgorithmSpec.model_validate({"name": "at_grpo", "group_size": 4, **algorithm}))


def reference(rewards_K: Sequence[float], *, normalize_std: bool = True) -> list[float]:
    """One group of AT-GRPO: the K candidates of one agent in one turn."""
    mean = statistics.fmean(rewards_K)
    spread = statistics.stdev(rewards_K) + 1e-4 if normalize_std else 1.0
    return [(reward - mean) / spread for reward in rewards_K]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_the_candidates_of_a_turn_are_compared_with_each_other(normalize_std: bool) -> None:
    rng = random.Random(1)
    rewards_NK = [[rng.gauss(n, 1 + n) for _ in range(4)] for n in range(5)]
    found = advantages.agent_turn(rewards_NK, normalize_std=normalize_std)
    for values_K, rewards_K in zip(found, rewards_NK, strict=True):
        np.testing.assert_allclose(values_K, reference(rewards_K, normalize_std=normalize_std), **EXACT)
        assert abs(values_K.sum()) < 1e-10


def random_nodes(rng: random.Random, turns: int = 6, size: int = 4) -> list[tuple[str, list[Paid], int]]:
    return [
        (
            ("a", "b")[number % 2],
            [{"a": rng.random() + number, "b": rng.random(), "c": rng.random()} for _ in range(size)],
            rng.randrange(size),
        )
        for number in range(turns)
    ]


@pytest.mark.parametrize("team", [{}, {"team": {"both": ["a", "b"]}}, {"team": {"all": ["*"]}, "team_weight": 0.7}])
def test_every_token_gets_the_advantage_of_its_own_turn(team: dict[str, Any]) -> None:
    """r = w * team + (1 - w) * own of that turn; a group per agent and turn; all K candidates are trained."""
    nodes = random_nodes(random.Random(3))
    group = tree(nodes)
    group.check()
    found = credit([group], **team)
    weight = team.get("team_weight", 0.5) if team else 0.0
    members = {"both": "ab", "all": "abc"}.get(next(iter(team.get("team", {"": 0}))), "a")
    expected: dict[tuple[str, int, int], float] = {}
    for number, (seat, paid_K, best) in enumerate(nodes):
        rewards = [
            weight * statistics.fmean(paid[member] for member in members) + (1 - weight) * paid[seat] for paid in paid_K
        ]
        values = reference(rewards)
        order = [best, *(place for place in range(4) if place != best)]
        expected |= {(seat, number, index): values[place] for index, place in enumerate(order)}
    for trajectory, values_T in zip(group.trajectories, found.advantages_S, strict=True):
        wanted = [expected[trajectory.seat, turn.number, trajectory.index] for turn in trajectory.turns]
        np.testing.assert_allclose(values_T, np.repeat(wanted, 2), **EXACT)
    assert found.metrics["reward/equal_turns"] == 0.0
    assert found.returns_S is None


def test_alpha_of_the_paper_is_a_weight() -> None:
    """r = alpha * team + own orders and normalises like the weights alpha / (1 + alpha) and 1 / (1 + alpha)."""
    rng, alpha = random.Random(5), 1.5
    paid_K = [{"a": rng.random(), "b": rng.random()} for _ in range(8)]
    spec = AlgorithmSpec.model_validate({"name": "at_grpo", "team": {"t": ["a", "b"]}, "team_weight": alpha / 2.5})
    ours = turn_rewards("a", paid_K, spec)
    paper = [alpha * (paid["a"] + paid["b"]) / 2 + paid["a"] for paid in paid_K]
    np.testing.assert_allclose(np.multiply(ours, 1 + alpha), paper, **EXACT)


def test_what_a_seat_earns_in_turns_of_others_does_not_count() -> None:
    """The loser of a game gets its -1 in the winner's turn; its own candidates were all paid alike."""
    group = tree([("a", [{}, {}], 0), ("b", [{"b": 1.0, "a": -1.0}, {}], 0)])
    lost, *others = group.trajectories
    lost = msgspec.structs.replace(lost, turns=[msgspec.structs.replace(lost.turns[0], reward=-1.0)], reward=-1.0)
    group = msgspec.structs.replace(group, trajectories=[lost, *others])
    found = credit([group], group_size=2)
    assert not found.advantages_S[0].any()
    assert [float(values[0]) for values in found.advantages_S[1:]] == pytest.approx(
        [reference([1.0, 0.0])[0], 0.0, reference([1.0, 0.0])[1]], abs=1e-12
    )
    assert found.metrics["reward/equal_turns"] == 0.5
    assert not group.equal and tree([("a", [{"a": 1.0}, {"a": 1.0}], 0)]).equal


def test_a_mean_over_turns_of_other_states_is_no_baseline() -> None:
    """The counterexample: a turn from which more can be had looks like merit if turns are compared across states."""
    nodes: list[tuple[str, list[Paid], int]] = [
        ("a", [{"a": value + number} for value in (0.0, 0.1, 0.2, 0.3)], 3) for number in range(3)
    ]
    group = tree(nodes)
    of_tree = [abs(float(np.mean(list(values)))) for values in zip(*_by_turn(group, credit([group])), strict=True)]
    assert max(of_tree) < 1e-12
    pooled = credit([msgspec.structs.replace(group, is_tree=False)], name="dr_grpo")
    assert abs(float(pooled.advantages_S[0][0])) > 0.3


def _by_turn(group: Group, found: Credit) -> list[list[float]]:
    """Per sample, the advantage of each turn."""
    by: dict[int, list[float]] = {}
    for trajectory, values in zip(group.trajectories, found.advantages_S, strict=True):
        by.setdefault(trajectory.index, []).extend(values[::2].tolist())
    return list(by.values())


def test_metrics_of_a_tree_are_those_of_the_episode() -> None:
    group = tree([("", [{"": 0.5}, {"": 0.25}], 0), ("", [{"": 0.0}, {"": 1.0}], 1)])
    made = [msgspec.structs.replace(t, metrics={"exact": float(t.index == 0)}) for t in group.trajectories]
    group = msgspec.structs.replace(group, trajectories=made)
    metrics = batch_metrics([group], V0)
    assert (metrics["reward/mean"], metrics["reward/env/copy_digits"]) == (1.5, 1.5)
    assert (metrics["exact"], metrics["turns/mean"], metrics["response_length/mean"]) == (1.0, 2.0, 4.0)
    assert (metrics["trajectories"], metrics["ending/env_done"], metrics["zero_variance"]) == (3.0, 1.0, 0.0)
    histograms = distributions([group], V0, {})
    assert sum(histograms["reward"]["counts"]) == 1 and sum(histograms["staleness"]["counts"]) == 3


def test_a_group_that_is_no_tree_has_one_trajectory_per_stream() -> None:
    group = tree([("", [{"": 0.5}, {"": 0.25}], 0), ("", [{"": 0.0}, {"": 1.0}], 1)])
    group.check()
    with pytest.raises(ValueError, match="one trajectory per seat and stream"):
        msgspec.structs.replace(group, is_tree=False).check()
    twice = [*group.trajectories, group.trajectories[-1]]
    with pytest.raises(ValueError, match="in a tree per candidate"):
        msgspec.structs.replace(group, trajectories=twice).check()


def test_a_tree_is_one_game_against_the_other_policy() -> None:
    group = tree([("a", [{"a": 1.0}, {}, {}], 0), ("b", [{"b": 0.5}, {"b": 0.25}, {}], 0)])
    made = [msgspec.structs.replace(t, policy={"a": "p", "b": "q"}[t.seat]) for t in group.trajectories]
    group = msgspec.structs.replace(group, trajectories=made)
    assert (group.of("p").outcomes, group.of("q").outcomes) == ({"q": (1, 0, 0)}, {"p": (0, 0, 1)})


def test_groups_that_are_no_trees_fail_the_job() -> None:
    with pytest.raises(JobFailed, match="a group is no tree"):
        credit([make_group(size=4)])


def test_the_part_of_a_policy_is_compared_as_before() -> None:
    nodes = random_nodes(random.Random(7))
    group = tree(nodes)
    policies = {"a": "p", "b": "q"}
    made = [msgspec.structs.replace(t, policy=policies[t.seat]) for t in group.trajectories]
    group = msgspec.structs.replace(group, trajectories=made)
    team = {"team": {"both": ["a", "b"]}}
    whole = credit([group], **team).advantages_S
    for policy in ("p", "q"):
        part = group.of(policy)
        part.check()
        found = credit([part], **team).advantages_S
        wanted = [values for t, values in zip(group.trajectories, whole, strict=True) if t.policy == policy]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
