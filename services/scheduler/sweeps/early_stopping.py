"""The rules by which a trial is stopped early. Pure: nothing is asked or changed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from opentinker.shared.spec.sweeps.table import EarlyStoppingSpec, SweepTable
from opentinker.shared.types.sweeps import Trial

DENSE = 64
"""median: multiples of min_steps that are all rungs; of the next DENSE every second is one, of the next 2 * DENSE every
fourth, and so on: a record has all rungs of its jobs."""


def judge(trial: Trial, trials: Sequence[Trial], table: SweepTable) -> str:
    """Return why the trial is stopped; empty if it continues. Sets `trial.judged`: every step is judged once."""
    rule = table.early_stopping
    if rule is None:
        return ""
    step = last_rung(rule, trial.step)
    if step <= trial.judged:
        return ""
    trial.judged = step
    own = _at_rung(trial, step)
    others = [value for one in trials if one.number != trial.number and (value := _at_rung(one, step)) is not None]
    if own is None:
        return ""
    sign = 1.0 if table.goal == "maximize" else -1.0
    why = _under_median if rule.rule == "median" else _eliminated
    told = why(rule, sign * own, [sign * value for value in others])
    return told and f"{table.metric} {own:.6g} at step {step} {told}"


def _under_median(rule: EarlyStoppingSpec, own: float, others: Sequence[float]) -> str:
    """Larger values are better. Return why a trial is stopped, or nothing."""
    if len(others) < rule.min_trials or own >= statistics.median(others):
        return ""
    return f"is worse than the median of {len(others)} other trials"


def _eliminated(rule: EarlyStoppingSpec, own: float, others: Sequence[float]) -> str:
    """Larger values are better. Return why a trial is stopped, or nothing."""
    trials = len(others) + 1
    kept = trials // rule.factor
    if kept == 0 or sum(value > own for value in others) < kept:
        return ""
    return f"is not among the best {kept} of {trials} trials"


def _at_rung(trial: Trial, step: int) -> float | None:
    """Return the trial's moving mean at a rung, over its jobs; None if one of them has none there yet."""
    found = [job.rungs[step] for job in trial.jobs if step in job.rungs]
    return sum(found) / len(found) if len(found) == len(trial.jobs) else None


def last_rung(rule: EarlyStoppingSpec, step: int) -> int:
    """Return the last step, up to `step`, at which trials are judged; 0 before the first."""
    return max(rungs(rule, step), default=0)


def rungs(rule: EarlyStoppingSpec, step: int) -> Iterator[int]:
    """Yield the steps, up to `step`, at which trials are judged."""
    place = 1
    while (rung := place * rule.min_steps) <= step:
        yield rung
        place = place * rule.factor if rule.rule == "halving" else place + (1 << (place // DENSE).bit_length())
