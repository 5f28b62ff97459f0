"""What a job wants of frozen models: which model, and what for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from opentinker.shared.spec import JobSpec

REFERENCE = "reference"
"""A role: log-probabilities of the model that the policy started from."""

TEACHER = "teacher"
"""A role: log-probabilities of the model that the policy learns from."""

VALUES = "values"
"""A role: the return expected before each sampled token."""

REWARD = "reward:"
"""A role, with the name of the reward model: a score per trajectory."""


class ModelKey(msgspec.Struct, frozen=True):
    """Models of the same key are loaded once, whichever jobs want them and whatever for."""

    base: str
    """Path or hub id."""
    dtype: str
    adapter: str = ""
    """Directory of a PEFT adapter on it; empty: none."""
    fp32_head: bool = False
    """Whether logits are computed in float32 although the dtype is another."""
    head: Literal["language", "sequence", "token"] = "language"
    """Of a reward model `sequence`, of a value model `token`."""
    label: str | None = None
    """Of a reward model: whose probability is the score."""


def needs(spec: JobSpec, start: Path) -> dict[ModelKey, list[str]]:
    """Roles by model. `start`: where a job that begins with another one's checkpoint has it."""
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
    """The model at the job's start: of a LoRA job the base without an adapter, or with the one that it starts from."""
    model = spec.model
    base, adapter = model.base, ""
    if spec.start is not None:
        base, adapter = (str(start), "") if model.lora is None else (model.base, str(start))
    return ModelKey(base, model.dtype, adapter, model.fp32_head)
