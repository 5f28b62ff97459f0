"""Alarm for collapsed policies: their samples are all alike, or their quality has dropped.

It evaluates the last WINDOW steps.

    entropy    the median entropy is below `train.entropy_alarm`, nine of ten groups have equal rewards, and the goal is
               not reached: train.target, or without one, 0.9 of the way from the worst reward seen to the best
    quality    `exact`, or `reward/mean` where the environment does not report it: its mean has lost the share
               `train.collapse_alarm` of its gain over the first window

A policy that has solved its task has no entropy and equal rewards too, but has reached the goal. With random rewards,
groups differ even under a deterministic policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from opentinker.shared.spec import TrainSpec
from opentinker.shared.spec.evaluation import PREFIX

WINDOW = 20
EQUAL_SHARE = 0.9
"""Share of groups with equal rewards above which there is nothing to learn."""
GOAL_SHARE = 0.9
"""Share of the way from the worst reward to the best that counts as the goal without a train.target."""
NOISE = 2.0
"""Smallest gain that counts, in standard deviations of the steps in a window: chance alone gives windows of WINDOW
steps less than one."""
HINTS = {
    "entropy": "every sample of a group is the same, so nothing can be learned from them: continue from an earlier "
    "checkpoint with algorithm.entropy_coef or a lower train.lr",
    "quality": "continue from an earlier checkpoint, with a lower train.lr or a tighter clip",
}


class CollapseAlarm:
    def __init__(self, train: TrainSpec) -> None:
        self._train = train
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._worst, self._best = math.inf, -math.inf
        """Worst and best reward of a single episode."""
        self._quality = ""
        self._first: float | None = None
        self._top = -math.inf
        """Mean quality over a window: the first, and the best."""
        self.active: dict[str, str] = {}
        """Active alarms: metric by reason."""

    def update(self, values: Mapping[str, float]) -> dict[str, str]:
        """Add one step's metrics; return the alarms that start with it. A step without rewards is ignored."""
        if "reward/mean" not in values:
            return {}
        self._steps.append(values)
        self._worst = min(self._worst, values.get("reward/min", math.inf))
        self._best = max(self._best, values.get("reward/max", -math.inf))
        self._quality = self._quality or ("exact" if "exact" in values else "reward/mean")
        now = {}
        if len(self._steps) == WINDOW:
            if self._has_collapsed():
                now["entropy"] = "entropy"
            if self._has_regressed():
                now["quality"] = self._quality
        began = {why: metric for why, metric in now.items() if why not in self.active}
        self.active = now
        return began

    def _has_collapsed(self) -> bool:
        entropies = [step["entropy"] for step in self._steps if "entropy" in step]
        return (
            len(entropies) == WINDOW
            and float(np.median(entropies)) < self._train.entropy_alarm
            and float(np.median([step.get("zero_variance", 0.0) for step in self._steps])) >= EQUAL_SHARE
            and not self._reached()
        )

    def _reached(self) -> bool:
        target = self._train.target
        if target:  # targets of evaluation metrics are only checked at the end of the job
            return all(not name.startswith(PREFIX) and self._mean(name) >= wanted for name, wanted in target.items())
        if self._best <= self._worst:
            return True  # no reward was ever better than another
        return self._mean("reward/mean") >= self._worst + GOAL_SHARE * (self._best - self._worst)

    def _has_regressed(self) -> bool:
        mean = self._mean(self._quality)
        self._first = mean if self._first is None else self._first
        self._top = max(self._top, mean)
        gained = self._top - self._first
        spread = float(np.std([step.get(self._quality, 0.0) for step in self._steps]))
        lost = self._train.collapse_alarm
        return bool(lost) and gained > NOISE * spread and gained > 0 and self._top - mean >= lost * gained

    def _mean(self, name: str) -> float:
        return float(np.mean([step.get(name, -math.inf) for step in self._steps]))
