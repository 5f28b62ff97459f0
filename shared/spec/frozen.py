"""Models that are not trained and say something of what the policy did; reference-forward runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.part import Part

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


class TeacherSpec(Part):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of the causal language model to learn from. Every token of model.base must have the same id
    in it. Its logits are divided by rollout.temperature, as the policy's are."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which it computes."""


def is_scored(plain: dict[str, Any]) -> bool:
    """Whether reference-forward stands between rollout workers and trainer. `plain`: a validated spec as data."""
    algorithm = plain.get("algorithm") or {}
    return bool(algorithm.get("kl_coef") or algorithm.get("distill_coef"))


def settle_frozen(spec: JobSpec) -> list[dict[str, Any]]:
    """What is wrong between the frozen models and the rest of the spec."""
    return _settle_teacher(spec)


def _settle_teacher(spec: JobSpec) -> list[dict[str, Any]]:
    coefficient, teacher = spec.algorithm.distill_coef, spec.teacher
    plain = None if teacher is None else teacher.model_dump()
    if spec.train.learner == "simulated":
        by = "does not apply to train.learner = 'simulated'"
        found = [("algorithm.name", spec.algorithm.name, coefficient), ("teacher", plain, teacher)]
        return [{"field": field, "value": value, "problem": by} for field, value, there in found if there]
    if coefficient and teacher is None:
        return [{"field": "teacher", "value": None, "problem": "is needed for algorithm.distill_coef"}]
    if teacher is not None and not coefficient:
        problem = "is 0, so that [teacher] would be ignored: set it, or algorithm.name = 'distill'"
        return [{"field": "algorithm.distill_coef", "value": 0.0, "problem": problem}]
    return []
