"""The alarm hears a slope, not a level, and outliers do not move it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from opentinker.services.trainer.collapse_alarm import CollapseAlarm
from opentinker.services.trainer.mismatch_alarm import WINDOW, MismatchAlarm, grows, theil_sen
from opentinker.shared.spec import AlgorithmSpec, TrainSpec

NOISE = np.random.default_rng(0).normal(size=WINDOW)
TIME = np.arange(WINDOW)


def test_slope_is_the_median_of_all_pairs() -> None:
    values = [1.0, 2.0, 4.0, 100.0]
    pairs = sorted((values[j] - values[i]) / (j - i) for i in range(4) for j in range(i + 1, 4))
    assert list(theil_sen(values)) == pytest.approx([(pairs[2] + pairs[3]) / 2, 1.0])
    assert list(theil_sen(0.5 * TIME + 3)) == pytest.approx([0.5, 1.0])


def test_a_steady_rise_is_heard_and_a_high_level_is_not() -> None:
    assert grows(0.01 + 0.001 * TIME + 0.001 * NOISE)
    assert not grows(0.5 + 0.01 * NOISE)
    assert not grows(0.5 - 0.01 * TIME)


def test_outliers_a_single_step_and_rounding_are_not_heard() -> None:
    spiky = 0.01 + 0.0005 * NOISE
    spiky[-4:] = 5.0
    assert not grows(spiky)
    assert not grows(np.where(TIME < 5, 0.0, 0.02) + 0.0005 * NOISE), "drift begins when the first lag does"
    assert not grows(1e-7 * (1 + TIME))


def test_it_rings_once_and_stops_when_the_slope_is_gone() -> None:
    alarm = MismatchAlarm()
    began = [alarm.update({"mismatch/mean": 0.001 * (step + 1)}) for step in range(WINDOW + 5)]
    assert began == [[]] * (WINDOW - 1) + [["mismatch/mean"]] + [[]] * 5
    assert alarm.active == {"mismatch/mean"}
    for _ in range(WINDOW):
        alarm.update({"mismatch/mean": 0.045, "drift/mean": 0.1})
    assert not alarm.active
    assert alarm.update({"entropy": 1.0}) == [], "a step without the metric leaves the window as it is"


def test_a_single_wrong_swap_is_heard_and_an_ordinary_one_is_not() -> None:
    """Against the swaps before it: each compares the same weights, so that its level hardly moves."""
    alarm = MismatchAlarm()
    usual = [0.01 * (1 + 0.5 * noise**2) for noise in NOISE[:30]]
    assert not any(alarm.update({"swap/mismatch": value}) for value in usual)
    assert alarm.update({"swap/mismatch": 0.5}) == ["swap/mismatch"] and alarm.active
    assert alarm.update({"swap/mismatch": 0.01}) == [] and not alarm.active
    alarm.update({"swap/mismatch": 0.5})
    assert alarm.update({"entropy": 1.0}) == [] and alarm.active, "not every version is compared"
    assert alarm.update({"swap/mismatch": 0.5}) == [], "still wrong, and told of before"
    assert alarm.update({"swap/mismatch": 0.01}) == [] and not alarm.active
    exact = MismatchAlarm()
    assert not any(exact.update({"swap/mismatch": value}) for value in [1e-7] * 10 + [5e-6]), "rounding"


def learner(**curves: npt.ArrayLike) -> list[dict[str, float]]:
    """What a learner reports step by step: of names, or `reward` for reward/mean among rewards of 0 and 1."""
    columns = {{"reward": "reward/mean"}.get(name, name): np.asarray(curve, float) for name, curve in curves.items()}
    lines = [dict(zip(columns, map(float, line), strict=True)) for line in zip(*columns.values(), strict=True)]
    return [{"reward/min": 0.0, "reward/max": 1.0, **line} for line in lines]


def heard(
    lines: list[dict[str, float]], algorithm: dict[str, object] | None = None, /, **train: object
) -> dict[str, int]:
    """The step at which each alarm began."""
    alarm = CollapseAlarm(TrainSpec.model_validate(train), AlgorithmSpec.model_validate(algorithm or {}))
    began: dict[str, int] = {}
    for step, line in enumerate(lines, 1):
        for ring in alarm.update(line, step):
            assert ring.alarm not in began, "one collapse is one event"
            began[ring.alarm] = step
    return began


STEPS = np.arange(300)
JITTER = np.random.default_rng(1).normal(size=300)
FALLING = np.maximum(2.0 * np.exp(-STEPS / 30), 0.001)
"""Entropy of a policy that grows sure."""
ALIKE = np.clip(STEPS / 150, 0.0, 1.0)
"""Share of groups with equal rewards."""


def test_a_policy_that_says_one_thing_below_its_goal_is_heard() -> None:
    stuck = learner(entropy=FALLING, zero_variance=ALIKE, reward=np.full(300, 0.27))
    assert 150 < heard(stuck)["entropy"] < 200
    assert 150 < heard(stuck, target={"reward/mean": 0.9})["entropy"] < 200
    assert 150 < heard(stuck, target={"val/exact": 0.9})["entropy"] < 200
    assert "entropy" not in heard(stuck, entropy_alarm=0.0)


def test_a_policy_that_has_learned_its_task_and_one_that_is_rewarded_by_chance_are_not() -> None:
    solved = learner(entropy=FALLING, zero_variance=ALIKE, reward=np.clip(STEPS / 100, 0.0, 0.97))
    assert heard(solved) == {} == heard(solved, target={"reward/mean": 0.95})
    lucky = learner(entropy=FALLING, zero_variance=np.full(300, 0.1), reward=0.6 + 0.05 * JITTER)
    assert heard(lucky) == {}
    unsure = learner(entropy=np.full(300, 0.3), zero_variance=ALIKE, reward=np.full(300, 0.27))
    assert "entropy" not in heard(unsure)
    same = [line | {"reward/max": 0.0} for line in learner(entropy=FALLING, zero_variance=ALIKE, reward=[0.0] * 300)]
    assert "entropy" not in heard(same), "no reward was ever better than another"


def test_what_was_learned_and_lost_again_is_heard_once() -> None:
    rise = np.clip(STEPS / 100, 0.0, 0.8)
    lost = np.where(STEPS < 200, rise, 0.1) + 0.03 * JITTER
    assert 200 < heard(learner(exact=lost, reward=rise))["reward_cliff"] < 215, (
        "exact says it, whatever the reward does"
    )
    assert 200 < heard(learner(reward=lost))["reward_cliff"] < 215
    assert heard(learner(reward=lost), collapse_alarm=0.0) == {}
    assert heard(learner(reward=np.where(STEPS < 200, rise, 0.6) + 0.03 * JITTER)) == {}, "a dip"
    assert heard(learner(reward=0.3 + 0.1 * JITTER)) == {}, "noise alone"
    assert heard([{"loss": 1.0}] * 50) == {}


def test_a_reward_that_falls_from_where_it_began_is_heard_once() -> None:
    fallen = np.where(STEPS < 150, 0.8, 0.1) + 0.05 * JITTER
    assert 150 < heard(learner(reward=fallen))["reward_cliff"] < 170
    assert heard(learner(reward=np.where(STEPS < 150, 0.8, 0.5) + 0.05 * JITTER)) == {}
    assert heard(learner(reward=np.clip(0.5 + 0.3 * JITTER, 0.0, 1.0))) == {}, "small batches"


def test_equal_groups_are_heard_also_where_they_are_discarded() -> None:
    equal = np.where(STEPS < 100, 0.4, 0.97)
    assert 105 < heard(learner(reward=0.3 + 0.02 * JITTER, zero_variance=equal))["zero_variance"] < 125
    discarded = np.cumsum(np.where(STEPS < 100, 4.0, 200.0))
    kept = {"zero_variance": np.zeros(300), "groups": np.full(300, 8.0), "dropped/zero_variance": discarded}
    assert 105 < heard(learner(reward=0.3 + 0.02 * JITTER, **kept))["zero_variance"] < 125
    sure = heard(learner(reward=0.3 + 0.02 * JITTER, entropy=np.full(300, 0.001), **kept))
    assert set(sure) == {"entropy"} and 105 < sure["entropy"] < 125, "the policy says the same each time"
    assert heard(learner(reward=0.3 + 0.02 * JITTER, zero_variance=0.7 + 0.1 * JITTER)) == {}
    assert heard(learner(reward=np.full(300, 0.97), zero_variance=equal)) == {}, "it has learned its task"
    never = {"alarms": {"zero_variance": 0.0}}
    assert heard(learner(reward=0.3 + 0.02 * JITTER, zero_variance=equal), **never) == {}


def test_a_task_that_is_never_solved_is_heard_and_one_that_is_solved_from_the_start_is_not() -> None:
    hopeless = learner(reward=np.zeros(40), zero_variance=np.ones(40), **{"reward/max": np.zeros(40)})
    assert heard(hopeless) == {"zero_variance": 20}
    solved = learner(
        reward=np.full(40, 3.0),
        zero_variance=np.ones(40),
        exact=np.ones(40),
        **{"reward/min": np.full(40, 3.0), "reward/max": np.full(40, 3.0)},
    )
    assert heard(solved) == {}
    assert heard([{**line, "exact": 0.0} for line in solved]) == {"zero_variance": 20}


ALONE = {"name": "reinforce_pp", "group_size": 1, "groups_per_batch": 64}


@pytest.mark.parametrize(
    ("algorithm", "changes", "alarms"),
    [
        (ALONE, {}, set()),
        (ALONE, {"entropy": 0.001}, set()),
        ({"name": "ppo"}, {}, set()),
        ({"name": "ppo"}, {"entropy": 0.001}, {"entropy"}),
        ({"name": "spiral"}, {}, set()),
        ({"name": "grpo"}, {}, {"zero_variance"}),
        ({"advantage": "per_turn", "gamma": 0.9}, {"reward/mean": 1.0, "reward/min": 1.0}, set()),
        (ALONE, {"reward/mean": 0.0, "reward/max": 0.0}, {"zero_variance"}),
        ({"name": "ppo"}, {"reward/mean": 0.1 + 0.2, "reward/min": 0.3, "reward/max": 0.1 + 0.2}, {"zero_variance"}),
        ({"name": "distill", "distill_coef": 1.0}, {}, set()),
        ({"name": "distill", "distill_coef": 1.0}, {"reward/mean": 0.0, "reward/max": 0.0}, set()),
        ({"name": "grpo", "distill_coef": 0.5}, {}, set()),
    ],
)
def test_equal_groups_are_heard_only_where_they_teach_nothing(
    algorithm: dict[str, object], changes: dict[str, float], alarms: set[str]
) -> None:
    """Groups of one are always equal, and estimators without a group baseline learn from rewards between groups."""
    means = 0.3 + 0.02 * JITTER[:60]
    lines = [{"zero_variance": 1.0, "reward/min": 0.0, "reward/max": 1.0, "reward/mean": mean} for mean in means]
    assert set(heard([{**line, **changes} for line in lines], algorithm)) == alarms


def test_batches_of_one_episode_teach_if_they_differ_from_each_other() -> None:
    one = {"name": "ppo", "group_size": 1, "groups_per_batch": 1}
    rewards = [float(step % 2) for step in range(60)]
    lines = [
        {"zero_variance": 1.0, "reward/mean": reward, "reward/min": reward, "reward/max": reward} for reward in rewards
    ]
    assert heard(lines, one) == {}


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_lengths_that_drift_are_heard_unless_the_reward_rises(factor: float) -> None:
    lengths = 100.0 * np.where(STEPS < 150, 1.0, factor) * (1 + 0.2 * np.tanh(JITTER))
    flat = 0.4 + 0.05 * JITTER
    assert 155 < heard(learner(reward=flat, **{"response_length/mean": lengths}))["length_drift"] < 175
    better = flat + np.where(STEPS < 150, 0.0, 0.3)
    assert heard(learner(reward=better, **{"response_length/mean": lengths})) == {}
    assert heard(learner(reward=flat, **{"response_length/mean": 100.0 * (1 + STEPS / 300)})) == {}, "slow growth"
    assert heard(learner(reward=flat, **{"response_length/mean": 100.0 * np.exp(0.3 * JITTER)})) == {}, "noise"


@pytest.mark.parametrize(
    ("alarm", "metric", "usual", "bad"), [("kl", "ratio/k3", 0.01, 0.3), ("ratio_tails", "ess", 0.8, 0.1)]
)
def test_ratios_are_heard_by_their_median(alarm: str, metric: str, usual: float, bad: float) -> None:
    noise = np.exp(0.1 * JITTER)
    late = np.where(STEPS < 150, usual, bad) * noise
    assert 155 < heard(learner(reward=np.full(300, 0.5), **{metric: late}))[alarm] < 170
    spiky = np.where(STEPS % 5 == 0, bad, usual) * noise
    assert heard(learner(reward=np.full(300, 0.5), **{metric: spiky})) == {}
    assert heard(learner(reward=np.full(300, 0.5), **{metric: late}), alarms={alarm: 0.0}) == {}


def test_an_alarm_that_flickers_is_one_event_which_names_figure_bound_and_setting() -> None:
    alarm = CollapseAlarm(TrainSpec(), AlgorithmSpec())
    flicker = np.where(STEPS < 30, 0.01, np.where((STEPS // 12) % 2, 0.3, 0.01))
    rings = [
        ring
        for step, line in enumerate(learner(reward=np.full(300, 0.5), **{"ratio/k3": flicker}), 1)
        for ring in alarm.update(line, step)
    ]
    (ring,) = rings
    assert alarm.active == {"kl": ring}
    assert ring.detail["metric"] == "ratio/k3" and ring.value > ring.bound == 0.1
    assert ring.detail["setting"] == "train.alarms.kl" and "algorithm.max_staleness" in str(ring.detail["hint"])
    for step, line in enumerate(learner(reward=np.full(60, 0.5), **{"ratio/k3": np.full(60, 0.01)}), 301):
        assert alarm.update(line, step) == []
    assert not alarm.active
