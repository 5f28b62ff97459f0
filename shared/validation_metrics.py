"""What an evaluation says: means with their 95% intervals, by task where the environment names tasks. Pure numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import numpy as np

from opentinker.shared.types import Ending
from opentinker.shared.validation import ExamResult

Z95 = 1.959964
"""Quantile of the standard normal distribution at 0.975."""
TASK = "task/"
OWN = frozenset(
    {"episodes", "failed", "missing", "seconds", "tokens", "reward", "response_length", "turns"}
    | {"ending", "component", "task", "env"}
)
"""First parts of names of ours below val/, which an environment's metric must not take."""
TASKS_OWN = frozenset({"episodes", "reward", "env"})
"""The same below val/task/NAME/."""


def validation_metrics(results: Sequence[ExamResult], episodes: int) -> dict[str, float]:
    """Metrics of an evaluation of `episodes` start states, of which these have a result.

    val/reward/{mean,std}, and val/NAME for every metric that the environment reported (`val/env/NAME` where the name is
    taken, or begins with a part of ours), each with `low` and `high` of `interval`; val/reward/seat/NAME where there
    are several seats (with its bounds; an episode's reward is the mean of its seats'); val/component/NAME (mean part of
    the reward), val/response_length/{mean,max}, val/turns/mean, val/ending/REASON (share, failed ones included),
    val/task/NAME/{episodes,reward,METRIC} by task, val/{episodes,failed,missing,tokens}.
    Failed episodes are in none of the means.
    """
    played = [r for r in results if not r.ending.failed]
    values = {
        "val/episodes": float(len(played)),
        "val/failed": float(len(results) - len(played)),
        "val/missing": float(episodes - len(results)),
        "val/tokens": float(sum(r.tokens for r in played)),
    }
    endings = Counter(r.ending for r in results)
    values |= {
        f"val/ending/{end}": endings[end] / len(results)
        for end in Ending
        if results and (endings[end] or not end.failed)
    }
    if not played:
        return values
    rewards = [r.reward for r in played]
    values |= {"val/reward/mean": float(np.mean(rewards)), "val/reward/std": float(np.std(rewards))}
    values |= _bounds("val/reward", rewards)
    by_seat = _by_name([r.seats for r in played])
    for seat, found in by_seat.items() if len(by_seat) > 1 else ():
        values[f"val/reward/seat/{seat}"] = float(np.mean(found))
        values |= _bounds(f"val/reward/seat/{seat}", found)
    lengths = [r.tokens for r in played]
    values |= {"val/response_length/mean": float(np.mean(lengths)), "val/response_length/max": float(max(lengths))}
    values["val/turns/mean"] = float(np.mean([len(r.stops) for r in played]))
    for name, found in _by_name([r.metrics for r in played]).items():
        place = _place("val", name, values, OWN)
        values[place] = float(np.mean(found))
        values |= _bounds(place, found)
    for name, found in _by_name([r.components for r in played]).items():
        values[f"val/component/{name}"] = float(np.mean(found))
    by_task = {
        task: [r for r in played if task in _tasks(r)] for task in sorted({t for r in played for t in _tasks(r)})
    }
    for task, own in by_task.items():
        values[f"val/{task}/episodes"] = float(len(own))
        values[f"val/{task}/reward"] = float(np.mean([r.reward for r in own]))
        values |= _bounds(f"val/{task}/reward", [r.reward for r in own])
    for task, own in by_task.items():
        for name, found in _by_name([r.metrics for r in own]).items():
            place = _place(f"val/{task}", name, values, TASKS_OWN)
            values[place] = float(np.mean(found))
            values |= _bounds(place, found)
    return values


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean over start states; None if one value says nothing of the spread.

    0 or 1 only: Wilson's score interval of a rate p of n (Wilson, JASA 22, 1927; Brown, Cai and DasGupta, Statistical
    Science 16, 2001, eq. 4), which stays within [0, 1] and is sensible at 0 and 1:
        (p + z^2/2n +- z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n)
    Else the normal approximation: mean +- z s / sqrt(n), s with n - 1.
    """
    n, mean = len(values), float(np.mean(values))
    if set(values) <= {0.0, 1.0}:
        centre = mean + Z95**2 / (2 * n)
        half = Z95 * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n**2))
        return (centre - half) / (1 + Z95**2 / n), (centre + half) / (1 + Z95**2 / n)
    if n == 1:
        return None
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def _place(below: str, name: str, taken: Container[str], own: Container[str]) -> str:
    """Where an environment's metric stands, so that nothing of ours is overwritten."""
    place = f"{below}/{name}"
    return f"{below}/env/{name}" if place in taken or name.partition("/")[0] in own else place


def _bounds(name: str, values: Sequence[float]) -> dict[str, float]:
    found = interval(values)
    return {} if found is None else {f"{name}/low": found[0], f"{name}/high": found[1]}


def _by_name(reported: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Values by name, of those that have it; names of tasks are no values."""
    names = sorted({name for one in reported for name in one if not name.startswith(TASK)})
    return {name: [one[name] for one in reported if name in one] for name in names}


def _tasks(result: ExamResult) -> list[str]:
    return [name for name, value in result.metrics.items() if name.startswith(TASK) and value > 0]
