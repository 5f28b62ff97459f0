"""Advantage estimators against references written from the papers in another style, and by hand."""

from __future__ import annotations

import math
import statistics

import msgspec
import numpy as np
import pytest

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.credit_assignment import Values, assign
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Group, Trajectory
from tests.support.factories import group_of, trajectory_of

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5]


def algorithm(**fields: object) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate(fields)


def trajectory(
    *turns: tuple[int, float], prompt: int = 2, logprobs: float = -1.0, reference: float | None = None
) -> Trajectory:
    """`turns`: sampled tokens and reward of each; an observation of one token stands between two."""
    mask = [0] * prompt + [m for tokens, _ in turns for m in [1] * tokens + [0]]
    rewards = [reward for _, reward in turns]
    return trajectory_of([0] * len(mask), mask, reward=rewards, logprobs=logprobs, reference=reference)


def group(*trajectories: Trajectory) -> Group:
    """Numbered as they come; valid, as every group that reaches an estimator is."""
    made = group_of([msgspec.structs.replace(t, index=i) for i, t in enumerate(trajectories)])
    made.check()
    return made


def test_group_relative_estimators_are_their_formulas() -> None:
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    np.testing.assert_allclose(advantages.grpo(REWARDS), [(r - mean) / (std + 1e-4) for r in REWARDS])
    np.testing.assert_allclose(advantages.dr_grpo(REWARDS), [r - mean for r in REWARDS])
    np.testing.assert_allclose(advantages.maxrl(REWARDS), [(r - mean) / mean for r in REWARDS])
    others = [statistics.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i in range(5)]
    np.testing.assert_allclose(advantages.rloo(REWARDS), [r - o for r, o in zip(REWARDS, others, strict=True)])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_equal_rewards_teach_nothing_and_one_alone_is_refused(name: str) -> None:
    estimate = getattr(advantages, name)
    assert (estimate([0.1] * 6) == 0).all() and (estimate([0.0, 0.0]) == 0).all()
    with pytest.raises(ValueError, match="two"):
        estimate([1.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_rewards_that_differ_by_rounding_are_equal(name: str) -> None:
    assert (getattr(advantages, name)([0.1 + 0.2, 0.3, 0.3]) == 0).all()


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(JobFailed, match=r"maxrl.*negative"):
        assign([group(trajectory((1, -1.0)), trajectory((1, 0.0)))], algorithm(advantage="maxrl"))


def test_reinforce_pp_normalises_over_all_tokens_of_the_batch() -> None:
    returns = [np.array([1.0, 1.0, 1.0]), np.array([0.0]), np.array([0.5, 0.25])]
    tokens = [float(x) for part in returns for x in part]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    for part, found in zip(returns, advantages.reinforce_pp(returns), strict=True):
        np.testing.assert_allclose(found, [(x - mean) / std for x in part], rtol=1e-6)


def test_reinforce_pp_takes_the_kl_still_to_come_off_the_reward() -> None:
    """k1 per token is -1 + 1.5 = 0.5; with beta 0.1 a token pays 0.05 for itself and each one after it."""
    batch = [group(trajectory((3, 1.0), reference=-1.5), trajectory((2, 0.0), reference=-1.5))]
    credit = assign(batch, algorithm(name="reinforce_pp", kl_coef=0.1))
    returns = [1 - 0.15, 1 - 0.10, 1 - 0.05, -0.10, -0.05]
    mean, std = statistics.fmean(returns), statistics.pstdev(returns)
    np.testing.assert_allclose(np.concatenate(credit.advantages_S), [(r - mean) / std for r in returns], rtol=1e-6)
    assert credit.metrics["reward/kl"] == pytest.approx(0.5)


def test_reinforce_pp_baseline_centres_by_group_and_scales_by_batch() -> None:
    rewards, counts = [[1.0, 0.0], [0.0, 0.5]], [[1, 3], [2, 2]]
    tokens = [0.5, -0.5, -0.5, -0.5, -0.25, -0.25, 0.25, 0.25]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    found = advantages.reinforce_pp_baseline(rewards, counts)
    np.testing.assert_allclose(np.concatenate(found), [(x - mean) / std for x in (0.5, -0.5, -0.25, 0.25)], rtol=1e-6)


def test_per_turn_compares_a_turn_with_the_same_turn_of_the_others() -> None:
    """Late turns pay ten times what first turns pay: each position has its own mean and deviation."""
    rewards = [[0.0, 10.0], [1.0, 0.0], [0.0, 20.0, 3.0]]
    returns = [[10.0, 10.0], [1.0, 0.0], [23.0, 23.0, 3.0]]
    found = advantages.per_turn(rewards, gamma=1.0)
    for k in (0, 1):
        column = [r[k] for r in returns]
        mean, std = statistics.mean(column), statistics.stdev(column)
        np.testing.assert_allclose([f[k] for f in found], [(x - mean) / (std + 1e-4) for x in column])
    assert found[2][2] == 0, "nobody else had a third turn"
    discounted = advantages.per_turn(rewards, gamma=0.5, normalize_std=False)
    first = [0 + 5.0, 1.0, 0 + 10 + 0.75]
    np.testing.assert_allclose([f[0] for f in discounted], [x - statistics.mean(first) for x in first])


def test_per_turn_gives_all_tokens_of_a_turn_its_advantage() -> None:
    batch = [group(trajectory((2, 0.0), (3, 1.0)), trajectory((1, 1.0), (1, 0.0)), trajectory((4, 0.0)))]
    spec = algorithm(advantage="per_turn", normalize_std=False)
    found = assign(batch, spec).advantages_S
    third = 2 / 3
    np.testing.assert_allclose(found[0], [1 - third] * 2 + [0.5] * 3)
    np.testing.assert_allclose(found[1], [1 - third, -0.5])
    np.testing.assert_allclose(found[2], [-third] * 4)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.99, 0.95)])
