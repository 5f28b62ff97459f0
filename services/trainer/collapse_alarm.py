"""An alarm on policies that have stopped to learn for good: they say one thing only, or have lost what they could do.

Steps are looked at WINDOW at a time.

    entropy    its median is below `train.entropy_alarm`, nine groups of ten have equal rewards, and the goal is not
               reached: train.target, or where there is none, 0.9 of the way from the worst reward seen to the best
    quality    `exact`, or `reward/mean` where the environment does not report it: its mean has lost the share
               `train.collapse_alarm` of what it had gained over the first window

A policy that has solved its task has no entropy and equal rewards too, but has reached the goal. Where rewards are
chance, groups differ however sure the policy is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from opentinker.shared.spec import TrainSpec
from opentinker.shared.spec.validation import PREFIX

WINDOW = 20
EQUAL = 0.9
"""Share of groups with equal rewards from which there is nothing to learn."""
REACHED = 0.9
"""Of the way from the worst reward to the best, where nobody has said what the goal is."""
NOISE = 2.0
"""A gain counts from so many standard deviations of the steps in a window: chance alone gives windows of WINDOW steps
less than one."""
HINTS = {
    "entropy": "every sample of a group is the same, so nothing can be learned from them: go on from an earlier "
    "checkpoint with algorithm.entropy_coef or a lower train.lr",
    "quality": "go on from an earlier checkpoint, with a lower train.lr or a tighter clip",
}


class CollapseAlarm:
    def __init__(self, train: TrainSpec) -> None:
        self._train = train
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._worst, self._best = math.inf, -math.inf
        """Rewards of single episodes."""
        self._quality = ""
        self._first: float | None = None
        self._top = -math.inf
        """Means of the quality over a window: of the first, and the best."""
        self.ringing: dict[str, str] = {}
        """Why, and by which metric."""

    def look(self, values: Mapping[str, float]) -> dict[str, str]:
        """Takes in one step's metrics; returns what began with it. A step without rewards says nothing."""
        if "reward/mean" not in values:
            return {}
        self._steps.append(values)
        self._worst = min(self._worst, values.get("reward/min", math.inf))
        self._best = max(self._best, values.get("reward/max", -math.inf))
        self._quality = self._quality or ("exact" if "exact" in values else "reward/mean")
        now = {}
        if len(self._steps) == WINDOW:
            if self._says_one_thing():
                now["entropy"] = "entropy"
            if self._has_forgotten():
                now["quality"] = self._quality
        began = {why: metric for why, metric in now.items() if why not in self.ringing}
        self.ringing = now
        return began

    def _says_one_thing(self) -> bool:
        entropies = [step["entropy"] for step in self._steps if "entropy" in step]
        return (
            len(entropies) == WINDOW
            and float(np.median(entropies)) < self._train.entropy_alarm
            and float(np.median([step.get("zero_variance", 0.0) for step in self._steps])) >= EQUAL
            and not self._reached()
        )

    def _reached(self) -> bool:
        target = self._train.target
        if target:  # of an evaluation's metrics only the job's end says that they were reached
            return all(not name.startswith(PREFIX) and self._mean(name) >= wanted for name, wanted in target.items())
        if self._best <= self._worst:
            return True  # no reward was ever better than another
        return self._mean("reward/mean") >= self._worst + REACHED * (self._best - self._worst)

    def _has_forgotten(self) -> bool:
        mean = self._mean(self._quality)
        self._first = mean if self._first is None else self._first
        self._top = max(self._top, mean)
        gained = self._top - self._first
        spread = float(np.std([step.get(self._quality, 0.0) for step in self._steps]))
        lost = self._train.collapse_alarm
        return bool(lost) and gained > NOISE * spread and gained > 0 and self._top - mean >= lost * gained

    def _mean(self, name: str) -> float:
        return float(np.mean([step.get(name, -math.inf) for step in self._steps]))
