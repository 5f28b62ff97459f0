"""Computes a trial's value: the history of one metric of a job, and its summary."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from opentinker.services.scheduler.sweeps.early_stopping import rungs
from opentinker.shared.spec.sweeps.table import SweepTable
from opentinker.shared.types.sweeps import Trial

MAX_POINTS = 10_000
"""Points of a history that are kept; of a longer one, every second."""
LARGEST = 1e300
"""Largest absolute value that counts: the sum of MAX_POINTS of them is finite. Others are left out like NaN."""


class History:
    """One metric of one job. A step that is trained again replaces its earlier value."""

    def __init__(self, table: SweepTable) -> None:
        assert table.metric is not None and table.window is not None
        self._metric, self._window, self._summary = table.metric, table.window, table.summary
        self._largest = table.goal == "maximize"
        self._rule = table.early_stopping
        self._values: dict[int, float] = {}
        self._passed: dict[int, float] = {}
        """Moving means at the rungs that were passed before points were left out."""
        self.names: set[str] = set()
        """Metrics that the job has reported."""

    def add(self, step: int, values: dict[str, float]) -> None:
        """Add a point."""
        if len(self.names) < MAX_POINTS:
            self.names |= values.keys()
        value = values.get(self._metric, math.nan)
        if abs(value) <= LARGEST:
            self._values[step] = value
            if self._passed and step <= max(self._passed):  # trained again
                self._passed = {rung: mean for rung, mean in self._passed.items() if rung < step}
            if len(self._values) > MAX_POINTS:
                self._passed = self.rungs()
                self._values = dict(sorted(self._values.items())[::-2])

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