def test_gae_is_the_double_sum_of_the_paper(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    found, returns = advantages.gae(rewards, values, gamma=gamma, lam=lam)
    after = [*values[1:].tolist(), 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(7)]
    expected = [sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, 7)) for t in range(7)]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(returns, np.array(expected) + values)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_bootstraps_after_truncation_and_not_after_termination(gamma: float, lam: float) -> None:
    """By hand, of two tokens: A_1 = r_1 + gamma V(s_2) - V(s_1), A_0 = r_0 + gamma V(s_1) - V(s_0) + gamma lam A_1."""
    before, end = np.array([0.3, -0.2]), 0.7
    for truncated in (True, False):
        batch = [group(msgspec.structs.replace(trajectory((1, 0.5), (1, 1.0)), truncated=truncated))]
        last = 1.0 + gamma * (end if truncated else 0.0) - before[1]
        first = 0.5 + gamma * before[1] - before[0] + gamma * lam * last
        credit = assign(batch, algorithm(name="ppo", gamma=gamma, lam=lam), Values([before], [end]))
        assert credit.returns_S is not None and credit.returns_S[0].dtype == np.float64
        np.testing.assert_allclose(credit.returns_S[0], np.array([first, last]) + before, rtol=0, atol=1e-15)


def test_a_truncated_seat_ends_where_it_acted_last() -> None:
    """Of two streams the value of the later one's end counts, whichever comes first in the batch."""
    early = msgspec.structs.replace(trajectory((1, 0.0)), truncated=True)
    late = msgspec.structs.replace(early, stream="late", turns=[msgspec.structs.replace(early.turns[0], number=1)])
    for streams, ends in (((early, late), [9.0, 0.5]), ((late, early), [0.5, 9.0])):
        batch = [group_of(list(streams))]
        credit = assign(batch, algorithm(name="ppo", lam=0.0), Values([np.zeros(1), np.zeros(1)], ends))
        assert credit.returns_S is not None
        assert [float(r[0]) for r in credit.returns_S] == [0.5 if s is late else 0.0 for s in streams]


def test_gae_rewards_stand_on_the_last_token_of_their_turn() -> None:
    batch = [group(trajectory((2, 0.25), (3, 1.0)), trajectory((1, 0.0)))]
    spec = algorithm(name="ppo", lam=1.0)
    credit = assign(batch, spec, Values([np.zeros(5), np.zeros(1)], [0.0, 0.0]))
    assert credit.returns_S is not None
    np.testing.assert_allclose(credit.returns_S[0], [1.25, 1.25, 1.0, 1.0, 1.0])
    flat = np.concatenate(credit.advantages_S)
    assert flat.mean() == pytest.approx(0) and flat.std() == pytest.approx(1)


def test_overlong_penalty_falls_linearly_over_its_buffer() -> None:
    found = advantages.overlong_penalty([0, 80, 85, 90, 100, 120], length=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1, -1])


def test_overlong_shaping_and_kl_change_what_a_group_estimator_sees() -> None:
    """Rewards 1 and 1, but the second is at its full length and so loses 1; the KL of the sequence is summed."""
    long, short = trajectory((10, 1.0), reference=-1.5), trajectory((2, 1.0), reference=-1.0)
    spec = algorithm(
        advantage="dr_grpo", overlong_shaping=True, overlong_length=10, overlong_buffer=4, kl_coef=0.1, kl_in="reward",
        kl_estimator="k1",
    )  # fmt: skip
    credit = assign([group(long, short)], spec)
    rewards = [1 - 1 - 0.1 * 10 * 0.5, 1.0]
    mean = statistics.fmean(rewards)
    for found, reward, count in zip(credit.advantages_S, rewards, (10, 2), strict=True):
        np.testing.assert_allclose(found, [reward - mean] * count)
    assert credit.metrics["reward/overlong"] == -0.5


def test_kl_in_the_reward_needs_the_reference() -> None:
    with pytest.raises(JobFailed, match="without reference"):
        assign([group(trajectory((1, 0.0)), trajectory((1, 1.0)))], algorithm(name="reinforce_pp", kl_coef=0.1))


def test_k3_of_the_reward_is_not_negative() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=50), rng.normal(size=50)
    assert (advantages.kl_estimate(p, q, "k3") >= 0).all()
    assert math.isclose(advantages.kl_estimate(p, q, "k1")[0], p[0] - q[0])
