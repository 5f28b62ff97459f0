"""Alarm for growing mismatch between generation and training: it watches the slope of a metric, never its level.

The level depends on engines, kernels and dtypes in use; a slope indicates divergence. For `swap/mismatch`, which
compares equal weights, so does a jump: a version was not loaded as it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 40
"""Number of steps evaluated."""
GROWTH = 1.0
"""Rise over the window, as a multiple of the window's median, from which a slope counts."""
TREND = 0.5
"""Smallest Kendall tau: of all pairs of steps, the share that rises minus the share that falls."""
NOISE = 1e-4
"""Rises over the window below this many nats are rounding, regardless of trend."""
JUMP = 10.0
"""A value this many times the median of the values before it is a jump..."""
MIN_BEFORE_JUMP = 5
"""...if there are at least this many values before it."""
SWAPS = "swap/mismatch"
WATCHED = ("mismatch/mean", "drift/mean", SWAPS)


def theil_sen(values: npt.ArrayLike) -> tuple[float, float]:
    """Return the median slope of all pairs, per step, and Kendall's tau of the values against time, -1..1.

    Both are robust against a few outliers. Source: Sen, "Estimates of the regression coefficient based on Kendall's
    tau" (1968).
    """
    y = np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(y), k=1)
    slopes = (y[j] - y[i]) / (j - i)
    return float(np.median(slopes)), float(np.sign(slopes).mean())


def grows(values: npt.ArrayLike) -> bool:
    """Return whether the values rise steadily, and in total by at least their own median."""
    y = np.asarray(values, dtype=np.float64)
    slope, tau = theil_sen(y)
    rise = slope * (len(y) - 1)
    return tau >= TREND and rise >= max(NOISE, GROWTH * float(np.median(y)))


def jumps(values: Sequence[float]) -> bool:
    """Return whether the last value lies far above those before it."""
    *before, last = values
    return len(before) >= MIN_BEFORE_JUMP and last > max(NOISE, JUMP * float(np.median(before)))


class MismatchAlarm:
    """Evaluates the last WINDOW values of each watched metric."""

    def __init__(self) -> None:
        self.windows: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in WATCHED}
        self.active: set[str] = set()

    def update(self, values: dict[str, float]) -> list[str]:
        """Add one step's metrics; return the metrics that started to grow, or jumped, with it."""
        for name, window in self.windows.items():
            if name in values:
                window.append(values[name])
        now = {name for name, window in self.windows.items() if len(window) == WINDOW and grows(window)}
        if SWAPS not in values:  # no comparison in this step
            now |= self.active & {SWAPS}
        elif jumps(self.windows[SWAPS]):
            now.add(SWAPS)
        began = sorted(now - self.active)
        self.active = now
        return began
