"""Intervals of evaluations that play each start state several times."""

from __future__ import annotations

import numpy as np
import pytest

from opentinker.shared.evaluation.validation_metrics import Z95, pass_at, rate_interval, validation_metrics
from tests.support.factories import make_result


def wilson(share: float, n: float) -> list[float]:
    """The roots of (p_hat - p)^2 = z^2 p(1 - p)/n, by numpy."""
    return sorted(np.roots([1 + Z95**2 / n, -(2 * share + Z95**2 / n), share**2]).real)


def test_a_rate_stays_below_1_where_one_of_several_samples_failed() -> None:
    rewards = [1.0] * 39 + [0.0]
    results = [make_result(i, reward=reward, metrics={"exact": reward}) for i, reward in enumerate(rewards)]
    found = validation_metrics(results, 40, samples=2)
    effective = 0.975 * 0.025 / (np.var([1.0] * 19 + [0.5], ddof=1) / 20)
    assert 38 < effective < 40
    for name in ("pass/1", "exact", "reward"):
        bounds = [found[f"val/{name}/low"], found[f"val/{name}/high"]]
        assert bounds == pytest.approx(wilson(0.975, float(effective)), abs=1e-9)
        assert 0 < bounds[0] < 0.975 < bounds[1] < 1


@pytest.mark.parametrize(
    ("rates", "episodes", "effective"),
    [
        ([1.0, 1.0, 0.0, 0.0, 0.0], 50, 5),  # all episodes of a start state are alike: they are one
        ([0.5, 0.5, 0.5, 0.5], 40, 40),  # start states do not differ
        ([1.0, 1.0, 1.0], 30, 3),  # nothing is known of how much they differ
        ([0.0, 0.0], 8, 2),
        ([0.25], 4, 1),
    ],
)
def test_episodes_count_as_far_as_start_states_resemble_each_other(
    rates: list[float], episodes: int, effective: int
) -> None:
    assert rate_interval(rates, episodes) == pytest.approx(wilson(float(np.mean(rates)), effective), abs=1e-9)


def test_rates_of_any_evaluation_have_bounds_between_0_and_1_that_hold_them() -> None:
    random = np.random.default_rng(0)
    for samples in (1, 2, 4, 8):
        for chance in (0.0, 0.02, 0.5, 0.98, 1.0):
            states = [i // samples for i in range(samples * 12)]
            found = pass_at([bool(won) for won in random.random(len(states)) < chance], states, samples)
            for name in (name for name in found if not name.endswith(("low", "high"))):
                low, value, high = found[f"{name}/low"], found[name], found[f"{name}/high"]
                assert 0 <= low <= value <= high <= 1 and low < high, (name, samples, chance)


def test_the_interval_covers_the_rate_about_as_often_as_it_says() -> None:
    """30 start states with chances of their own, 4 samples each: the mean chance lies within 19 of 20 intervals."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        rates = random.binomial(4, random.beta(0.6, 0.4, 30)) / 4
        low, high = rate_interval(rates.tolist(), 120)
        covered += low <= 0.6 <= high
    assert 925 <= covered <= 975


def test_a_win_rate_with_draws_stays_below_1() -> None:
    outcomes = [1.0] * 19 + [0.5]
    found = validation_metrics([make_result(i, outcome=won) for i, won in enumerate(outcomes)], 20)
    assert 0.75 < found["val/winrate/low"] < found["val/winrate"] == 0.975 < found["val/winrate/high"] < 1
