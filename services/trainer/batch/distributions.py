"""Histograms of a step's values over a few fixed bins. Pure numpy.

`counts` has one element more than `edges`: below the first, from each edge to the next, from the last one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from opentinker.services.trainer.algorithm.seats import seat_plays
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.trajectories import Group

LENGTHS = tuple(2.0**k for k in range(18))
TURNS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
STALENESS = tuple(float(k) for k in range(1, 17))
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
REWARD_BINS = 20
RATIO = "histogram/ratio/"
"""Prefix of a bin number: the learner, which alone has the tokens, reports the histogram among a step's values."""

Histogram = dict[str, Any]


def distributions(groups: Sequence[Group], version: WeightVersion, values: dict[str, float]) -> dict[str, Histogram]:
    """Return histograms of a batch trained at `version`: reward, length and turns of plays, staleness of
    trajectories, and the importance ratio of tokens if the learner reported it; its entries are removed from
    `values`."""
    plays = [play for play in seat_plays(list(groups)) if play.is_played]
    rewards = [play.reward for play in plays]
    lags = [version.step - t.oldest.step for group in groups for t in group.trajectories]
    found = {
        "reward": histogram(rewards, reward_edges(rewards)),
        "length": histogram([play.tokens for play in plays], LENGTHS),
        "turns": histogram([sum(len(t.turns) for t in play.streams) for play in plays], TURNS),
        "staleness": histogram(lags, STALENESS),
    }
    counted = [values.pop(f"{RATIO}{bin}", None) for bin in range(len(RATIOS) + 1)]
    if None not in counted:
        found["ratio"] = {"edges": list(RATIOS), "counts": [int(count or 0) for count in counted]}
    return found


def ratio_counts(ratios: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the ratio histogram of a step's tokens as values, one per bin."""
    return {f"{RATIO}{bin}": float(count) for bin, count in enumerate(_counts(ratios, RATIOS))}


def histogram(numbers: Sequence[float], edges: Sequence[float]) -> Histogram:
    return {"edges": list(edges), "counts": _counts(np.asarray(numbers, dtype=np.float64), edges)}


def _counts(numbers: npt.NDArray[np.float64], edges: Sequence[float]) -> list[int]:
    counts: list[int] = np.bincount(np.searchsorted(edges, numbers, side="right"), minlength=len(edges) + 1).tolist()
    return counts


def reward_edges(rewards: Sequence[float]) -> list[float]:
    """Return the edges of 20 equal bins from 0, or from -top if there are negative rewards, to the next 1, 2 or 5 times
    a power of ten: stable from step to step while rewards keep their magnitude."""
    most = max((abs(reward) for reward in rewards), default=0.0) or 1.0
    power = 10.0 ** np.floor(np.log10(most))
    top = float(next(power * k for k in (1, 2, 5, 10) if power * k >= most * (1 - 1e-9)))
    bottom = -top if min(rewards, default=0.0) < 0 else 0.0
    return [round(float(edge), 12) for edge in np.linspace(bottom, top, REWARD_BINS + 1)]
