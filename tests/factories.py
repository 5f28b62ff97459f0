"""Valid nouns with one field changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types import (
    Ending,
    Group,
    Span,
    StopReason,
    Ticket,
    Trajectory,
    Turn,
    WeightVersion,
)

V0 = WeightVersion(1, 0)


def make_trajectory(
    *,
    index: int = 0,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (8, 9, 1),
    reward: float = 1.0,
    versions: list[WeightVersion] | None = None,
    logprob: float = -1.0,
    **changes: Any,
) -> Trajectory:
    """One turn; the output's tokens are shared equally among the given versions."""
    versions = versions or [V0]
    T, start = len(prompt) + len(output), len(prompt)
    cuts = [start + round(i * len(output) / len(versions)) for i in range(len(versions) + 1)]
    fields: dict[str, Any] = {
        "index": index,
        "attempt": f"a{index}",
        "ids_T": np.asarray(prompt + output, dtype="<i4").tobytes(),
        "mask_T": np.asarray([0] * start + [1] * len(output), dtype="u1").tobytes(),
        "logprobs_T": np.asarray([0.0] * start + [logprob] * len(output), dtype="<f4").tobytes(),
        "spans": [Span(a, b, v) for a, b, v in zip(cuts, cuts[1:], versions, strict=False)],
        "turns": [Turn(start=start, end=T, stop=StopReason.EOS, reward=reward)],
        "ending": Ending.ENV_DONE,
        "reward": reward,
    }
    return Trajectory(**(fields | changes))


def make_group(*, seq: int = 0, job: str = "j-test", size: int = 2, **changes: Any) -> Group:
    """`changes` go to every trajectory; rewards alternate 1, 0."""
    trajectories = [make_trajectory(index=i, **({"reward": float(i % 2 == 0)} | changes)) for i in range(size)]
    return Group(job=job, seq=seq, environment="copy_digits", worker="rollout-0", trajectories=trajectories)


def make_ticket(**changes: Any) -> Ticket:
    fields: dict[str, Any] = {"job": "j-test", "seq": 0, "row": 0, "seed": 0, "group_size": 2, "version": V0}
    return Ticket(**(fields | changes))


def make_spec(**changes: Any) -> JobSpec:
    """A small valid job; keys of nested parts are given as `part__field`."""
    data: dict[str, Any] = {
        "name": "test",
        "model": {"base": "model"},
        "environment": {"name": "copy_digits"},
        "algorithm": {"group_size": 2, "groups_per_batch": 2},
        "rollout": {"engine": "toy", "max_tokens": 8},
        "train": {"learner": "simulated", "steps": 3},
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            data.setdefault(part, {})[name] = value
        else:
            data[part] = value
    return parse_spec(data)
