"""What a job wants of frozen models: which model, and what for."""

from __future__ import annotations

import msgspec

from opentinker.shared.spec import JobSpec

REFERENCE = "reference"
"""A role: log-probabilities of the model that the policy started from."""


class ModelKey(msgspec.Struct, frozen=True):
    """Models of the same key are loaded once, whichever jobs want them and whatever for."""

    base: str
    """Path or hub id."""
    dtype: str


def needs(spec: JobSpec) -> dict[ModelKey, list[str]]:
    """Roles by model. The reference of a LoRA job is the base without the adapter."""
    found: dict[ModelKey, list[str]] = {}
    if spec.algorithm.kl_coef > 0:
        found.setdefault(ModelKey(spec.model.base, spec.model.dtype), []).append(REFERENCE)
    return found
