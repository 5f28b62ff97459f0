"""Detects jobs that cannot have learned: groups with equal rewards have no advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentinker.shared.spec import AlgorithmSpec

NOTHING_LEARNED = (
    "nothing was learned: in each group of all steps the rewards were equal. The task is too easy or too hard for this "
    "model, or its reward is wrong: read the episodes with `opentinker rollouts`"
)


class LearningCheck:
    """Checks the metrics of all steps so far."""

    def __init__(self, algorithm: AlgorithmSpec) -> None:
        self._across_groups = algorithm.learns_from == "batches"
        self._any = algorithm.learns_from == "more"
        self._steps = 0
        self._mean: float | None = None

    def update(self, values: Mapping[str, Any]) -> None:
        self._steps += 1
        if values.get("zero_variance") != 1.0:
            self._any = True
        elif self._across_groups:
            mean = values["reward/mean"]
            self._any |= values["reward/std"] > 0.0 or self._mean not in (None, mean)
            self._mean = mean

    @property
    def warning(self) -> str:
        """Return NOTHING_LEARNED, or an empty string if rewards differed or no step is known."""
        return "" if self._any or not self._steps else NOTHING_LEARNED
