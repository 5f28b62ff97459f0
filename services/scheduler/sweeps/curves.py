"""Computes a trial's value: the history of one metric of a job, and its summary."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from opentinker.services.scheduler.sweeps.early_stopping import rungs
from opentinker.shared.data.step_log import TRAINER_SOURCE, metric_prefix
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.types.core import split_part
from opentinker.shared.types.sweeps import Trial
from opentinker.shared.types.telemetry import MetricPoint

MAX_POINTS = 10_000
"""Points of a history that are kept; of a longer one, every second."""
LARGEST = 1e300
"""Largest absolute value that counts: the sum of MAX_POINTS of them is finite. Others are left out like NaN."""


class History:
    """One metric of one job, along the steps that led to its present weights: a trainer that begins again at an earlier
    step, after a rewind or a kill, discards the values from there on."""

    def __init__(self, table: SweepTable) -> None:
        assert table.metric is not None and table.window is not None
        self._metric, self._window, self._summary = table.metric, table.window, table.summary
        self._largest = table.goal == "maximize"
        self._rule = table.early_stopping
        self._values: dict[int, float] = {}
        self._passed: dict[int, float] = {}
        """Moving means at the rungs that were passed before points were left out."""
        self._begins: dict[str, int] = {}
        """First step of each trainer, by incarnation, in the order of their points."""
        self.names: set[str] = set()
        """Metrics that the job has reported."""

    def add(self, point: MetricPoint) -> None:
        step = point.step
        if len(self.names) < MAX_POINTS:
            self.names |= point.values.keys()
        source, policy = split_part(point.source)
        if source == TRAINER_SOURCE and self._metric.startswith(metric_prefix(policy)):
            if point.incarnation not in self._begins:
                self._begins[point.incarnation] = step
                self._values = {at: value for at, value in self._values.items() if at < step}
                self._passed = {rung: mean for rung, mean in self._passed.items() if rung < step}
            elif self._is_discarded(point):  # delivered again
                return
        value = point.values.get(self._metric, math.nan)
        if abs(value) <= LARGEST:
            self._values[step] = value
            if self._passed and step <= max(self._passed):  # trained again
                self._passed = {rung: mean for rung, mean in self._passed.items() if rung < step}
            if len(self._values) > MAX_POINTS:
                self._passed = self.rungs()
                self._values = dict(sorted(self._values.items())[::-2])

    def _is_discarded(self, point: MetricPoint) -> bool:
        """Return whether a later trainer has begun at or before the step of this trainer's point."""
        begins = [*self._begins]
        later = begins[begins.index(point.incarnation) + 1 :]
        return any(self._begins[incarnation] <= point.step for incarnation in later)

    @property
    def step(self) -> int:
        return max(self._values, default=0)

    def means(self) -> list[tuple[int, float]]:
        """Return the moving mean after each step. Nothing is subtracted: a huge value would take all digits of those
        after it. A window is the end of one block of points and the beginning of the next."""
        window = self._window
        points = sorted(self._values.items())
        found, ends, total = [], [0.0] * (window + 1), 0.0
        for place, (step, value) in enumerate(points):
            inside = place % window
            if inside == 0 and place:
                block = [value for _, value in points[place - window : place]]
                ends, total = [*accumulate(reversed(block), initial=0.0)][::-1], 0.0
            total += value
            mean = (ends[inside + 1] + total) / min(place + 1, window)
            found.append((step, float(f"{mean:.12g}")))
        return found

    def value(self) -> float | None:
        """Return the summary; None without points."""
        if not self._values:
            return None
        if self._summary == "mean":
            return sum(self._values.values()) / len(self._values)
        means = [mean for _, mean in self.means()]
        full = means[self._window - 1 :] or means[-1:]  # a mean over fewer points is a matter of luck
        return means[-1] if self._summary == "last" else (max if self._largest else min)(full)

    def rungs(self) -> dict[int, float]:
        """Return the moving mean at each rung of early stopping that was passed, of those that follow a point."""
        if self._rule is None:
            return {}
        means, found = self.means(), dict(self._passed)
        steps = [step for step, _ in means]
        for rung in rungs(self._rule, self.step):
            if rung not in found and (place := bisect_right(steps, rung)):
                found[rung] = means[place - 1][1]
        return found


def mean_value(trial: Trial) -> float | None:
    """Return the mean over the trial's jobs; None if one of them has no value."""
    values = [job.value for job in trial.jobs if job.value is not None]
    return sum(values) / len(values) if len(values) == len(trial.jobs) else None


def best_of(trials: Sequence[Trial], table: SweepTable) -> Trial | None:
    """Return the finished trial with the best value, the earliest of equal ones."""
    ranked = [trial for trial in trials if trial.state == "finished" and trial.value is not None]

    def rank(trial: Trial) -> Any:
        assert trial.value is not None
        return trial.value if table.goal == "maximize" else -trial.value

    return max(ranked, key=rank, default=None)
