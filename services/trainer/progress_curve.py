"""A job's main metric as a short curve, for lists of jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST = 48
"""Values; where there would be more, neighbours become their mean."""
NAMES = ("reward/mean", "loss")
"""The first one that the first step reports is drawn."""


class ProgressCurve:
    """Add steps in order."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every = 1
        """Steps that a value is the mean of."""
        self._name = ""
        """Name of the metric; empty: no step has had one yet."""
        self._pending: list[float] = []

    def add(self, step: Mapping[str, Any]) -> None:
        """`step`: its metrics. One without the metric, or with no finite number, is ignored."""
        self._name = self._name or next((name for name in NAMES if name in step), "")
        value = float(step.get(self._name, math.nan))
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) < self._every:
            return
        self.values.append(sum(self._pending) / self._every)
        self._pending.clear()
        if len(self.values) == MOST:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._every *= 2
