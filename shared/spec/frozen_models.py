"""Models that are not trained and say something of what the policy did; reference-forward runs them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.spec.seats import MAX_POLICIES, PolicyName
from opentinker.shared.types.mistakes import fill, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec


class TeacherSpec(SpecPart):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of the causal language model to learn from. Every token of model.base must have the same id
    in it. Its logits are divided by rollout.temperature, like the policy's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its computation."""


class RewardModelSpec(SpecPart):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of a Hugging Face sequence classifier whose own chat template renders conversations,
    regardless of the policy's template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its computation."""
    label: str | None = None
    """For a classifier with several labels: the label whose probability is the score. With one label the score is its
    logit."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of the score, which is added to the reward of the last turn; 0: it is only reported."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,40}$")] = ""
    """Name in metrics; default: the last part of base."""

    policies: Annotated[list[PolicyName], Field(max_length=MAX_POLICIES)] = []
    """Of [policies]: whose episodes it scores; default: those of all."""

    def scores(self, policy: str) -> bool:
        return not self.policies or policy in self.policies

    def resolve(self) -> list[dict[str, Any]]:
        last = re.sub(r"[^A-Za-z0-9_.-]", "-", self.base.rstrip("/").rpartition("/")[2])
        fill(self, {"name": self.name or last[-40:] or "model"})
        return []


class ValueModelSpec(SpecPart):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of a Hugging Face token classifier (AutoModelForTokenClassification) with one label: the
    return expected before the next token is chosen, in units of the job's rewards, including reward models' scores and
    the deduction of kl_in = 'reward'. It must be causal, and every token of model.base must have the same id in it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its computation."""


TRAINS_CRITIC = ("critic_lr", "value_clip")
"""Options of `advantage = "gae"` for the critic that is trained where there is no value model."""


def is_scored(plain: dict[str, Any]) -> bool:
    """Return whether reference-forward stands between rollout workers and trainer. `plain`: a validated spec as
    data."""
    policies = (plain.get("policies") or {}).values()
    tables = [policy["algorithm"] for policy in policies] or [plain.get("algorithm") or {}]
    asked = any(algorithm.get("kl_coef") or algorithm.get("distill_coef") for algorithm in tables)
    return bool(asked or plain.get("reward_models") or plain.get("value_model"))


def misplaced_critic(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return critic options given together with a value model. `data`: the spec as written."""
    algorithm = data.get("algorithm")
    if data.get("value_model") is None or not isinstance(algorithm, dict):
        return []
    problem = "does not apply with [value_model], which is frozen: no critic is trained"
    return [
        mistake(f"algorithm.{name}", algorithm[name], problem)
        for name in TRAINS_CRITIC
        if algorithm.get(name) is not None
    ]


def settle_frozen(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between the frozen models and the rest of the spec."""
    return _settle_teacher(spec) + _settle_reward_models(spec) + _settle_value_model(spec)


def _settle_teacher(spec: JobSpec) -> list[dict[str, Any]]:
    coefficient, teacher = spec.algorithm.distill_coef, spec.teacher
    plain = None if teacher is None else teacher.model_dump()
    if spec.train.learner == "simulated":
        by = "does not apply to train.learner = 'simulated'"
        found = [("algorithm.name", spec.algorithm.name, coefficient), ("teacher", plain, teacher)]
        return [mistake(field, value, by) for field, value, there in found if there]
    if coefficient and teacher is None:
        return [mistake("teacher", None, "is needed for algorithm.distill_coef")]
    if teacher is not None and not coefficient:
        problem = "is 0, so that [teacher] would be ignored: set it, or algorithm.name = 'distill'"
        return [mistake("algorithm.distill_coef", 0.0, problem)]
    return []


def _settle_reward_models(spec: JobSpec) -> list[dict[str, Any]]:
    judges = spec.reward_models
    problem = ""
    if spec.train.learner == "simulated":
        problem = "does not apply to train.learner = 'simulated'"
    elif not spec.policies and spec.algorithm.advantage == "none":
        problem = "would be ignored: algorithm.advantage = 'none' does not look at rewards"
    if judges and problem:
        return [mistake("reward_models", [judge.name for judge in judges], problem)]
    names = [judge.name for judge in judges]
    return [
        mistake(f"reward_models.{i}.name", name, "is the name of another one too: give it another")
        for i, name in enumerate(names)
        if name in names[:i]
    ] + _judged_policies(spec)


def _judged_policies(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes in whose episodes reward models score."""
    known = f"its policies are: {', '.join(spec.policies)}" if spec.policies else "it has no [policies]"
    return [
        mistake(f"reward_models.{i}.policies", name, f"is not a policy of this job; {known}")
        for i, judge in enumerate(spec.reward_models)
        for name in judge.policies
        if name not in spec.policies
    ]


def _settle_value_model(spec: JobSpec) -> list[dict[str, Any]]:
    if spec.value_model is None:
        return []
    problem = ""
    if spec.train.learner == "simulated":
        problem = "does not apply to train.learner = 'simulated'"
    elif spec.algorithm.advantage != "gae":
        problem = f"would be ignored: algorithm.advantage = {spec.algorithm.advantage!r} takes no values, 'gae' does"
    if problem:
        return [mistake("value_model", spec.value_model.model_dump(), problem)]
    without = spec.algorithm.model_copy(update=dict.fromkeys(TRAINS_CRITIC))
    fill(spec, {"algorithm": without})
    return []
