"""Frozen models that a job needs, and the role of each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.manifest import start_of

REFERENCE = "reference"
"""Role: log-probabilities of the model that the policy started from."""

TEACHER = "teacher"
"""Role: log-probabilities of the model that the policy learns from."""

VALUES = "values"
"""Role: the expected return before each sampled token."""

REWARD = "reward:"
"""Prefix of a role, followed by the name of the reward model: a score per trajectory."""


class ModelKey(msgspec.Struct, frozen=True):
    """Identity of a loaded model: jobs and roles with equal keys share one copy."""

    base: str
    """Path or hub id."""
    dtype: str
    adapter: str = ""
    """Directory of a PEFT adapter for it; empty: none."""
    fp32_head: bool = False
    """Whether logits are computed in float32 although the dtype is another."""
    head: Literal["language", "sequence", "token"] = "language"
    """`sequence` for a reward model, `token` for a value model."""
    label: str | None = None
    """For a reward model: the label whose probability is the score."""


def find_models(spec: JobSpec, data_dir: Path, job: str) -> dict[ModelKey, dict[str, list[str]]]:
    """Return by model its roles, each with the policies that it has the role for; a job's one policy has no name.

    A checkpoint is kept for each policy that starts from it; they share the reference from the first one's directory.
    """
    found: dict[ModelKey, dict[str, list[str]]] = {}
    starts: dict[str, Path] = {}
    for name in spec.policies or ("",):
        own, start = spec_of(spec, name), start_of(data_dir, job, name)
        if own.start is not None:
            start = starts.setdefault(own.start.checkpoint, start)
        for key, roles in find_required_models(own, start).items():
            for role in roles:
                found.setdefault(key, {}).setdefault(role, []).append(name)
    return found


def find_required_models(spec: JobSpec, start: Path) -> dict[ModelKey, list[str]]:
    """Return roles by model, of one policy. `spec`: with its settings. `start`: directory of the checkpoint that it
    starts from, if it names one."""
    found: dict[ModelKey, list[str]] = {}
    if spec.algorithm.kl_coef > 0:
        found.setdefault(_reference(spec, start), []).append(REFERENCE)
    if spec.teacher is not None:
        found.setdefault(ModelKey(spec.teacher.base, spec.teacher.dtype), []).append(TEACHER)
    if spec.value_model is not None:
        found.setdefault(ModelKey(spec.value_model.base, spec.value_model.dtype, head="token"), []).append(VALUES)
    for judge in spec.reward_models:
        key = ModelKey(judge.base, judge.dtype, head="sequence", label=judge.label)
        found.setdefault(key, []).append(REWARD + judge.name)
    return found


def _reference(spec: JobSpec, start: Path) -> ModelKey:
    """Return the model at the job's start: for LoRA the base without an adapter, or with the one it starts from."""
    model = spec.model
    base, adapter = model.base, ""
    if spec.start is not None:
        base, adapter = (str(start), "") if model.lora is None else (model.base, str(start))
    return ModelKey(base, model.dtype, adapter, model.fp32_head)
