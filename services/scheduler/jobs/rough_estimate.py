"""Estimates the time and cost of a spec where no job like it has run: from the size of its model and round figures."""

from __future__ import annotations

from typing import NamedTuple

from opentinker.shared.api_types import JobEstimate
from opentinker.shared.config import Settings
from opentinker.shared.data.round_figures import CPU, GPU, known_parameters
from opentinker.shared.spec import JobSpec
from opentinker.shared.state.store import steps_of

BACKWARD = 6
"""Operations per parameter and token of a step with its backward pass; 4 with an adapter."""
FORWARD = 2
ROW_TOKENS = 1024
"""Tokens of a row where the spec sets no most."""
PAIR = 2
"""Sequences of a row of preferences."""
PROMPT_SHARE = 2.0
"""Tokens of a trajectory over those that were sampled: a prompt as long as the answer."""


class _Phases(NamedTuple):
    """Seconds of a step."""

    sampling: float
    training: float


def rough_estimate(settings: Settings, spec: JobSpec, jobs: int) -> JobEstimate | None:
    """Return what `jobs` jobs of this spec take at most, by round figures; None for a job without an end, of simulated
    parts, of several policies, or with a model of unknown size. `like` is empty. Blocking."""
    steps = steps_of(spec.model_dump(mode="json"))
    if spec.kind in ("inference", "tinker") or spec.policies or not steps or _is_simulated(spec):
        return None
    try:
        count, source = known_parameters(spec.model.base)
    except OSError:  # the checks of the model say what is wrong with it
        return None
    if not count:
        return None
    episodes = steps if spec.kind == "eval" else 1
    phases = _phases(spec, count, episodes)
    overlapped = spec.kind == "rl" and spec.algorithm.max_staleness > 0
    step_s = max(phases) if overlapped else sum(phases)
    seconds = step_s * (1 if spec.kind == "eval" else steps)
    samplers = spec.resources.rollout_workers if spec.kind in ("rl", "eval") else 0
    trainers = 0 if spec.kind == "eval" else 1
    worker_s = seconds * (samplers + trainers) * jobs
    gpu_s = seconds * (samplers * spec.resources.rollout_gpus + trainers * spec.resources.trainer_gpus) * jobs
    cost = settings.cost(worker_s, gpu_s)
    size = f"{count / 1e6:.3g} M parameters ({source})"
    on = " and ".join(
        dict.fromkeys(
            (GPU if gpus else CPU).name
            for gpus, there in ((spec.resources.rollout_gpus, samplers), (spec.resources.trainer_gpus, trainers))
            if there
        )
    )
    return {
        "jobs": jobs,
        "steps": steps,
        "seconds": seconds,
        "worker_s": worker_s,
        "gpu_s": gpu_s,
        "cost": cost,
        "currency": "" if cost is None else settings.price_currency,
        "like": "",
        "basis": f"assumed, for no job like it has run here: {size} on {on}, and the longest answers that it allows",
    }


def _is_simulated(spec: JobSpec) -> bool:
    """Return whether its times are those of a simulation, which the size of a model does not tell."""
    samples = spec.kind in ("rl", "eval")
    trains = spec.kind != "eval"
    return (samples and spec.rollout.engine == "toy") or (trains and spec.train.learner == "simulated")


def _phases(spec: JobSpec, parameters: float, episodes: int) -> _Phases:
    """Return the seconds of a step; of an eval job, of all its episodes."""
    operations = (BACKWARD if spec.model.lora is None else BACKWARD - FORWARD) * parameters
    trainer, ranks = (GPU if spec.resources.trainer_gpus else CPU), max(1, spec.resources.trainer_gpus)
    if spec.kind in ("sft", "dpo"):
        assert spec.data is not None
        rows = spec.data.batch_size * (PAIR if spec.kind == "dpo" else 1)
        return _Phases(0.0, rows * (spec.data.max_length or ROW_TOKENS) * operations / trainer.operations_per_s / ranks)
    if spec.kind == "rl":
        episodes = spec.algorithm.group_size * spec.algorithm.groups_per_batch
    longest = spec.rollout.max_tokens
    engine, gpus = (GPU if spec.resources.rollout_gpus else CPU), max(1, spec.resources.rollout_gpus)
    width = 4 if spec.model.dtype == "float32" else 2
    one_s = longest * (engine.token_s + width * parameters / engine.bytes_per_s / gpus)
    all_s = episodes * longest * FORWARD * parameters / engine.operations_per_s / gpus / spec.resources.rollout_workers
    sampling = max(one_s, all_s)
    if spec.kind == "eval":
        return _Phases(sampling, 0.0)
    return _Phases(sampling, episodes * longest * PROMPT_SHARE * operations / trainer.operations_per_s / ranks)
