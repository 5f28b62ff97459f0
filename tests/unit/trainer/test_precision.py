"""Metrics of a run, step after step: rounding in float32, flat without learning, an alarm on a slope."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.mismatch_alarm import WINDOW, MismatchAlarm
from opentinker.shared.types.core import WeightVersion
from tests.support.learning import Sampler, torch_spec

EVERY_STEP = {
    "mismatch/mean", "mismatch/max", "mismatch/tokens", "drift/mean", "ratio/mean", "ratio/max", "ratio/k3",
    "ratio/outside", "ess", "clip_share",
}  # fmt: skip


def run(small: Path, *, lr: float, steps: int, behind: bool = False, dtype: str = "float32") -> list[dict[str, float]]:
    """A small run on policy; `behind`: the sampler never gets new weights."""
    spec = torch_spec(
        small,
        model={"dtype": dtype},
        algorithm={"group_size": 4, "groups_per_batch": 2},
        train={"lr": lr, "warmup_steps": 0},
    )
    learner, other = RlLearner(spec), RlLearner(spec)
    learner.load(None)
    other.load(None)
    sampler = Sampler(other.causal if behind else learner.causal, learner.tokenizer, seed=0)
    found = []
    for step in range(steps):
        sampled = WeightVersion(1, 0 if behind else step)
        found.append(learner.step(sampler.copy_digit(2, 4, sampled), WeightVersion(1, step)))
    return found


def column(found: list[dict[str, float]], name: str) -> list[float]:
    return [metrics[name] for metrics in found]


def test_a_float32_run_agrees_to_a_ten_thousandth_at_every_step_and_says_all_of_it(small: Path) -> None:
    found = run(small, lr=1e-3, steps=12)
    for metrics in found:
        assert metrics.keys() >= EVERY_STEP
        if metrics["zero_variance"] < 1:
            assert (metrics["masked/positive"], metrics["masked/negative"]) == (0.0, 0.0)
        assert metrics["mismatch/mean"] <= metrics["mismatch/max"] <= 1e-4
        assert metrics["mismatch/tokens"] == metrics["tokens"]
        assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
        assert (metrics["ratio/outside"], metrics["clip_share"]) == (0.0, 0.0)
        assert abs(metrics["ratio/k3"]) < 1e-7
    assert column(found, "grad_norm") != [0.0] * 12


def test_a_run_with_a_learning_rate_of_zero_is_flat_and_rings_no_alarm(small: Path) -> None:
    """Longer than the alarm's window, in float32 and in bfloat16, whose level is high: only a slope may ring."""
    for dtype, level in (("float32", 1e-4), ("bfloat16", 0.5)):
        alarm = MismatchAlarm()
        found = run(small, lr=0.0, steps=WINDOW + 5, dtype=dtype)
        assert [alarm.update(metrics) for metrics in found] == [[]] * len(found)
        for name in ("mismatch/mean", "drift/mean"):
            values = np.array(column(found, name))
            assert values.max() <= level
            first, last = np.median(values[: WINDOW // 2]), np.median(values[WINDOW // 2 :])
            assert last <= 1.5 * first + 1e-7
        assert max(column(found, "ratio/k3")) <= level


def test_a_sampler_that_gets_no_new_weights_rings_the_alarm(small: Path) -> None:
    """Its tokens say so: drift, K3, ESS and the share outside follow, and the alarm hears the slope."""
    alarm = MismatchAlarm()
    found = run(small, lr=1e-4, steps=WINDOW + 1, behind=True)
    rang = [alarm.update(metrics) for metrics in found]
    assert ["drift/mean"] in rang
    drift, k3, ess = (column(found, name) for name in ("drift/mean", "ratio/k3", "ess"))
    assert drift[0] < 1e-6 and drift[-1] > 1e-3
    assert abs(k3[0]) < 1e-6 and k3[-1] > 1e-6
    assert ess[0] == pytest.approx(1.0, abs=1e-6) and ess[-1] < 0.9999
    assert all("mismatch/mean" not in metrics for metrics in found[1:]), "no token is from the trainer's own weights"
