"""Settings with which `train.deterministic` cannot hold, each with the reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


TIMED = re.compile(
    r"step_seconds|train_seconds|trainer/(wait_share|tokens_per_s)|rollout_workers|val/seconds"
    r"|(queue|swap|dropped|failed)/.*"
)
"""Metrics that say how long something took, or what was lost on the way."""


def broken_promises(spec: JobSpec) -> list[dict[str, Any]]:
    """Return settings under which the weights would depend on timing or on unseeded state."""
    if not spec.train.deterministic:
        return []
    found = [
        (
            "algorithm.max_staleness",
            spec.algorithm.max_staleness,
            spec.algorithm.max_staleness == 0,
            "must be 0: with more, timing decides which weights sample a token",
        ),
        (
            "rollout.seed",
            spec.rollout.seed,
            spec.rollout.seed is not None,
            "must be set: without it nothing fixes what requests sample",
        ),
        (
            "rollout.oversample",
            spec.rollout.oversample,
            spec.rollout.oversample == 0,
            "must be 0: timing decides which episodes end first",
        ),
        (
            "resources.rollout_workers",
            spec.resources.rollout_workers,
            spec.resources.rollout_workers == 1,
            "must be 1: different machines may round differently, and timing decides who plays a group",
        ),
        (
            "algorithm.kl_coef",
            spec.algorithm.kl_coef,
            spec.algorithm.kl_coef == 0,
            "must be 0: reference-forward computes what comes together in one batch, and its sums depend on that",
        ),
        (
            "reward_models",
            [judge.name for judge in spec.reward_models],
            not spec.reward_models,
            "must be none: reference-forward computes what comes together in one batch, and its sums depend on that",
        ),
        (
            "value_model",
            None if spec.value_model is None else spec.value_model.base,
            spec.value_model is None,
            "must be none: reference-forward computes what comes together in one batch, and its sums depend on that",
        ),
        (
            "algorithm.distill_coef",
            spec.algorithm.distill_coef,
            not spec.algorithm.distill_coef,
            "must be 0: reference-forward computes what comes together in one batch, and its sums depend on that",
        ),
    ]
    found += [
        (f"train.target.{name}", value, False, "depends on timing, and with it when the job would end")
        for name, value in spec.train.target.items()
        if TIMED.fullmatch(name)
    ]
    return [
        {"field": field, "value": value, "problem": f"{problem} (train.deterministic)"}
        for field, value, kept, problem in found
        if not kept
    ]
