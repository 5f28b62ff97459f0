"""Group advantages: rewards of one group in, one advantage per trajectory out. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
EPSILON = 1e-4


def grpo(rewards_G: npt.ArrayLike, *, normalize_std: bool = True) -> F64:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4); without `normalize_std` the numerator alone.

    `std` is the sample standard deviation (G - 1 in the denominator). A group of equal rewards gets zeros.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError("a group baseline needs at least two trajectories")
    centred: F64 = rewards - rewards.mean()
    if (rewards == rewards[0]).all():
        return np.zeros_like(centred)
    if normalize_std:
        centred /= rewards.std(ddof=1) + EPSILON
    return centred
