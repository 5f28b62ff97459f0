"""An alarm on growing disagreement between generation and training: on the slope of a metric, never on its level.

A level says which engines, kernels and dtypes are in use; a slope says that something is coming apart. Of
`swap/mismatch`, which compares the same weights, a jump says so too: one version was not loaded as it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 40
"""Steps that are looked at."""
GROWTH = 1.0
"""Rise over the window, as a multiple of the window's median, from which a slope counts."""
TREND = 0.5
"""Smallest Kendall tau: of all pairs of steps, the share that rises minus the share that falls."""
NOISE = 1e-4
"""Rises over the window below this many nats are rounding, whatever their trend."""
JUMP = 10.0
"""A value so many times the median of those before it has jumped..."""
SETTLED = 5
"""...once there are so many."""
SWAPS = "swap/mismatch"
WATCHED = ("mismatch/mean", "drift/mean", SWAPS)


def theil_sen(values: npt.ArrayLike) -> tuple[float, float]:
    """Median of the slopes between all pairs, per step, and Kendall's tau of the values against time, -1..1.

    A few outliers move neither. Sources: Sen, "Estimates of the regression coefficient based on Kendall's tau" (1968).
    """
    y = np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(y), k=1)
    slopes = (y[j] - y[i]) / (j - i)
    return float(np.median(slopes)), float(np.sign(slopes).mean())


def grows(values: npt.ArrayLike) -> bool:
    """True if the values rise steadily, and over their length by at least their own median."""
    y = np.asarray(values, dtype=np.float64)
    slope, tau = theil_sen(y)
    rise = slope * (len(y) - 1)
    return tau >= TREND and rise >= max(NOISE, GROWTH * float(np.median(y)))


def jumps(values: Sequence[float]) -> bool:
    """True if the last value lies far above those before it."""
    *before, last = values
    return len(before) >= SETTLED and last > max(NOISE, JUMP * float(np.median(before)))


class MismatchAlarm:
    """Remembers the last WINDOW values of each watched metric."""

    def __init__(self) -> None:
        self.windows: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in WATCHED}
        self.ringing: set[str] = set()

    def look(self, values: dict[str, float]) -> list[str]:
        """Takes in one step's metrics; returns the names that began to grow, or jumped, with it."""
        for name, window in self.windows.items():
            if name in values:
                window.append(values[name])
        now = {name for name, window in self.windows.items() if len(window) == WINDOW and grows(window)}
        if SWAPS not in values:  # nothing has been compared since
            now |= self.ringing & {SWAPS}
        elif jumps(self.windows[SWAPS]):
            now.add(SWAPS)
        began = sorted(now - self.ringing)
        self.ringing = now
        return began
