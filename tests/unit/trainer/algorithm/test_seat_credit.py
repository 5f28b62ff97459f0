"""Advantages in games of several seats, against references written from the papers in another style."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.credit_assignment import Credit, Values, assign
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import SeatBaselines
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, make_trajectory, trajectory_of

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def credit(groups: Sequence[Group], **algorithm: Any) -> Credit:
    return assign(groups, AlgorithmSpec.model_validate(algorithm))


def view(index: int, seat: str, *rewards: float) -> Trajectory:
    """What a seat saw and said: a turn of two tokens for each reward."""
    mask = [0, *[1, 1, 0] * len(rewards)]
    return trajectory_of(range(5, 5 + len(mask)), mask, reward=rewards, index=index, seat=seat)


# --- group baselines over turns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize_std", [True, False])
def test_baseline_over_turns_counts_every_action_step_of_the_agent(normalize_std: bool) -> None:
    """Dr. MAS, equation 5: Y_k holds the reward of each action step of agent k, whichever game it is of."""
    rewards, turns = [1.0, 0.0, 0.25], [1, 3, 2]
    steps = [reward for reward, count in zip(rewards, turns, strict=True) for _ in range(count)]
    mu, sigma = statistics.fmean(steps), statistics.stdev(steps)
    found = advantages.grpo(rewards, normalize_std=normalize_std, turns_G=turns)
    expected = [(r - mu) / (sigma + 1e-4) if normalize_std else r - mu for r in rewards]
    np.testing.assert_allclose(found, expected, **EXACT)
    assert abs(np.dot(found, turns)) < 1e-12, "over all turns of the agent they cancel out"


def test_each_seat_has_its_own_turns() -> None:
    """The proposer speaks once and the critic up to three times; the critic's games count by its own turns."""
    games = [(1.0, 3), (0.0, 1), (0.5, 2)]
    group = group_of(
        [t for i, (r, turns) in enumerate(games) for t in (view(i, "a", -r), view(i, "b", *[0.0] * (turns - 1), r))]
    )
    for name, over in (("dr_mas", None), ("grpo", "turns")):
        found = credit([group], name=name, baseline_over=over, group_size=3).advantages_S
        for seat, first in (("a", 0), ("b", 1)):
            of_games = [(-r, 1) if seat == "a" else (r, turns) for r, turns in games]
            steps = [r for r, turns in of_games for _ in range(turns)]
            mu, sigma = statistics.fmean(steps), statistics.stdev(steps)
            for (r, turns), values in zip(of_games, found[first::2], strict=True):
                np.testing.assert_allclose(values, [(r - mu) / (sigma + 1e-4)] * 2 * turns, **EXACT)


def test_baseline_over_episodes_is_the_default_and_ignores_how_long_they_were() -> None:
    group = group_of([view(0, "", 0.0, 0.0, 1.0), view(1, "", 0.0)])
    found = credit([group], name="dr_grpo", group_size=2).advantages_S
    assert [value[0] for value in found] == [0.5, -0.5]
    over_turns = credit([group], name="dr_grpo", baseline_over="turns", group_size=2).advantages_S
    assert [value[0] for value in over_turns] == pytest.approx([0.25, -0.75], abs=1e-12)


def test_turns_of_one_game_alone_have_nothing_to_compare_with() -> None:
    group = group_of([view(0, "a", 0.0, 1.0), view(0, "b", 0.5), view(1, "b", 1.0)])
    found = credit([group], name="dr_mas", group_size=2).advantages_S
    assert not found[0].any() and found[1].any() and found[2].any()


# --- the figure -----------------------------------------------------------------------------------------------------

MATCHES, GROUP_SIZE, EDGE = 2000, 8, 0.6


