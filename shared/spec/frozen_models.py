"""Models that are not trained and say something of what the policy did; reference-forward runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import SpecPart
from opentinker.shared.spec.matches.seats import MAX_POLICIES, PolicyName
from opentinker.shared.types.mistakes import fill, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import AlgorithmSpec, JobSpec
    from opentinker.shared.spec.matches.policies import PolicySpec


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
    """Names in [policies] whose episodes it scores; default: all."""

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


SIMULATED = "does not apply to train.learner = 'simulated'"
NO_REWARDS = "would be ignored: algorithm.advantage = 'none' does not look at rewards"
TRAINS_CRITIC = ("critic_lr", "value_clip")
"""Options of `advantage = "gae"` for the critic that is trained where there is no value model."""


def is_scored(plain: dict[str, Any]) -> bool:
    """Return whether reference-forward stands between rollout workers and trainer. `plain`: a validated spec as
    data."""
    tables = [*(plain.get("policies") or {}).values()] or [plain]
    asked = any(
        table.get("value_model")
        or any((table.get("algorithm") or {}).get(name) for name in ("kl_coef", "distill_coef"))
        for table in tables
    )
    return bool(asked or plain.get("reward_models"))


def misplaced_critic(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return critic options given together with a value model. `data`: the spec as written."""
    policies, common = data.get("policies"), data.get("value_model")
    named = policies.items() if isinstance(policies, dict) else ()
    tables = {name: one for name, one in named if isinstance(one, dict)}
    owns = {name: one.get("value_model") or (not one.get("trains_critic") and common) for name, one in tables.items()}
    places = {"": (data, all(owns.values()) if owns else common)}
    places |= {f"policies.{name}.": (one, owns[name]) for name, one in tables.items()}
    problem = "does not apply with [value_model], which is frozen: no critic is trained"
    return [
        mistake(f"{place}algorithm.{name}", algorithm[name], problem)
        for place, (table, frozen) in places.items()
        if frozen and isinstance(algorithm := table.get("algorithm"), dict)
        for name in TRAINS_CRITIC
        if algorithm.get(name) is not None
    ]


def frozen_models_of(job: JobSpec, policy: PolicySpec) -> dict[str, Any]:
    """Return the teacher and the value model of a policy: its own, or those of the job if it has a use for them."""
    takes_values = policy.algorithm.advantage == "gae" and not policy.trains_critic
    return {
        "teacher": policy.teacher or (job.teacher if policy.algorithm.distill_coef else None),
        "value_model": policy.value_model or (job.value_model if takes_values else None),
    }


def settle_frozen(spec: JobSpec) -> list[dict[str, Any]]:
    """Return mistakes between the frozen models and the rest of the spec; give each policy those that it has."""
    if not spec.policies:
        if any(player.policy is not None for player in spec.seats.values()):
            return []  # the policies are wrong in themselves: who uses a model cannot be judged
        return _settle_teacher(spec) + _settle_reward_models(spec) + _settle_value_model(spec)
    found = _of_no_policy(spec) + _settle_reward_models(spec)
    settled = {}
    for name, policy in spec.policies.items():
        models = frozen_models_of(spec, policy)
        found += _policy_mistakes(spec, name, policy, models)
        if models["value_model"] is not None:
            models["algorithm"] = policy.algorithm.model_copy(update=dict.fromkeys(TRAINS_CRITIC))
        elif policy.algorithm.advantage == "gae":
            models["trains_critic"] = True  # also where the spec of another policy is the job's
        settled[name] = policy.model_copy(update=models)
    fill(spec, {"policies": settled})
    if spec.value_model is not None or all(one.value_model is not None for one in settled.values()):
        fill(spec, {"algorithm": spec.algorithm.model_copy(update=dict.fromkeys(TRAINS_CRITIC))})
    return found


def _settle_teacher(spec: JobSpec) -> list[dict[str, Any]]:
    coefficient, teacher = spec.algorithm.distill_coef, spec.teacher
    if spec.train.learner == "simulated":
        found = [("algorithm.name", spec.algorithm.name, coefficient), ("teacher", _plain(teacher), teacher)]
        return [mistake(field, value, SIMULATED) for field, value, there in found if there]
    if coefficient and teacher is None:
        return [mistake("teacher", None, "is needed for algorithm.distill_coef")]
    if teacher is not None and not coefficient:
        problem = "is 0, so that [teacher] would be ignored: set it, or algorithm.name = 'distill'"
        return [mistake("algorithm.distill_coef", 0.0, problem)]
    return []


