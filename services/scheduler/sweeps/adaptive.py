"""Adaptive search and the importance of settings, by Optuna. Its study is rebuilt from the trials each time, so
nothing but the trials has to be stored. Blocking: callers use a thread."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, create_trial

from opentinker.shared.spec.sweeps.table import SweepParameter, SweepTable
from opentinker.shared.types.sweeps import Trial, TrialState

STARTUP_TRIALS = 8
"""Trials that are drawn at random before values are chosen by their results."""
GOOD_TRIALS = 25
"""Best trials of which the sampler makes its model of good values: no more, however many there are."""
OTHER_TRIALS = 200
"""Further trials, the newest, that it looks at: its time grows with their number."""
IMPORTANCE_TRIALS = 4
"""Finished trials without which importance would say nothing."""
STATES = {
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
    TrialState.FINISHED: optuna.trial.TrialState.COMPLETE,
    TrialState.STOPPED: optuna.trial.TrialState.PRUNED,
}
optuna.logging.set_verbosity(optuna.logging.ERROR)


def suggest(table: SweepTable, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the settings of the next trial. Those that run count as bad ones, so that their neighbours are not tried
    at the same time."""
    sampler = optuna.samplers.TPESampler(
        seed=(table.seed * 1_000_003 + len(trials)) % 2**32,
        n_startup_trials=STARTUP_TRIALS,
        multivariate=True,
        constant_liar=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranges whose ends are far from each other
        chosen = _study(table, _telling(table, trials), sampler).ask(_space(table)).params
    return {path: _value(table.parameters[path], chosen[path]) for path in table.parameters}


def importance(table: SweepTable, trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much of the difference between good and ordinary trials each setting explains (PED-ANOVA); they add up
    to 1. Empty with few finished trials, with equal ones, and where a single setting varies: it would explain all."""
    finished = [trial for trial in trials if trial.state == TrialState.FINISHED and trial.value is not None]
    if len(finished) < IMPORTANCE_TRIALS or len({trial.value for trial in finished}) < 2:
        return {}
    if sum(len(one.ends) > 1 for one in table.parameters.values()) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters with one value
        study = _study(table, finished, optuna.samplers.RandomSampler(seed=0))
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return {path: float(share) for path, share in found.items() if math.isfinite(share)}


def _telling(table: SweepTable, trials: Sequence[Trial]) -> list[Trial]:
    """Return the best and the newest of the trials, in order."""
    if len(trials) <= GOOD_TRIALS + OTHER_TRIALS:
        return list(trials)
    sign = 1.0 if table.goal == "minimize" else -1.0
    ranked = sorted(
        (sign * trial.value, trial.number)
        for trial in trials
        if trial.value is not None and trial.state is TrialState.FINISHED
    )
    kept = {number for _, number in ranked[:GOOD_TRIALS]}
    others = [trial.number for trial in trials if trial.number not in kept]
    kept |= set(others[-OTHER_TRIALS:])
    return [trial for trial in trials if trial.number in kept]


def _study(table: SweepTable, trials: Sequence[Trial], sampler: Any) -> optuna.Study:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate and constant_liar are called experimental
        study = optuna.create_study(sampler=sampler, direction=table.goal)
    space = _space(table)
    study.add_trials([frozen for trial in trials if (frozen := _frozen(table, trial, space)) is not None])
    return study


def _frozen(table: SweepTable, trial: Trial, space: dict[str, BaseDistribution]) -> FrozenTrial | None:
    """Return the trial as Optuna knows it; None for one that says nothing."""
    state = STATES.get(trial.state)
    if state is None or (trial.value is None and state.is_finished()):
        return None
    parameters = {path: _place(table.parameters[path], value) for path, value in trial.settings.items()}
    return create_trial(
        state=state,
        params=parameters,
        distributions=space,
        value=trial.value if trial.state == TrialState.FINISHED else None,
        intermediate_values={} if trial.value is None else {trial.step: trial.value},
    )


def _space(table: SweepTable) -> dict[str, BaseDistribution]:
    return {path: _distribution(one) for path, one in table.parameters.items()}


def _distribution(one: SweepParameter) -> BaseDistribution:
    """Return the range of a parameter; of a list, whose values may be tables, and of steps, that of their places."""
    if one.values is not None:
        return CategoricalDistribution(range(len(one.values)))
    if one.step is not None:
        return IntDistribution(0, one.steps)
    assert one.low is not None and one.high is not None
    if one.whole:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(float(one.low), float(one.high), log=one.log)


def _value(one: SweepParameter, chosen: Any) -> Any:
    if one.values is not None:
        return one.values[chosen]
    return one.number(chosen) if one.step is None else one.at(chosen)


def _place(one: SweepParameter, value: Any) -> Any:
    if one.step is not None and one.low is not None:
        return min(max(round((value - one.low) / one.step), 0), one.steps)
    if one.values is None:
        return value
    return next(place for place, known in enumerate(one.values) if type(known) is type(value) and known == value)
