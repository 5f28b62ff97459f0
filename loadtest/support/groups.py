"""Groups as rollout workers store them, of given lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opentinker.shared.types.core import Ending, StopReason, WeightVersion
from opentinker.shared.types.trajectories import Group, Span, Trajectory, Turn

JOB, GROUP_SIZE, TOKENS, PROMPT = "load", 8, 512, 128


def make_group(tokens: Sequence[int] = (TOKENS,) * GROUP_SIZE, job: str = JOB) -> Group:
    """Of a trajectory for each count of tokens."""
    dice = np.random.default_rng(0)
    return Group(
        job=job,
        seq=0,
        environment="load",
        worker="load",
        trajectories=[_trajectory(index, length, dice) for index, length in enumerate(tokens)],
    )


def _trajectory(index: int, length: int, dice: np.random.Generator) -> Trajectory:
    mask = np.ones(length, dtype="u1")
    mask[:PROMPT] = 0
    return Trajectory(
        index=index,
        attempt="a",
        ids_T=dice.integers(0, 150_000, length).astype("<i4").tobytes(),
        mask_T=mask.tobytes(),
        logprobs_T=(-dice.random(length) * mask).astype("<f4").tobytes(),
        spans=[Span(PROMPT, length, WeightVersion(1, 0))],
        turns=[Turn(start=PROMPT, end=length, stop=StopReason.EOS, reward=1.0)],
        ending=Ending.ENV_DONE,
        reward=1.0,
    )
