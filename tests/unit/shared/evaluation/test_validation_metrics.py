"""What evaluations measure, and on which episodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from opentinker.services.scheduler.jobs.tickets import ticket_seed
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.shared.evaluation.validation_metrics import Z95, interval, rate_interval, validation_metrics
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.evaluation import validation_episodes
from opentinker.shared.types.core import Ending
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.evaluation import exam_seed
from tests.support.factories import V0, group_of, make_result, make_spec, trajectory_of
from tests.support.lineage import undocumented


@pytest.mark.parametrize(("right", "n"), [(0, 10), (10, 10), (3, 10), (57, 64), (1, 1)])
def test_interval_of_a_rate_are_the_rates_that_the_sample_does_not_refute(right: int, n: int) -> None:
    """Wilson: all p with |p_hat - p| <= z sqrt(p(1 - p)/n), here the roots of the quadratic, by numpy."""
    share = right / n
    roots = sorted(np.roots([1 + Z95**2 / n, -(2 * share + Z95**2 / n), share**2]).real)
    found = rate_interval([1.0] * right + [0.0] * (n - right), n)
    assert found == pytest.approx(roots, abs=1e-9)


def test_interval_of_other_values_is_the_normal_approximation() -> None:
    values = [0.25, 0.5, 0.5, 1.0, 0.0, 0.75]
    mean = sum(values) / 6
    half = 1.959964 * math.sqrt(sum((v - mean) ** 2 for v in values) / 5 / 6)
    assert interval(values) == pytest.approx((mean - half, mean + half))
    assert interval([0.25]) is None


def test_metrics_leave_failed_episodes_out_of_every_mean_and_count_them() -> None:
    found = validation_metrics(
        [
            make_result(0, reward=1.0, metrics={"exact": 1.0, "task/easy": 1.0}, tokens=2),
            make_result(1, reward=0.5, metrics={"exact": 0.0, "task/easy": 1.0, "tokens": 9.0}, tokens=4),
            make_result(
                2, reward=0.0, metrics={"exact": 0.0, "task/hard": 1.0, "task/easy": 0.0}, components={"form": 0.5}
            ),
            make_result(3, ending=Ending.ENV_TIMEOUT, reward=0.0, metrics={}, tokens=0, stops=[]),
        ],
        episodes=6,
    )
    counts = {name: found[f"val/{name}"] for name in ("episodes", "failed", "missing", "tokens")}
    assert counts == {"episodes": 3, "failed": 1, "missing": 2, "tokens": 9}
    assert found["val/reward/mean"] == 0.5 and found["val/exact"] == pytest.approx(1 / 3)
    assert found["val/env/tokens"] == 9.0, "a name of ours"
    assert (found["val/task/easy/episodes"], found["val/task/easy/reward"], found["val/task/easy/exact"]) == (
        2,
        0.75,
        0.5,
    )
    assert found["val/task/easy/reward/low"] < 0.75 < found["val/task/easy/reward/high"]
    assert found["val/task/easy/exact/low"] < 0.5 < found["val/task/easy/exact/high"]
    assert found["val/task/hard/reward"] == 0.0 and found["val/component/form"] == 0.5
    assert (found["val/ending/env_done"], found["val/ending/env_timeout"]) == (0.75, 0.25)
    assert found["val/exact/low"] < 1 / 3 < found["val/exact/high"]
    assert undocumented(set(found)) == []


def test_win_rates_are_by_opponent_and_draws_count_half() -> None:
    """Two opponents, 3 start states with 2 samples each."""
    outcomes = [*(1.0, 1.0, 0.5, 0.0, 1.0, 1.0), *(0.0, 0.0, 0.5, 0.5, 0.0)]
    results = [make_result(i, outcome=won, reward=2 * won - 1) for i, won in enumerate(outcomes)]
    found = validation_metrics(results, 6, samples=2, opponents=["weak", "strong"])
    assert (found["val/winrate/weak"], found["val/winrate/strong"]) == pytest.approx((4.5 / 6, (0.0 + 0.5 + 0.0) / 3))
    counts = [found[f"val/{name}/weak"] for name in ("wins", "draws", "losses")]
    assert counts == [4.0, 1.0, 1.0] and found["val/draws/strong"] == 2.0
    assert found["val/winrate/weak/low"] < 0.75 < found["val/winrate/weak/high"]
    assert found["val/reward/against/weak"] == pytest.approx(0.5)
    assert (found["val/episodes"], found["val/missing"]) == (11.0, 1.0)
    assert validation_metrics(results[:6], 6, samples=2)["val/winrate"] == pytest.approx(0.75)
    twice = [make_result(i, reward=float(i % 4)) for i in range(8)]
    both = validation_metrics(twice, 4, opponents=["weak", "strong"])
    once = validation_metrics(twice[:4], 4)
    bounds = ("val/reward/mean", "val/reward/low", "val/reward/high")
    assert [both[name] for name in bounds] == [once[name] for name in bounds], "start states are not doubled"
    assert not any("winrate" in name for name in validation_metrics([make_result(0)], 1)), "nobody else plays"
    assert undocumented(set(found)) == []


def test_metrics_of_an_environment_overwrite_none_of_ours() -> None:
    ours = {"task/easy": 1.0, "task/easy/b": 1.0, "exact": 1.0}
    names = [
        *("reward/mean", "reward/low", "episodes", "turns/mean", "ending/env_done", "component/form", "env/exact"),
        *("exact/low", "reward", "b/episodes", "response_length/median"),
    ]
    plain = validation_metrics([make_result(0, metrics=ours, components={"form": 1.0})], 1)
    odd = {**ours, **dict.fromkeys(names, -9.0)}
    found = validation_metrics([make_result(0, metrics=odd, components={"form": 1.0})], 1)
    assert {name: found[name] for name in plain} == plain
    assert all(found[f"val/env/{name}"] == -9.0 for name in names if name != "b/episodes")
    assert found["val/b/episodes"] == found["val/task/easy/env/b/episodes"] == -9.0
    assert found["val/task/easy/env/reward"] == found["val/task/easy/env/episodes"] == -9.0


def test_metrics_of_an_environment_overwrite_none_of_a_batch() -> None:
    odd = {"loss/policy": -9.0, "reward/median": -9.0, "swap/seconds": -9.0, "exact": 0.5, "grid/exact": 0.25}
    found = batch_metrics([group_of([trajectory_of([7, 8], [0, 1], metrics=odd)])], V0)
    for name in ("loss/policy", "reward/median", "swap/seconds"):
        assert found[f"env/{name}"] == -9.0 and name not in found
    assert (found["exact"], found["grid/exact"]) == (0.5, 0.25)


def test_evaluation_without_any_episode_has_counts_only() -> None:
    found = validation_metrics([], episodes=2)
    assert found == {"val/episodes": 0, "val/failed": 0, "val/missing": 2, "val/tokens": 0}


def test_start_states_are_never_those_of_training() -> None:
    training = {ticket_seed(0, position) for position in range(20_000)}
    assert not training & {exam_seed(0, index) for index in range(2000)}
    assert exam_seed(0, 1) != exam_seed(1, 1)


@pytest.mark.parametrize("name", ["val/reward/mean", "val/reward/low", "val/task/easy/reward"])
def test_no_target_is_a_reward_of_evaluations_that_reward_models_do_not_judge(name: str) -> None:
    train = {"steps": 5, "target": {name: 0.5, "val/exact": 0.5}}
    plan: dict[str, Any] = {"rollout": {}, "validation": {"every": 5}, "train": train}
    assert make_spec(**plan).train.target[name] == 0.5
    with pytest.raises(SpecError, match=r"no evaluation is judged by \[\[reward_models\]\] \(help\)") as refused:
        make_spec(**plan, reward_models=[{"name": "help", "base": "judge"}])
    assert [mistake["field"] for mistake in refused.value.mistakes] == [f"train.target.{name}"]


def test_episodes_have_their_own_sampling_and_environment_settings() -> None:
    spec = make_spec(
        environment={"name": "gsm8k", "config": {"format_reward": 0.2}},
        validation={"every": 5, "config": {"split": "test", "format_reward": 0.0}, "max_tokens": 3, "seed": 4},
        rollout__temperature=1.0,
    )
    played = validation_episodes(parse_spec(spec.model_dump(mode="json")))
    assert played.environment.config == {"split": "test", "format_reward": 0.0}
    assert (played.rollout.temperature, played.rollout.max_tokens, played.rollout.seed) == (0.0, 3, 4)
    assert spec.environment.config == {"format_reward": 0.2} and spec.rollout.temperature == 1.0
