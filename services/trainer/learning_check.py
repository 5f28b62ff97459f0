"""Whether a job has compared anything: where every reward is equal a group says nothing about what to do more often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentinker.shared.spec import AlgorithmSpec

ABSOLUTE = ("gae", "reinforce_pp")
"""Estimators without a group's baseline: rewards that differ between groups are enough for them."""
NOTHING_LEARNED = (
    "nothing was learned: in each group of all steps the rewards were equal. The task is too easy or too hard for this "
    "model, or its reward is wrong: look at what was said with `opentinker rollouts`"
)


class Comparisons:
    """What the metrics of all steps so far say. A teacher, or KL, teaches whatever the rewards are."""

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        taught = algorithm.advantage == "none" or algorithm.distill_coef or algorithm.kl_in == "reward"
        self._absolute = algorithm.advantage in ABSOLUTE
        self._any = bool(taught)
        self._steps = 0
        self._mean: float | None = None

    def look(self, values: Mapping[str, Any]) -> None:
        """Takes in one step's metrics."""
        self._steps += 1
        if values.get("zero_variance") != 1.0:
            self._any = True
        elif self._absolute:
            mean = values["reward/mean"]
            self._any |= values["reward/std"] > 0.0 or self._mean not in (None, mean)
            self._mean = mean

    @property
    def warning(self) -> str:
        """Empty if there were some, or nothing is known."""
        return "" if self._any or not self._steps else NOTHING_LEARNED
