"""Metrics of an evaluation: means with 95% intervals, by task where the environment names tasks. Pure numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import numpy as np

from opentinker.shared.types.core import Ending
from opentinker.shared.types.evaluation import EvalResult
from opentinker.shared.types.match_results import alike

Z95 = 1.959964
"""Quantile of the standard normal distribution at 0.975."""
TASK = "task/"
OWN = frozenset(
    {"episodes", "failed", "missing", "seconds", "tokens", "reward", "response_length", "turns"}
    | {"ending", "component", "task", "env", "pass", "signal", "winrate", "wins", "draws", "losses", "rating"}
)
"""First parts of names of ours below val/, which an environment's metric must not take."""
OUTCOMES = {"wins": 1.0, "draws": 0.5, "losses": 0.0}
"""By name of the metric that counts them, see `EvalResult.outcome`."""
TASKS_OWN = frozenset({"episodes", "reward", "pass", "env"})
"""The same below val/task/NAME/."""
MAX_TASKS = 50
"""Tasks of one evaluation that are reported: those with most episodes."""


def validation_metrics(
    results: Sequence[EvalResult],
    episodes: int,
    *,
    samples: int = 1,
    solved_at: float = 1.0,
    opponents: Sequence[str] = (),
) -> dict[str, float]:
    """Metrics of an evaluation of `episodes` episodes, `samples` from each start state, of which these have a result;
    with `opponents`, the number of episodes against each.

    val/reward/{mean,std}, and val/NAME for every metric that the environment reported (`val/env/NAME` where the name is
    taken, or begins with a part of ours), each with `low` and `high` of `interval`, or of `rate_interval` where all
    episodes have 0 or 1, for val/pass/K and for val/winrate; val/reward/seat/NAME where there
    are several seats (with its bounds; an episode's reward is the mean of the policy's seats); val/component/NAME (mean
    part of the reward), val/pass/K as `pass_at` says, val/signal (share of the start states with several episodes in
    which these earned different rewards), val/response_length/{mean,max}, val/turns/mean, val/ending/REASON
    (share, failed ones included), val/task/NAME/{episodes,reward,pass/K,METRIC} of the MAX_TASKS tasks with most
    episodes, val/{episodes,failed,missing,tokens}.
    Where other seats play: val/winrate, a draw being half a win, and its counts val/{wins,draws,losses}; with
    `opponents` val/winrate/OPPONENT and so on, and val/reward/against/OPPONENT.
    Failed episodes are in none of the means. A mean with bounds is one over start states, of the mean of each.
    """
    played = [r for r in results if not r.ending.failed]
    values = {
        "val/episodes": float(len(played)),
        "val/failed": float(len(results) - len(played)),
        "val/missing": float(episodes * max(1, len(opponents)) - len(results)),
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
    states = [r.index % episodes // samples for r in played]
    rewards = [r.reward for r in played]
    values |= _mean("val/reward", states, rewards, "/mean") | {"val/reward/std": float(np.std(rewards))}
    apart = [r.index // samples for r in played]  # by opponent too
    solved = [r.reward >= solved_at for r in played]
    values |= pass_at(solved, apart, samples) | _signal(apart, rewards)
    by_seat = _by_name(states, [r.seats for r in played])
    for seat, found in by_seat.items() if len(by_seat) > 1 else ():
        values |= _mean(f"val/reward/seat/{seat}", *found)
    values |= _results_of_games(played, episodes, samples, opponents)
    lengths = [r.tokens for r in played]
    values |= {"val/response_length/mean": float(np.mean(lengths)), "val/response_length/max": float(max(lengths))}
    values["val/turns/mean"] = float(np.mean([len(r.stops) for r in played]))
    for name, found in _by_name(states, [r.metrics for r in played]).items():
        values |= _mean(_place("val", name, values, OWN), *found)
    for name, (_, parts) in _by_name(states, [r.components for r in played]).items():
        values[f"val/component/{name}"] = float(np.mean(parts))
    return values | _by_task(states, apart, solved, played, samples, values)


def _results_of_games(
    played: Sequence[EvalResult], episodes: int, samples: int, opponents: Sequence[str]
) -> dict[str, float]:
    values: dict[str, float] = {}
    for number, opponent in enumerate(opponents or ("",)):
        own = [r for r in played if not opponents or r.index // episodes == number]
        states, at = [r.index // samples for r in own], f"/{opponent}" if opponent else ""
        decided = [(state, r.outcome) for state, r in zip(states, own, strict=True) if r.outcome is not None]
        if decided:
            over, outcomes = zip(*decided, strict=True)
            values |= _mean(f"val/winrate{at}", over, outcomes, rate_of=len(outcomes))
            counted = Counter(outcomes)
            values |= {f"val/{name}{at}": float(counted[outcome]) for name, outcome in OUTCOMES.items()}
        if opponent and own:
            values |= _mean(f"val/reward/against/{opponent}", states, [r.reward for r in own])
    return values


def _by_task(
    states: list[int],
    apart: list[int],
    solved: list[bool],
    played: list[EvalResult],
    samples: int,
    ours: Mapping[str, float],
) -> dict[str, float]:
    values: dict[str, float] = {}
    episodes: dict[str, list[int]] = {}
    for i, one in enumerate(played):
        for task in _tasks(one):
            episodes.setdefault(task, []).append(i)
    most = sorted(episodes, key=lambda task: (-len(episodes[task]), task))[:MAX_TASKS]
    by_task = {task: episodes[task] for task in sorted(most)}
    for task, own in by_task.items():
        values[f"val/{task}/episodes"] = float(len(own))
        values |= _mean(f"val/{task}/reward", [states[i] for i in own], [played[i].reward for i in own])
        values |= pass_at([solved[i] for i in own], [apart[i] for i in own], samples, f"val/{task}")
    for task, own in by_task.items():
        for name, found in _by_name([states[i] for i in own], [played[i].metrics for i in own]).items():
            values |= _mean(_place(f"val/{task}", name, {**ours, **values}, TASKS_OWN), *found)
    return values


def pass_at(solved: Sequence[bool], states: Sequence[int], samples: int, below: str = "val") -> dict[str, float]:
    """BELOW/pass/K for K = 1, 2, 4... and `samples`: the chance that one of K episodes from a start state solves it.

    1 - C(n - c, K) / C(n, K) where c of n episodes did (Chen et al., arXiv 2107.03374, eq. 1), averaged over the start
    states that have K episodes or more; `low` and `high` are the bounds of that mean, as `rate_interval` says.
    """
    played, passed = Counter(states), Counter(state for state, won in zip(states, solved, strict=True) if won)
    wanted = sorted({samples, *(2**power for power in range(samples.bit_length()) if 2**power < samples)})
    values: dict[str, float] = {}
    for k in wanted:
        chances = {s: 1.0 - math.comb(n - passed[s], k) / math.comb(n, k) for s, n in played.items() if n >= k}
        if chances:
            tries = sum(played[state] for state in chances) // k
            values |= _mean(f"{below}/pass/{k}", list(chances), list(chances.values()), rate_of=tries)
    return values


def _signal(states: Sequence[int], rewards: Sequence[float]) -> dict[str, float]:
    by_state: dict[int, list[float]] = {}
    for state, reward in zip(states, rewards, strict=True):
        by_state.setdefault(state, []).append(reward)
    groups = [group for group in by_state.values() if len(group) > 1]
    return {"val/signal": float(np.mean([not alike(group) for group in groups]))} if groups else {}


def interval(means: Sequence[float]) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean over start states, by the normal approximation: mean +- z s / sqrt(n),
    s with n - 1; None if one start state says nothing of the spread. `means`: of each start state."""
    n, mean = len(means), float(np.mean(means))
    if n == 1:
        return None
    half = Z95 * float(np.std(means, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def rate_interval(rates: Sequence[float], episodes: int) -> tuple[float, float]:
    """The 95% confidence interval of a rate p, the mean of the `rates` of start states with so many episodes together:
    Wilson's score interval (Wilson, JASA 22, 1927; Brown, Cai and DasGupta, Statistical Science 16, 2001, eq. 4), which
    stays within [0, 1] and is sensible at 0 and 1:
        (p + z^2/2n +- z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n)

    n is the effective sample size, p(1 - p) over the variance of the mean over start states, as episodes of one start
    state resemble each other. It is at least the number of start states, as if all episodes of one were alike, and at
    most that of the episodes.
    """
    states, p = len(rates), min(1.0, max(0.0, float(np.mean(rates))))
    variance = float(np.var(rates, ddof=1)) / states if states > 1 else math.inf
    most = max(states, episodes)
    n = min(most, max(states, p * (1 - p) / variance)) if variance else most if 0 < p < 1 else states
    centre = p + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    low, high = (centre - half) / (1 + Z95**2 / n), (centre + half) / (1 + Z95**2 / n)
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # of 0 and 1 but for rounding


def _place(below: str, name: str, taken: Container[str], own: Container[str]) -> str:
    """Return the name under which an environment's metric stands, so that it overwrites none of the built-in
    metrics."""
    place = f"{below}/{name}"
    return f"{below}/env/{name}" if place in taken or name.partition("/")[0] in own else place


def _mean(
    place: str, states: Sequence[int], values: Sequence[float], end: str = "", *, rate_of: int | None = None
) -> dict[str, float]:
    """Return the mean over start states, with its interval; with one episode each that is the mean over episodes.
    `end`: suffix of the metric's name. `rate_of`: of a rate, its number of episodes; values of 0 and 1 are one of
    themselves."""
    by_state: dict[int, list[float]] = {}
    for state, value in zip(states, values, strict=True):
        by_state.setdefault(state, []).append(value)
    means = [float(np.mean(found)) for found in by_state.values()]
    if rate_of is None and set(values) <= {0.0, 1.0}:
        rate_of = len(values)
    found = interval(means) if rate_of is None else rate_interval(means, rate_of)
    bounds = {} if found is None else {f"{place}/low": found[0], f"{place}/high": found[1]}
    return {f"{place}{end}": float(np.mean(means))} | bounds


def _by_name(
    states: Sequence[int], reported: Sequence[Mapping[str, float]]
) -> dict[str, tuple[list[int], list[float]]]:
    """Start states and values by name, of those that have it; names of tasks are no values."""
    names = sorted({name for one in reported for name in one if not name.startswith(TASK)})
    by_name: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in names}
    for state, one in zip(states, reported, strict=True):
        for name in one.keys() & by_name.keys():
            by_name[name][0].append(state)
            by_name[name][1].append(one[name])
    return by_name


def _tasks(result: EvalResult) -> list[str]:
    return [name for name, value in result.metrics.items() if name.startswith(TASK) and value > 0]