def _of_no_policy(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the job's frozen models that no policy has, and a teacher that policies lack."""
    if spec.train.learner == "simulated":
        parts = {"teacher": spec.teacher, "value_model": spec.value_model}
        return [mistake(name, _plain(part), SIMULATED) for name, part in parts.items() if part is not None]
    owns = {name: frozen_models_of(spec, policy) for name, policy in spec.policies.items()}
    wanted = {
        "teacher": (spec.teacher, "algorithm.distill_coef above 0"),
        "value_model": (spec.value_model, "algorithm.advantage = 'gae'"),
    }
    found = [
        mistake(part, _plain(model), f"would be ignored: no policy has {use} and no {part} of its own")
        for part, (model, use) in wanted.items()
        if model is not None and all(own[part] != model for own in owns.values())
    ]
    bare = [name for name, own in owns.items() if spec.policies[name].algorithm.distill_coef and own["teacher"] is None]
    if bare:
        problem = (
            f"is needed for algorithm.distill_coef of {', '.join(bare)}: [teacher], or [policies.{bare[0]}.teacher]"
        )
        found.append(mistake("teacher", None, problem))
    return found


def _policy_mistakes(
    spec: JobSpec, name: str, policy: PolicySpec, models: Mapping[str, SpecPart | None]
) -> list[dict[str, Any]]:
    """Return mistakes in one policy's use of frozen models. `models`: those that it has."""
    at, algorithm = f"policies.{name}", policy.algorithm
    if spec.train.learner == "simulated":
        found = [
            mistake(f"{at}.{part}", _plain(model), SIMULATED)
            for part, model in models.items()
            if model is not None and model != getattr(spec, part)
        ]
        return found + [mistake(f"{at}.algorithm.name", algorithm.name, SIMULATED)] * bool(algorithm.distill_coef)
    found = []
    if policy.teacher is not None and not algorithm.distill_coef:
        problem = f"is 0, so that [{at}.teacher] would be ignored: set it, or algorithm.name = 'distill'"
        found.append(mistake(f"{at}.algorithm.distill_coef", 0.0, problem))
    if policy.value_model is not None and algorithm.advantage != "gae":
        found.append(mistake(f"{at}.value_model", _plain(policy.value_model), _no_values(algorithm)))
    if policy.trains_critic and algorithm.advantage != "gae":
        found.append(mistake(f"{at}.trains_critic", True, "needs algorithm.advantage = 'gae'"))
    elif policy.trains_critic and policy.value_model is not None:
        found.append(mistake(f"{at}.trains_critic", True, f"does not apply with [{at}.value_model], which is frozen"))
    return found


def _settle_reward_models(spec: JobSpec) -> list[dict[str, Any]]:
    judges = spec.reward_models
    advantages = {policy.algorithm.advantage for policy in spec.policies.values()} or {spec.algorithm.advantage}
    problem = ""
    if spec.train.learner == "simulated":
        problem = SIMULATED
    elif advantages == {"none"}:
        problem = NO_REWARDS
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
    problems = dict.fromkeys(
        (name for judge in spec.reward_models for name in judge.policies if name not in spec.policies),
        f"is not a policy of this job; {known}",
    )
    if not any(policy.algorithm.team for policy in spec.policies.values()):  # a team's reward has those of its members
        problems |= {name: NO_REWARDS for name, one in spec.policies.items() if one.algorithm.advantage == "none"}
    return [
        mistake(f"reward_models.{i}.policies", name, problems[name])
        for i, judge in enumerate(spec.reward_models)
        for name in judge.policies
        if name in problems
    ]


def _settle_value_model(spec: JobSpec) -> list[dict[str, Any]]:
    if spec.value_model is None:
        return []
    problem = ""
    if spec.train.learner == "simulated":
        problem = SIMULATED
    elif spec.algorithm.advantage != "gae":
        problem = _no_values(spec.algorithm)
    if problem:
        return [mistake("value_model", _plain(spec.value_model), problem)]
    fill(spec, {"algorithm": spec.algorithm.model_copy(update=dict.fromkeys(TRAINS_CRITIC))})
    return []


def _no_values(algorithm: AlgorithmSpec) -> str:
    return f"would be ignored: algorithm.advantage = {algorithm.advantage!r} takes no values, 'gae' does"


def _plain(part: SpecPart | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump()
