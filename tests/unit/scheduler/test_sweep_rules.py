"""Sweeps: the value of a trial, early stopping, and the choice of the next trial."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from opentinker.services.scheduler.sweeps.adaptive import OTHER_TRIALS, _telling, importance, suggest
from opentinker.services.scheduler.sweeps.curves import MAX_POINTS, History, best_of, mean_value
from opentinker.services.scheduler.sweeps.early_stopping import judge, last_rung, rungs
from opentinker.services.scheduler.sweeps.metric_names import absent_metric
from opentinker.shared.spec.sweeps.table import EarlyStoppingSpec, SweepTable
from opentinker.shared.types.sweeps import Trial, TrialJob, TrialState
from opentinker.shared.types.telemetry import MetricPoint

LR = {"train.lr": {"low": 1e-6, "high": 1e-2, "log": True}}


def table(parameters: Any = None, kind: str = "rl", **fields: Any) -> SweepTable:
    made = {"method": "tpe", "trials": 10, "parameters": parameters or LR, **fields}
    return SweepTable.model_validate(made).with_defaults(kind)


def point(
    step: int, value: float, incarnation: str = "a", source: str = "trainer", metric: str = "reward/mean"
) -> MetricPoint:
    values, time = {metric: value, "other": 0.0}, float(step)
    return MetricPoint(job="j", source=source, incarnation=incarnation, seq=step, time=time, step=step, values=values)


def history(values: list[float], **fields: Any) -> History:
    found = History(table(**fields))
    for step, value in enumerate(values, 1):
        found.add(point(step, value))
    return found


def trial(number: int, *curves: list[float], **fields: Any) -> Trial:
    jobs = [TrialJob(id=f"j{n}", step=len(c), rungs=dict(enumerate(c, 1))) for n, c in enumerate(curves)]
    return Trial(number=number, settings={"train.lr": 1e-4}, jobs=jobs, **fields)


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, 3.0),
        ({"window": 1}, 4.0),
        ({"window": 2}, 2.5),
        ({"window": 2, "summary": "best"}, 5.0),
        ({"window": 2, "summary": "best", "goal": "minimize"}, 1.0),
        ({"summary": "mean"}, 3.0),
    ],
)
def test_a_history_s_value_is_its_end_its_best_or_its_mean(fields: dict[str, Any], value: float) -> None:
    assert history([5.0, 5.0, 2.0, 1.0, 1.0, 4.0], **fields).value() == pytest.approx(value)


def test_a_long_history_is_thinned_out() -> None:
    found = history([float(step) for step in range(MAX_POINTS + 5)], window=1)
    assert found.value() == MAX_POINTS + 4
    assert len(found.means()) == MAX_POINTS // 2 + 5 and found.means()[-1] == (MAX_POINTS + 5, MAX_POINTS + 4)


def test_the_newest_point_of_a_long_history_is_kept() -> None:
    found = history([0.0] * MAX_POINTS + [1.0], window=1)
    assert (found.value(), found.step) == (1.0, MAX_POINTS + 1)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 50])
def test_a_moving_mean_is_that_of_its_window(window: int) -> None:
    values = [float(step * step % 31) for step in range(40)]
    ends = range(1, len(values) + 1)
    means = [sum(values[max(0, end - window) : end]) / min(end, window) for end in ends]
    found = history(values, window=window).means()
    assert [step for step, _ in found] == [*ends] and [mean for _, mean in found] == pytest.approx(means)


@pytest.mark.parametrize("summary", ["last", "best", "mean"])
def test_values_as_large_as_floats_overflow_nothing(summary: str) -> None:
    found = history(
        [1.7e308, 1.7e308, float("inf"), float("nan"), *[1e300] * MAX_POINTS], window=10_000, summary=summary
    )
    assert found.value() == pytest.approx(1e300)
    assert all(math.isfinite(value) for _, value in found.means())
    seeds = [TrialJob(id=f"j{n}", value=found.value(), step=1) for n in range(20)]
    assert mean_value(Trial(number=0, settings={}, jobs=seeds)) == pytest.approx(1e300)


def test_a_huge_value_takes_no_digits_of_later_ones() -> None:
    assert history([1e300, 1e20, 0.5, 0.25], window=2).value() == 0.375


def test_a_step_that_is_trained_again_counts_once() -> None:
    found = history([1.0, 2.0, 9.0], window=3)
    found.add(point(3, 3.0))
    assert (found.value(), found.step, found.names) == (2.0, 3, {"reward/mean", "other"})


def test_a_trial_below_the_median_is_stopped_once_enough_others_are_there() -> None:
    swept = table(early_stopping={"min_steps": 3, "min_trials": 2})
    bad, good = trial(0, [0.1] * 4), [trial(n, [0.5 + n / 10] * 4) for n in (1, 2)]
    assert not judge(bad, [bad, good[0]], swept), "there is only one other trial"
    bad.judged = 0
    assert "reward/mean 0.1 at step 3 is worse than the median of 2 other trials" in judge(bad, [bad, *good], swept)
    assert not judge(bad, [bad, *good], swept), "a step is judged once"
    assert not judge(good[1], [bad, *good], swept)
    assert not judge(trial(3, [0.1] * 2), [bad, *good], swept), "it has not made min_steps"
    assert judge(
        trial(3, [0.9] * 4), [bad, *good], table(goal="minimize", early_stopping={"min_steps": 3, "min_trials": 2})
    )


def test_a_trial_is_judged_where_all_its_jobs_are() -> None:
    swept = table(early_stopping={"min_steps": 3, "min_trials": 1})
    other = trial(1, [0.5] * 4)
    assert not judge(trial(0, [0.1] * 4, [0.1] * 2), [other], swept)
    assert not judge(trial(0, [0.1] * 4, [0.95] * 4), [other], swept), "their mean counts"
    assert judge(trial(0, [0.1] * 4, [0.8] * 4), [other], swept)


def test_halving_keeps_the_best_share_at_each_rung() -> None:
    swept = table(early_stopping={"rule": "halving", "min_steps": 2, "factor": 3})
    trials = [trial(n, [n / 10] * 2) for n in range(6)]
    assert not judge(trials[0], trials[:2], swept), "fewer than three are there"
    for one in trials:
        one.judged = 0
    assert [bool(judge(one, trials, swept)) for one in trials] == [True] * 4 + [False] * 2


HALVING = {"rule": "halving", "min_steps": 20, "factor": 3}


def rising(number: int, steps: int, slope: float, rule: dict[str, Any]) -> Trial:
    """Return a trial whose metric rises with each step."""
    found = history([slope * step for step in range(1, steps + 1)], window=1, early_stopping=rule)
    return Trial(number=number, settings={}, jobs=[TrialJob(id="j", step=found.step, rungs=found.rungs())])


@pytest.mark.parametrize("rule", [HALVING, {"min_steps": 20, "min_trials": 2}], ids=["halving", "median"])
@pytest.mark.parametrize("steps", [5_000, 2 * MAX_POINTS])
def test_a_trial_is_judged_by_the_same_steps_of_long_ones(rule: dict[str, Any], steps: int) -> None:
    swept = table(early_stopping=rule)
    ended = [rising(number, steps, 1.0, rule) for number in (1, 2)]
    for step in (20, 60):
        assert judge(rising(0, step, 0.9, rule), ended, swept).startswith(f"reward/mean {0.9 * step:g} at step {step} ")
        assert not judge(rising(0, step, 1.1, rule), ended, swept)


def test_a_rung_has_the_mean_of_the_last_point_before_it_as_it_was_trained_last() -> None:
    found = History(table(window=1, early_stopping=HALVING))
    for step in range(50, MAX_POINTS + 60):
        found.add(point(step, float(step)))
    before = found.rungs()
    assert before == {60: 60.0, 180: 180.0, 540: 540.0, 1620: 1620.0, 4860: 4860.0}
    found.add(point(170, -1.0))
    assert found.rungs()[60] == 60.0 and found.rungs()[180] in (179.0, 180.0), "half of the points are left"
    found.add(point(180, -2.0))
    assert (found.rungs()[60], found.rungs()[180]) == (60.0, -2.0)
    assert history([1.0] * 30).rungs() == {}, "no rule, no rungs"


@pytest.mark.parametrize("summary", ["last", "mean", "best"])
def test_the_steps_that_a_job_went_back_from_do_not_count(summary: str) -> None:
    found = History(table(window=1, summary=summary, early_stopping={"rule": "median", "min_steps": 10}))
    collapsed = [point(step, 9.0) for step in range(1, 61)]
    again = [point(step, 0.5, "b") for step in range(1, 51)]
    for one in collapsed + again[40:45] + collapsed[-3:] + again[45:]:  # a page may give points twice
        found.add(one)
    value = {"last": 0.5, "mean": (40 * 9.0 + 10 * 0.5) / 50, "best": 9.0}[summary]
    assert found.step == 50 and found.value() == pytest.approx(value)
    assert found.rungs() == {10: 9.0, 20: 9.0, 30: 9.0, 40: 9.0, 50: 0.5}
    found.add(point(51, 0.5, "b"))
    assert found.step == 51


def test_only_the_trainer_of_the_metric_s_policy_discards_steps() -> None:
    solver, reward = "trainer~solver", "solver/reward/mean"
    plain, of_policy = History(table(window=1)), History(table(window=1, metric=reward))
    for step in range(1, 11):
        plain.add(point(step, 1.0))
        of_policy.add(point(step, 1.0, "a", solver, reward))
    for source in ("validation", "rollout-worker-0"):
        plain.add(point(4, 1.0, "b", source))
    of_policy.add(point(4, 1.0, "b", "trainer~proposer", "proposer/reward/mean"))
    assert (plain.step, of_policy.step) == (10, 10)
    of_policy.add(point(6, 2.0, "b", solver, reward))
    assert (of_policy.step, of_policy.value()) == (6, 2.0)


def test_a_trainer_that_begins_again_discards_evaluations_too() -> None:
    found = History(table(window=1, metric="val/reward/mean"))
    for step in (10, 20, 30):
        found.add(point(step, 0.0))
        found.add(point(step, step / 10, "e", "validation", "val/reward/mean"))
    found.add(point(21, 0.0, "b"))
    assert (found.step, found.value()) == (20, 2.0)


def test_the_longest_job_has_a_bounded_number_of_rungs() -> None:
    found = [*rungs(EarlyStoppingSpec(min_steps=1), 10**8)]
    assert found[:66] == [*range(1, 65), 66, 68] and len(found) < 800 and found == sorted({*found})
    assert all(after - at <= at / 32 for at, after in itertools.pairwise(found[64:]))


@pytest.mark.parametrize(
    ("rule", "step", "rung"),
    [("median", 2, 0), ("median", 3, 3), ("median", 8, 6), ("halving", 2, 0), ("halving", 8, 6), ("halving", 13, 12)],
)
def test_where_trials_are_judged(rule: Any, step: int, rung: int) -> None:
    assert last_rung(EarlyStoppingSpec(rule=rule, min_steps=3, factor=2), step) == rung


def test_the_best_is_the_earliest_finished_trial_of_the_best_value() -> None:
    done = {"state": TrialState.FINISHED}
    trials = [
        trial(0, [0], value=0.9, state=TrialState.STOPPED),
        trial(1, [0], value=0.5, **done),
        trial(2, [0], value=0.5, **done),
        trial(3, [0], value=0.1, **done),
    ]
    assert [(best_of(trials, table(goal=goal)) or trials[0]).number for goal in ("maximize", "minimize")] == [1, 3]
    assert best_of(trials[:1], table()) is None


def finished(number: int, value: float | None, state: TrialState = TrialState.FINISHED, **settings: Any) -> Trial:
    return Trial(number=number, settings=settings, jobs=[TrialJob(id="j", step=9)], value=value, state=state)


SPACE: dict[str, Any] = {
    "lr": {"low": 1e-6, "high": 1e-2, "log": True},
    "size": {"low": 2, "high": 9, "integer": True},
    "share": {"low": 0, "high": 0.3, "step": 0.1},
    "kind": [1, 1.0, True, "one", {"table": [1]}],
}
"""Every kind of parameter."""


def test_suggestions_are_of_the_space_repeatable_and_follow_results() -> None:
    swept = table(SPACE)
    trials: list[Trial] = []
    for number in range(30):
        settings = suggest(swept, trials)
        assert settings == suggest(swept, trials)
        assert 1e-6 <= settings["lr"] <= 1e-2 and settings["size"] in range(2, 10)
        assert settings["share"] in (0, 0.1, 0.2, 0.3)
        assert any(type(settings["kind"]) is type(one) and settings["kind"] == one for one in SPACE["kind"])
        state = (TrialState.FINISHED, TrialState.FINISHED, TrialState.RUNNING, TrialState.FAILED)[number % 4]
        value = None if state in (TrialState.RUNNING, TrialState.FAILED) else float(settings["size"])
        trials.append(finished(number, value, state, **settings))
    late = [one.settings["size"] for one in trials[15:]]
    assert sum(late) / len(late) > 6.5, "large sizes did well"
    shares = importance(swept, trials)
    assert max(shares, key=lambda path: shares[path]) == "size" and sum(shares.values()) == pytest.approx(1.0)


def test_a_long_search_looks_at_its_best_and_newest_trials() -> None:
    swept = table({"size": {"low": 0, "high": 1000}}, trials=1000)
    trials = [finished(n, -abs(n - 300.0), size=n) for n in range(900)]
    kept = [trial.number for trial in _telling(swept, trials)]
    assert kept == [*range(288, 313), *range(900 - OTHER_TRIALS, 900)]
    assert abs(suggest(swept, trials)["size"] - 300) < 50


def test_importance_needs_trials_that_differ() -> None:
    swept = table({"size": {"low": 2, "high": 9, "integer": True}, "only": [1, 2]})
    alone = table({"size": {"low": 2, "high": 9, "integer": True}, "only": [1]})
    assert importance(alone, [finished(n, float(n), size=2 + n, only=1) for n in range(6)]) == {}, "it is the only one"
    assert importance(swept, [finished(n, 1.0, size=2 + n, only=1) for n in range(3)]) == {}
    assert importance(swept, [finished(n, 1.0, size=2 + n, only=1) for n in range(6)]) == {}
    assert importance(swept, [finished(n, float(n), size=2 + n, only=1) for n in range(6)])["size"] > 0.9


def test_awkward_ranges_are_searched_too() -> None:
    ends = {"far": (-1e15, 1e15), "odd": (-0.1, 123456.789), "tiny": (1e-12, 1 / 3), "whole": (0, 10**15)}
    space: dict[str, Any] = {name: {"low": low, "high": high} for name, (low, high) in ends.items()}
    swept = table({**space, "steps": {"low": 0.3272990957, "high": 611, "step": 0.7}, "one": [None]})
    trials: list[Trial] = []
    for number in range(12):
        trials.append(finished(number, float(number), **suggest(swept, trials)))
    assert sum(importance(swept, trials).values()) == pytest.approx(1.0)


def test_an_absent_metric_is_told_with_the_one_that_was_meant_and_results_first() -> None:
    names = {"alarm/entropy", "entropy", "exact", "val/reward/mean", "reward/mean", *(f"queue/{n}" for n in range(70))}
    told = absent_metric("exakt", names)
    assert told.startswith("its job reported no metric exakt; did you mean exact? (some of the 75 that it reported: ")
    assert "reported: exact, reward/mean, val/reward/mean, alarm/entropy, " in told
    told = absent_metric("val/rating/speaker", {"speaker/val/rating", "speaker/val/reward/mean"})
    assert told.startswith("its job reported no metric val/rating/speaker; did you mean speaker/val/rating?")
    assert absent_metric("solved", {"reward/mean"}) == "its job reported no metric solved (it reported: reward/mean)"
    assert absent_metric("solved", set()) == "its job reported no metric solved, nor any other"
