"""Adds model outputs to the group that is sent to the trainer. Pure numpy."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from opentinker.services.reference_forward.required_models import REFERENCE, REWARD, TEACHER, VALUES
from opentinker.shared.types.core import F32
from opentinker.shared.types.trajectories import Group, Trajectory

FIELDS = {REFERENCE: "ref_logprobs_T", TEACHER: "teacher_logprobs_T"}


def add_results(group: Group, found: dict[str, list[Any]], weights: dict[str, float]) -> Group:
    """Return the group with the results of its models. `found`: by role, one result per trajectory (None of one that no
    model has scored); fields of other roles stay unchanged. `weights`: weights of the reward models, by name.

    Conversations are removed: the trainer does not need them.
    """
    trajectories = group.trajectories
    for role, name in FIELDS.items():
        if role in found:
            trajectories = [
                t if found_T is None else msgspec.structs.replace(t, **{name: _bytes(found_T)})
                for t, found_T in zip(trajectories, found[role], strict=True)
            ]
    if VALUES in found:
        trajectories = [
            t if found_T is None else _add_values(t, found_T)
            for t, found_T in zip(trajectories, found[VALUES], strict=True)
        ]
    if weights and found:
        judged = {name: found[REWARD + name] for name in weights if REWARD + name in found}
        scores = [
            {name: float(own[i]) for name, own in judged.items() if own[i] is not None}
            for i in range(len(trajectories))
        ]
        trajectories = [_add_scores(t, own, weights) if own else t for t, own in zip(trajectories, scores, strict=True)]
    return msgspec.structs.replace(group, trajectories=trajectories)


def _add_values(trajectory: Trajectory, found_T: F32) -> Trajectory:
    """Set the values; for a truncated trajectory the last one is the value of its end state."""
    T = len(trajectory.mask_T)
    end = float(found_T[T]) if len(found_T) > T else 0.0
    return msgspec.structs.replace(trajectory, values_T=_bytes(found_T[:T]), end_value=end)


def _add_scores(trajectory: Trajectory, scores: dict[str, float], weights: dict[str, float]) -> Trajectory:
    """reward = environment's + sum of weight * score; the last turn gets the sum, and its components by name."""
    parts = {f"reward_model/{name}": weights[name] * score for name, score in scores.items()}
    turns, reward = list(trajectory.turns), trajectory.reward + math.fsum(parts.values())
    if turns:
        last = turns[-1]
        turns[-1] = msgspec.structs.replace(
            last, reward=last.reward + math.fsum(parts.values()), components={**last.components, **parts}
        )
        reward = math.fsum(turn.reward for turn in turns)
    return msgspec.structs.replace(trajectory, turns=turns, reward=reward, scores=scores, messages=None)


def _bytes(values_T: Any) -> bytes:
    return np.asarray(values_T, dtype="<f4").tobytes()
