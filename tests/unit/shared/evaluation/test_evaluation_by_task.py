"""Evaluations by task: episodes, rewards and solved shares with their intervals, compared with float64 references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from opentinker.shared.evaluation.validation_metrics import MAX_TASKS, Z95, pass_at, validation_metrics
from opentinker.shared.types.evaluation import EvalResult
from tests.support.factories import make_result


def result(index: int, task: str, reward: float) -> EvalResult:
    metrics: dict[str, Any] = {f"task/{task}": 1.0, "exact": float(reward == 1.0)}
    return make_result(index, reward=reward, metrics=metrics)


def wilson(share: float, n: int) -> list[float]:
    """The roots of (p_hat - p)^2 = z^2 p(1 - p)/n, by numpy."""
    z = np.float64(Z95)
    return sorted(np.roots([1 + z**2 / n, -(2 * share + z**2 / n), share**2]).real)


def test_a_task_has_the_share_of_its_episodes_that_were_solved_with_wilsons_interval() -> None:
    rewards = {"algebra": [1.0, 0.5, 1.0, 0.0, 1.0], "geometry": [0.0, 0.0, 0.25]}
    of_all = [(task, reward) for task, earned in rewards.items() for reward in earned]
    found = validation_metrics([result(i, *one) for i, one in enumerate(of_all)], len(of_all))
    for task, earned in rewards.items():
        solved = [reward == 1.0 for reward in earned]
        place = f"val/task/{task}"
        assert found[f"{place}/episodes"] == len(earned)
        assert found[f"{place}/pass/1"] == pytest.approx(np.mean(solved))
        bounds = [found[f"{place}/pass/1/low"], found[f"{place}/pass/1/high"]]
        assert bounds == pytest.approx(wilson(float(np.mean(solved)), len(solved)), abs=1e-9)
        half = Z95 * np.std(earned, ddof=1) / math.sqrt(len(earned))
        bounds = [found[f"{place}/reward/low"], found[f"{place}/reward/high"]]
        assert bounds == pytest.approx([np.mean(earned) - half, np.mean(earned) + half])
    assert [found["val/pass/1/low"], found["val/pass/1/high"]] == pytest.approx(wilson(3 / 8, 8), abs=1e-9)


def test_solved_follows_the_setting_and_pass_at_k_is_by_task_too() -> None:
    """Two start states of a task with 2 samples each, one of another."""
    earned = [("a", 0.5), ("a", 0.0), ("a", 0.0), ("a", 0.0), ("b", 0.5), ("b", 0.75)]
    found = validation_metrics([result(i, *one) for i, one in enumerate(earned)], 6, samples=2, solved_at=0.5)
    names = ("a/pass/1", "a/pass/2", "b/pass/1", "b/pass/2")
    assert [found[f"val/task/{name}"] for name in names] == [0.25, 0.5, 1.0, 1.0]
    bounds = [found["val/task/a/pass/2/low"], found["val/task/a/pass/2/high"]]
    assert bounds == pytest.approx(wilson(0.5, 2), abs=1e-9)


def test_pass_at_k_has_the_interval_of_its_mean_over_start_states() -> None:
    found = pass_at([True, False, False, False, True, True], [0, 0, 1, 1, 2, 2], samples=2)
    assert np.var([0.5, 0.0, 1.0], ddof=1) / 3 == pytest.approx(0.5 * 0.5 / 3), "the effective sample size is 3"
    assert [found["val/pass/1/low"], found["val/pass/1/high"]] == pytest.approx(wilson(0.5, 3), abs=1e-9)
    assert [found["val/pass/2/low"], found["val/pass/2/high"]] == pytest.approx(wilson(2 / 3, 3), abs=1e-9)


def test_the_tasks_with_most_episodes_are_reported_however_many_there_are() -> None:
    tasks = [f"t{i:03}" for i in range(MAX_TASKS + 10)]
    played = [*tasks, *tasks[10:]]
    found = validation_metrics([result(i, task, 1.0) for i, task in enumerate(played)], len(played))
    reported = {name.split("/")[2] for name in found if name.startswith("val/task/")}
    assert reported == set(tasks[10:])
