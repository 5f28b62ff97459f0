"""Estimates durations for `opentinker plan` that the user has not given: the environment's is measured here, the
model's follow from its size and from the round figures below. Each comes with an explanatory sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from opentinker.cli.planning.schedules import own_specs, training_times
from opentinker.shared.data.round_figures import CPU, GPU, known_parameters, parameters_text
from opentinker.shared.spec.engines import engine_policies

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec
    from opentinker.shared.spec.model import ModelSpec

PARAMETERS = 1e9
"""Parameters of a model whose size is in neither its files nor its name."""
PROMPT_SHARE = 2.0
"""Tokens of a trajectory over those that were sampled: a prompt as long as the answer."""
TURNS = 4
ENV_S = 0.1
"""Seconds per call of an environment that cannot be played here."""


class Estimate(NamedTuple):
    values: dict[str, float]
    """By field of capacity.Work."""
    reasons: list[str]
    """A sentence each."""


def estimated(spec: JobSpec, turns: float, tokens: float, missing: set[str]) -> Estimate:
    """Durations of the `missing` ones of token_s, tokens_per_s, train_s, env_s. `turns`, `tokens`: of an episode, and
    of a turn. Plays the environment for a moment, if it can be played here."""
    values: dict[str, float] = {}
    reasons = []
    models = players_of(spec)
    size = " and ".join(f"{parameters_text(one.parameters)} ({one.why})" for one in models)
    if {"token_s", "tokens_per_s"} & missing:
        machine = GPU if spec.resources.rollout_gpus else CPU
        gpus = max(1, spec.resources.rollout_gpus)  # ranks without GPUs share the processors of one machine
        values["token_s"] = machine.token_s + fmean(one.bytes for one in models) / machine.bytes_per_s / gpus
        values["tokens_per_s"] = machine.operations_per_s * gpus / (2 * fmean(one.parameters for one in models))
        shown = f"--token-ms {values['token_s'] * 1e3:.3g} --tokens-per-s {values['tokens_per_s']:.3g}"
        each = f", {gpus} of them for each engine" if gpus > 1 else ""
        reasons.append(f"assumed: {shown}, for {size} on {machine.name}{each}")
    if "train_s" in missing:
        machine = GPU if spec.resources.trainer_gpus else CPU
        times = training_times(spec, seconds_alone(spec, turns, tokens))
        values["train_s"] = max(times.values())
        trained = " and ".join(
            f"{batch_tokens(spec, own, turns, tokens):.3g} tokens of {parameters_text(model.parameters)}"
            for own, model in zip(own_specs(spec).values(), models_of(spec), strict=True)
        )
        ranks = 1 if spec.resources.trainer_gpus else spec.resources.ranks
        share = f"; its {ranks} ranks share that, and are faster on machines of their own" if ranks > 1 else ""
        reasons.append(f"assumed: --train-s {values['train_s']:.3g}, for {trained} on {machine.name}{share}")
    if "env_s" in missing:
        values["env_s"], why = _env_s(spec)
        reasons.append(f"{why}: --env-ms {values['env_s'] * 1e3:.3g}")
    return Estimate({name: value for name, value in values.items() if name in missing}, reasons)


def sleep_reasons(spec: JobSpec) -> list[str]:
    """Return what the plan takes for granted about engines that sleep during steps."""
    resources, rollout = spec.resources, spec.rollout
    if rollout.sleep == "always":
        return ['rollout.sleep = "always": engines stand still during each step']
    if rollout.sleep == "auto" and resources.trainer_gpus and resources.rollout_gpus and not spec.policies:
        return ["assumed: engines do not sleep during steps. On the trainer's GPU, if it is too small for both, they"
                " do: --set rollout.sleep=always"]  # fmt: skip
    return []


class Model(NamedTuple):
    parameters: float
    why: str
    """Source of their number."""
    bytes: float
    """Size of its weights in an engine."""
    is_adapter: bool


def models_of(spec: JobSpec) -> list[Model]:
    """Return the model of the job, or of each of its policies."""
    return [_model(own.model) for own in own_specs(spec).values()]


def batch_tokens(spec: JobSpec, own: JobSpec, turns: float, tokens: float) -> float:
    """Return the tokens of one step of a policy, each of which is taken to have an equal part of those of a match.
    `own`: the job's spec with the settings of the policy."""
    algorithm = own.algorithm
    episodes = algorithm.group_size * algorithm.groups_per_batch
    return episodes * turns * tokens * PROMPT_SHARE / max(1, len(spec.policies))


def seconds_alone(spec: JobSpec, turns: float, tokens: float) -> Mapping[str, float]:
    """Return the seconds of one step of each policy that had the trainer to itself: by the tokens of its batch, and the
    parameters of its model, of which an adapter takes fewer operations."""
    machine = GPU if spec.resources.trainer_gpus else CPU
    speed = machine.operations_per_s * max(1, spec.resources.trainer_gpus)
    found = {}
    for (name, own), model in zip(own_specs(spec).items(), models_of(spec), strict=True):
        operations = (4 if model.is_adapter else 6) * model.parameters
        found[name] = operations * batch_tokens(spec, own, turns, tokens) / speed
    return found


def players_of(spec: JobSpec) -> list[Model]:
    """Return the models that sample, each an equal part of the tokens: of policies, frozen checkpoints and pools. A
    checkpoint that is not looked up has the model of the job."""
    return [_model(player.model or spec.model) for player in engine_policies(spec)]


def _model(model: ModelSpec) -> Model:
    count, why = parameters_of(model.base)
    return Model(count, why, count * (4 if model.dtype == "float32" else 2), model.lora is not None)


def parameters_of(base: str) -> tuple[float, str]:
    """Return a model's number of parameters, and its source."""
    count, source = known_parameters(base)
    return (count, source) if count else (PARAMETERS, "a guess: it is not on this machine")


def _env_s(spec: JobSpec) -> tuple[float, str]:
    """Seconds of a call of the environment, and whether they were measured."""
    from opentinker.local.trial_episode import Guessing, play
    from opentinker.local.validate_local import playable

    name = spec.environment.name
    if not playable(spec):
        return ENV_S, f"assumed, for {name} is not played on this machine"
    for _ in range(2):  # the first may load a library or a data set
        tried = asyncio.run(play(name, spec.environment.config, Guessing(0), row=0, seed=0, turns=TURNS))
    if tried.failure:
        return ENV_S, f"assumed, for {name} cannot be played here ({tried.failure:.200})"
    calls = [tried.open_s, *tried.step_s]
    return sum(calls) / len(calls), f"measured, an episode of {name} on this machine"