def unequal_matches() -> list[Group]:
    """Returns of std 1 whose mean is +0.6 for the first player and -0.6 for the second; games of 1 to 3 turns."""
    rng = np.random.default_rng(0)
    return [
        group_of(
            [
                view(i, seat, *[0.0] * int(rng.integers(3)), float(rng.normal(mean, 1.0)))
                for i in range(GROUP_SIZE)
                for seat, mean in (("first", EDGE), ("second", -EDGE))
            ],
            seq,
        )
        for seq in range(MATCHES // GROUP_SIZE)
    ]


def seat_means(groups: Sequence[Group], seats: Sequence[str], **algorithm: Any) -> dict[str, float]:
    """Mean advantage of each seat over the matches. `seats`: of the trajectories in order."""
    values = [float(a[0]) for a in credit(groups, group_size=GROUP_SIZE, **algorithm).advantages_S]
    return {
        seat: statistics.fmean(v for v, own in zip(values, seats, strict=True) if own == seat) for seat in set(seats)
    }


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dr_mas", "spiral"])
def test_an_edge_of_a_seat_is_no_advantage(preset: str) -> None:
    groups = unequal_matches()
    means = seat_means(groups, [t.seat for group in groups for t in group.trajectories], name=preset)
    assert means.keys() == {"first", "second"} and all(abs(mean) < 0.03 for mean in means.values()), means


def test_a_pooled_baseline_takes_the_edge_of_a_seat_for_merit() -> None:
    """The counterexample: the same matches, with both seats compared with each other."""
    groups = unequal_matches()
    seats = [t.seat for group in groups for t in group.trajectories]
    pooled = [
        group_of([msgspec.structs.replace(t, seat="", index=i) for i, t in enumerate(group.trajectories)], group.seq)
        for group in groups
    ]
    means = seat_means(pooled, seats, name="dr_grpo")
    assert means["first"] == pytest.approx(EDGE, abs=0.05) and means["second"] == pytest.approx(-EDGE, abs=0.05)


# --- running baselines ----------------------------------------------------------------------------------------------


def test_running_baseline_is_the_algorithm_of_the_paper() -> None:
    """SPIRAL, algorithm 1: the baseline is used before the reward moves it."""
    rewards, decay, baseline = [1.0, -1.5, 0.5, 1.0], 0.95, 0.2
    expected, before = [], baseline
    for k, reward in enumerate(rewards):
        mean = decay**k * baseline + math.fsum((1 - decay) * decay ** (k - 1 - i) * rewards[i] for i in range(k))
        expected.append(reward - mean)
        before = decay * before + (1 - decay) * reward
    found, after = advantages.rae(rewards, baseline, decay=decay)
    np.testing.assert_allclose(found, expected, **EXACT)
    assert after == pytest.approx(before, abs=1e-12)


def test_running_baselines_are_kept_by_environment_and_seat() -> None:
    """The reference keeps one number per game and role, and sees group after group, sample after sample."""
    rng = np.random.default_rng(1)
    groups = [
        msgspec.structs.replace(
            group_of([view(i, seat, float(rng.normal())) for i in range(size) for seat in ("a", "b")], seq),
            environment=("kuhn_poker", "gomoku")[seq % 2],
        )
        for seq, size in enumerate((3, 1, 2, 2))
    ]
    kept: dict[tuple[str, str], float] = {("gomoku", "a"): 0.5}
    expected = []
    for group in groups:
        for t in group.trajectories:
            key = group.environment, t.seat
            expected.append(t.reward - kept.get(key, 0.0))
            kept[key] = 0.9 * kept.get(key, 0.0) + 0.1 * t.reward
    algorithm = AlgorithmSpec(name="spiral", baseline_decay=0.9, group_size=1)
    before = {"gomoku": {"a": 0.5}}
    found = assign(groups, algorithm, baselines=before)
    for values, value in zip(found.advantages_S, expected, strict=True):
        np.testing.assert_allclose(values, [value] * 2, **EXACT)
    flat = {(environment, seat): b for environment, own in found.baselines.items() for seat, b in own.items()}
    assert flat == pytest.approx(kept, abs=1e-12) and before == {"gomoku": {"a": 0.5}}
    compared = [t.reward - e for t, e in zip((t for g in groups for t in g.trajectories), expected, strict=True)]
    assert found.metrics["reward/baseline"] == pytest.approx(statistics.fmean(compared), abs=1e-12)
    assert found.metrics["reward/baseline/b"] == pytest.approx(statistics.fmean(compared[1::2]), abs=1e-12)


def test_batches_one_by_one_are_the_same_as_all_at_once() -> None:
    rng = np.random.default_rng(2)
    groups = [group_of([view(0, s, float(rng.normal())) for s in ("a", "b")], seq) for seq in range(12)]
    algorithm = AlgorithmSpec(name="spiral", group_size=1)
    whole = assign(groups, algorithm)
    baselines: SeatBaselines = {}
    parts: list[F64] = []
    for first in range(0, 12, 4):
        stored = msgspec.json.decode(msgspec.json.encode(baselines), type=SeatBaselines)  # as a manifest holds them
        part = assign(groups[first : first + 4], algorithm, baselines=stored)
        parts, baselines = parts + part.advantages_S, part.baselines
    assert baselines == whole.baselines, "to the bit"
    for one, other in zip(parts, whole.advantages_S, strict=True):
        np.testing.assert_array_equal(one, other)


def test_running_baseline_sees_the_penalty_and_the_kl_of_the_whole_sequence() -> None:
    long = trajectory_of([5, *[6] * 10], [0, *[1] * 10], reward=1.0, logprobs=-1.0, reference=-1.5)
    options: dict[str, Any] = {"overlong_shaping": True, "overlong_length": 10, "overlong_buffer": 4}
    options |= {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    found = credit([group_of([long])], name="spiral", group_size=1, **options)
    total = 1.0 - 1.0 - 0.1 * 10 * 0.5
    np.testing.assert_allclose(found.advantages_S[0], [total] * 10, **EXACT)
    assert found.baselines["copy_digits"][""] == pytest.approx(0.05 * total, abs=1e-12)


# --- teams ----------------------------------------------------------------------------------------------------------

TEAMS = {"red": ["r1", "r2"], "blue": ["blue_*"]}
PAID = [  # by sample: r2 had no turn in the second; the judge is in no team
    {"r1": 1.0, "r2": 0.0, "blue_1": -1.0, "blue_2": 0.25, "judge": 0.5},
    {"r1": 0.5, "blue_1": 0.0, "blue_2": 1.0, "judge": 0.0},
    {"r1": -1.0, "r2": 2.0, "blue_1": 0.75, "blue_2": 0.5, "judge": 1.0},
]


def mixed(weight: float) -> list[dict[str, float]]:
    """r' = w * mean of the team's seats that acted + (1 - w) * r, written out."""
    found = []
    for rewards in PAID:
        red = statistics.fmean(r for seat, r in rewards.items() if seat in ("r1", "r2"))
        blue = statistics.fmean(r for seat, r in rewards.items() if seat.startswith("blue"))
        means = {"r1": red, "r2": red, "blue_1": blue, "blue_2": blue}
        found.append({s: weight * means[s] + (1 - weight) * r if s in means else r for s, r in rewards.items()})
    return found


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_seat_is_paid_for_its_team_and_for_itself(weight: float) -> None:
    group = group_of([view(i, seat, r) for i, rewards in enumerate(PAID) for seat, r in rewards.items()])
    found = credit([group], name="dr_grpo", team=TEAMS, team_weight=weight, group_size=3)
    expected = mixed(weight)
    for t, values in zip(group.trajectories, found.advantages_S, strict=True):
        mean = statistics.fmean(rewards[t.seat] for rewards in expected if t.seat in rewards)
        np.testing.assert_allclose(values, [expected[t.index][t.seat] - mean] * 2, **EXACT)
    of_red = [statistics.fmean(r for s, r in rewards.items() if s in ("r1", "r2")) for rewards in PAID]
    seats = [2, 1, 2]
    assert found.metrics["reward/team/red"] == pytest.approx(np.average(of_red, weights=seats), abs=1e-12)
    assert found.metrics.keys() == {"reward/team/red", "reward/team/blue"}


def test_a_team_reward_comes_with_the_last_turn() -> None:
    """By hand, w = 0.5: r1 was paid 1 and 3 in its turns and r2 2, so their team's mean is 3. Each return-to-go of r1
    holds half of its own and half of the team's; a critic sees the same rewards."""
    group = group_of([view(0, "r1", 1.0, 3.0), view(0, "r2", 2.0), view(1, "r1", 0.0, 0.0), view(1, "r2", 6.0)])
    options: dict[str, Any] = {"team": TEAMS, "team_weight": 0.5, "group_size": 2}
    returns = [[0.5 * (1 + 3) + 0.5 * 3, 0.5 * 3 + 0.5 * 3], [0.5 * 3, 0.5 * 3]]
    found = credit([group], advantage="per_turn", normalize_std=False, **options).advantages_S
    for k in (0, 1):
        mean = statistics.fmean(of_game[k] for of_game in returns)
        for place, of_game in ((0, returns[0]), (2, returns[1])):
            np.testing.assert_allclose(found[place][2 * k : 2 * k + 2], [of_game[k] - mean] * 2, **EXACT)
    values = Values([np.zeros(int(t.mask.sum())) for t in group.trajectories], [0.0] * 4)
    critic = assign([group], AlgorithmSpec.model_validate({"name": "ppo", "lam": 1.0, **options}), values)
    assert critic.returns_S is not None
    np.testing.assert_allclose(critic.returns_S[0], np.repeat(returns[0], 2), **EXACT)


def test_running_baselines_follow_team_rewards() -> None:
    group = group_of([view(0, "r1", 1.0), view(0, "r2", 0.0)])
    found = credit([group], name="spiral", team=TEAMS, group_size=1)
    assert [a[0] for a in found.advantages_S] == [0.5, 0.5]
    assert found.baselines["copy_digits"] == pytest.approx({"r1": 0.025, "r2": 0.025}, abs=1e-12)


@pytest.mark.parametrize("field", ["team", "episode_peers"])
def test_lists_without_any_seat_of_the_game_fail_the_job(field: str) -> None:
    game = group_of([view(i, seat, float(i)) for i in (0, 1) for seat in ("a", "b")])
    with pytest.raises(JobFailed, match=rf"algorithm\.{field} names no seat of this environment.*'a', 'b'"):
        credit([game], name="dr_grpo", group_size=2, **{field: TEAMS})
    named = group_of([msgspec.structs.replace(t, policy=t.seat) for t in game.trajectories])
    lists = {"others": ["b", "c"]}
    assert credit([named.of("a")], name="dr_grpo", group_size=2, **{field: lists}).advantages_S, "another one's seats"


# --- hierarchical: proposer and solvers -----------------------------------------------------------------------------

SOLVERS = {"solvers": ["solver_*"]}
PROBLEMS = [  # by sample; nobody but one solver got to work on the last problem
    {"proposer": 0.25, "solver_1": 1.0, "solver_2": 0.0, "solver_3": 0.5},
    {"proposer": 1.0, "solver_1": 1.0, "solver_2": 1.0, "solver_3": 0.0},
    {"proposer": 0.0, "solver_1": 0.75},
]


def proposals() -> Group:
    return group_of([view(i, seat, r) for i, rewards in enumerate(PROBLEMS) for seat, r in rewards.items()])


@pytest.mark.parametrize("advantage", ["dr_grpo", "grpo", "rloo"])
def test_solvers_of_one_problem_and_proposers_of_one_group_are_compared(advantage: str) -> None:
    """The reference: peers are (role, episode) for solvers and the role alone for others, and one alone gets 0."""
    peers: dict[tuple[str, int], list[float]] = {}
    for i, rewards in enumerate(PROBLEMS):
        for name, reward in rewards.items():
            peers.setdefault(("solver", i) if name.startswith("solver") else (name, -1), []).append(reward)

    def expected(reward: float, own: list[float]) -> float:
        if len(own) == 1:
            return 0.0
        if advantage == "rloo":
            return reward - (math.fsum(own) - reward) / (len(own) - 1)
        scale = statistics.stdev(own) + 1e-4 if advantage == "grpo" else 1.0
        return (reward - statistics.fmean(own)) / scale

    group = proposals()
    found = credit([group], advantage=advantage, episode_peers=SOLVERS, group_size=3).advantages_S
    for t, values in zip(group.trajectories, found, strict=True):
        own = peers["solver", t.index] if t.seat != "proposer" else peers["proposer", -1]
        np.testing.assert_allclose(values, [expected(t.reward, own)] * 2, **EXACT)
    assert not found[-1].any() and found[0].any()


def test_two_kinds_of_seats_are_peers_of_their_own_kind_alone() -> None:
    rewards = {"s1": 1.0, "s2": 0.0, "c1": 5.0, "c2": 3.0}
    group = group_of([view(0, seat, r) for seat, r in rewards.items()])
    lists = {"solvers": ["s1", "s2"], "critics": ["c?"]}
    found = credit([group], name="dr_grpo", episode_peers=lists, group_size=2).advantages_S
    assert [a[0] for a in found] == [0.5, -0.5, 1.0, -1.0]


def test_peers_in_an_episode_may_be_compared_turn_by_turn() -> None:
    group = group_of([view(0, "solver_1", 1.0, 0.0), view(0, "solver_2", 0.0, 0.0, 4.0), view(1, "solver_1", 9.0)])
    options: dict[str, Any] = {"episode_peers": SOLVERS, "group_size": 2}
    found = credit([group], advantage="per_turn", normalize_std=False, **options).advantages_S
    assert found[0].tolist() == [-1.5, -1.5, -2.0, -2.0] and found[1].tolist() == [1.5, 1.5, 2.0, 2.0, 0.0, 0.0]
    assert not found[2].any()
    over = credit([group], name="dr_mas", normalize_std=False, **options).advantages_S
    mean = (2 * 1.0 + 3 * 4.0) / 5
    np.testing.assert_allclose([over[0][0], over[1][0]], [1.0 - mean, 4.0 - mean], **EXACT)


def test_a_policy_is_paid_for_team_mates_that_other_policies_play() -> None:
    """What one policy's trainer sees of a match: its own trajectories, and everybody's rewards."""
    whole = group_of([view(i, seat, r) for i, rewards in enumerate(PAID) for seat, r in rewards.items()])
    named = [msgspec.structs.replace(t, policy=t.seat) for t in whole.trajectories]
    whole = msgspec.structs.replace(whole, trajectories=named)
    options: dict[str, Any] = {"name": "dr_grpo", "team": TEAMS, "team_weight": 0.5, "group_size": 3}
    together = credit([whole], **options)
    for seat in sorted({t.seat for t in named}):
        own = whole.of(seat)
        assert {t.seat for t in own.trajectories} == {seat} and own.totals == whole.totals
        alone = credit([own], **options)
        expected = [a for t, a in zip(named, together.advantages_S, strict=True) if t.seat == seat]
        for found, wanted in zip(alone.advantages_S, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_policy_s_part_of_a_match_says_how_old_its_opponents_were() -> None:
    versions = {"a": [WeightVersion(1, 4)], "b": [WeightVersion(1, 3), WeightVersion(1, 5)], "c": [WeightVersion(1, 7)]}
    played = [make_trajectory(index=0, seat=name, policy=name, versions=of) for name, of in versions.items()]
    whole = group_of([*played, make_trajectory(index=1, seat="b", policy="b", versions=[WeightVersion(1, 2)])])
    assert whole.of("a").opponents == {"b": WeightVersion(1, 2), "c": WeightVersion(1, 7)}
    assert whole.of("b").opponents == {"a": WeightVersion(1, 4), "c": WeightVersion(1, 7)}
