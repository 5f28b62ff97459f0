"""How a job is examined while it trains: start states of its own, one version of the weights, greedy by default."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from opentinker.shared.spec.part import Part, Positive

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

PREFIX = "val/"
"""Of every metric of an evaluation."""
REWARD = re.compile(r"val/(task/.+/)?reward(/|$)")
"""Metrics of an evaluation that are made of rewards."""
TOY_IGNORES = ("temperature", "top_p", "top_k")


class ValidationSpec(Part):
    """An evaluation plays its episodes with one version of the weights. No later version is published meanwhile;
    training goes on as far as max_staleness lets it. The last weights are always evaluated. Reward models judge no
    evaluation: its rewards are the environment's alone."""

    every: Positive
    """Optimizer steps from one evaluation to the next; training waits where an evaluation takes longer."""
    at_start: bool = True
    """Evaluate the weights that the job starts from, too."""
    episodes: Positive = 64
    """Start states per evaluation, played once each; always the same ones."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes the start states, and what is sampled. Rows are 0, 1, 2...; seeds are never those of training."""
    config: dict[str, Any] = {}
    """Laid over environment.config, e.g. {"split" = "test"}."""
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """0: always the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As in [rollout]; not with temperature = 0."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """As in [rollout]; not with temperature = 0."""
    max_tokens: Positive | None = None
    """Sampled tokens per episode; default: rollout.max_tokens."""
    transcripts: Annotated[int, Field(ge=0, le=1000)] = 8
    """The first so many episodes of every evaluation are kept, word by word, up to 100,000 characters each
    (`opentinker transcripts`)."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """An evaluation that takes longer ends with the episodes that it has, and says so."""

    def settle(self) -> list[dict[str, Any]]:
        if self.temperature > 0:
            return []
        return [
            {"field": name, "value": getattr(self, name), "problem": "does not apply to temperature = 0"}
            for name in ("top_p", "top_k")
            if getattr(self, name) != type(self).model_fields[name].default
        ]


def contradictions(spec: JobSpec) -> list[dict[str, Any]]:
    """What is wrong between [validation] and the other parts."""
    validation = spec.validation
    if validation is None:
        named = sorted(name for name in spec.train.target if name.startswith(PREFIX))
        return [
            {"field": f"train.target.{name}", "value": spec.train.target[name], "problem": "needs [validation]"}
            for name in named
        ]
    judged = sorted(name for name in spec.train.target if REWARD.match(name)) if spec.reward_models else []
    judges = ", ".join(judge.name for judge in spec.reward_models)
    problem = (
        f"is the environment's reward alone: no evaluation is judged by [[reward_models]] ({judges}). Name a metric "
        "that the environment reports, or reward/mean"
    )
    found = [{"field": f"train.target.{name}", "value": spec.train.target[name], "problem": problem} for name in judged]
    if spec.rollout.engine == "toy":
        usual = {"temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0,)}
        found += [
            {"field": f"validation.{name}", "value": value, "problem": "does not apply to engine = 'toy'"}
            for name in TOY_IGNORES
            if (value := getattr(validation, name)) not in usual[name]
        ]
    return found


def validation_episodes(spec: JobSpec) -> JobSpec:
    """The spec by which validation episodes are played; its own [validation] must be there."""
    validation = spec.validation
    assert validation is not None
    update: dict[str, Any] = {
        "temperature": validation.temperature,
        "top_p": validation.top_p,
        "top_k": validation.top_k,
        "max_tokens": validation.max_tokens or spec.rollout.max_tokens,
        "seed": validation.seed,
    }
    environment = {"config": {**spec.environment.config, **validation.config}}
    return spec.model_copy(
        update={
            "rollout": spec.rollout.model_copy(update=update),
            "environment": spec.environment.model_copy(update=environment),
        }
    )
