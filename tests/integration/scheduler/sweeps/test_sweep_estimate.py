"""Estimates of sweeps: every combination by itself, within the budgets."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.cli.planning.validate import in_words
from opentinker.shared.api_types import JobEstimate
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.integration.scheduler.submission.test_estimate import estimated, ran, spec_of

LR = {"train.lr": {"low": 1e-6, "high": 1e-3, "log": True}}


@pytest.fixture(autouse=True)
async def earlier(store: Store) -> None:
    """A job that says that 100 steps take 100 s, and 300 s of workers."""
    await ran(store, spec_of(train__learner="torch"), 1, worker_s=60.0, running_s=20.0)


async def of_sweep(ctx: Context, parameters: Any, **table: Any) -> JobEstimate:
    swept = {**spec_of(train__learner="torch"), "sweep": {"parameters": parameters, **table}}
    found = await estimated(ctx, swept, price_worker_hour=3.6)
    assert found is not None
    return found


async def test_combinations_of_other_lengths_are_added_up(ctx: Context) -> None:
    found = await of_sweep(ctx, {"train.steps": [100, 200, 600]}, seeds=[1, 2])
    assert (found["jobs"], found["steps"]) == (6, 300)
    assert found["worker_s"] == pytest.approx(2 * (300 + 600 + 1800)) and found["cost"] == pytest.approx(5.4)
    assert (found["seconds"], found["seconds_low"], found["seconds_high"]) == pytest.approx((300, 100, 600))
    assert found["basis"].endswith("; the mean of its 3 combinations")


async def test_the_budget_of_hours_ends_a_sweep(ctx: Context) -> None:
    found = await of_sweep(ctx, LR, method="tpe", max_hours=0.25)
    assert found["jobs"] == 36 and found["seconds"] == pytest.approx(100), "four at a time, nine times within 900 s"
    assert found["worker_s"] == pytest.approx(36 * 300) and found["cost"] == pytest.approx(10.8)
    assert found["basis"].endswith("; max_hours = 0.25 ends it after about 36 jobs of up to 1,000, 4 at a time")
    assert in_words(found).startswith("estimate: 1:40 min of running each, 3 worker hours")


async def test_the_budget_of_workers_ends_a_sweep(ctx: Context) -> None:
    found = await of_sweep(ctx, LR, method="random", trials=40, max_worker_s=4500, max_hours=10)
    assert found["worker_s"] == pytest.approx(4500) and found["gpu_s"] == pytest.approx(2250)
    assert found["jobs"] == 16 and "max_worker_s = 4500 ends it after about 16 jobs of up to 40" in found["basis"]


async def test_jobs_that_are_cancelled_by_the_budget_run_no_longer_than_it(ctx: Context) -> None:
    found = await of_sweep(ctx, LR, method="tpe", max_hours=0.01, max_running=3)
    assert found["jobs"] == 3 and found["seconds"] == pytest.approx(36) and found["seconds_high"] == pytest.approx(36)
    assert found["worker_s"] == pytest.approx(3 * 300 * 0.36)


async def test_a_budget_that_suffices_changes_nothing(ctx: Context) -> None:
    found = await of_sweep(ctx, {"train.lr": [1e-4, 1e-3]}, max_hours=10, max_worker_s=1e6, max_jobs=30)
    assert found["jobs"] == 2 and found["worker_s"] == pytest.approx(600) and "ends it" not in found["basis"]


async def test_early_stopping_makes_the_estimate_an_upper_bound(ctx: Context) -> None:
    lr = {"train.lr": [1e-4, 1e-3]}
    whole, stopped = await of_sweep(ctx, lr), await of_sweep(ctx, lr, early_stopping={"min_steps": 5})
    assert "upper bound" not in whole["basis"] and stopped["worker_s"] == whole["worker_s"]
    bound = "an upper bound: early stopping, which is not counted, can only lower time and cost"
    assert stopped["basis"] == f"{whole['basis']}; {bound}" and in_words(stopped).endswith(bound)


async def test_of_many_combinations_some_are_estimated(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.services.scheduler.sweeps.sweep_estimate.ESTIMATED", 4)
    found = await of_sweep(ctx, {"train.steps": {"low": 100, "high": 190, "step": 10}})
    assert found["jobs"] == 10 and 100 <= found["steps"] <= 190
    assert found["worker_s"] == pytest.approx(10 * 3 * found["seconds"])
    assert found["basis"].endswith("; the mean of some 4 combinations")
    drawn = await of_sweep(ctx, {"train.steps": {"low": 100, "high": 190}}, method="tpe", trials=30)
    assert drawn["jobs"] == 30 and 100 <= drawn["steps"] <= 190
