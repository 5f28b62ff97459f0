"""Estimates the time and cost of a spec where no job like it has run: from the sizes of its model and rows and round
figures, corrected by what those figures say of jobs with other models that ran here; of one with simulated parts, by
simulating its pipeline with the durations that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from opentinker.services.scheduler.jobs.data_size import row_tokens
from opentinker.services.scheduler.placement.measured_jobs import Measured, step_size
from opentinker.shared.api_types import JobEstimate
from opentinker.shared.config import Settings
from opentinker.shared.data.pipeline_simulation import WARM_UP, Pools, Work, predict
from opentinker.shared.data.round_figures import CPU, GPU, known_parameters, parameters_text
from opentinker.shared.spec import DataSpec, JobSpec, read_stored
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.errors import SpecError, plural

BACKWARD = 6
"""Operations per parameter and token of a step with its backward pass; 4 with an adapter."""
FORWARD = 2
ROW_TOKENS = 1024
"""Tokens of a row where neither its file nor the spec tells."""
PAIR = 2
"""Sequences of a row of preferences."""
PROMPT_SHARE = 2.0
"""Tokens of a trajectory over those that were sampled: a prompt as long as the answer."""


SIMULATED = (
    "simulated, because no job like it has run here: with the spec's own durations of tokens, swaps and steps, the "
    "longest answers that it allows, and an environment that takes no time"
)
SIMULATED_TURNS = 3_000
"""Turns that are simulated at most, within about 0.3 s, and groups that are played at the same time."""
SIMULATED_STEPS = 4
NEVER_FULL = 1_000_000
"""Sessions of the env workers of a simulation: the spec does not say how many there are."""


class _Phases(NamedTuple):
    """Seconds of a step."""

    sampling: float
    training: float


def rough_estimate(
    settings: Settings, spec: JobSpec, steps: int, measured: Sequence[Measured] = ()
) -> JobEstimate | None:
    """Return the estimate of a job with this spec and number of steps; None for a job without an end, partly simulated
    without durations, simulated with several policies, or with a model of unknown size. `like` is empty. Blocking.

    `measured`: earlier jobs of its kind, of any model; the result is longer in proportion to how much longer they took.
    """
    if spec.kind in ("inference", "tinker") or not steps:
        return None
    if _is_simulated(spec):
        step_s = _simulated_episode_s(spec, steps) if spec.kind == "eval" else _simulated_step_s(spec)
        return None if step_s is None else _estimate(settings, spec, steps, step_s * steps, SIMULATED)
    found = _step(spec, steps)
    if found is None:
        return None
    ratios = sorted(_ratios(measured))
    seconds = found.seconds * steps
    if not ratios:
        return _estimate(settings, spec, steps, seconds, found.basis)
    factor, low, high = median(ratios), ratios[0], ratios[-1]
    took = f"{low:.3g}" if len(ratios) == 1 else f"{low:.3g} to {high:.3g}"
    others = f"{plural(len(ratios), 'other job')} of its kind took {took} times as long as such figures say"
    basis = f"{found.basis}; times {factor:.3g}, because {others}"
    made = _estimate(settings, spec, steps, seconds * factor, basis)
    return {**made, "seconds_low": seconds * low, "seconds_high": seconds * high}


def _ratios(measured: Sequence[Measured]) -> Iterator[float]:
    """Yield the ratio of the measured time of a step of each job to that by round figures."""
    for one in measured:
        try:
            spec = read_stored(one.job.spec)
        except SpecError:  # stored by an earlier release and refused by this one: not compared
            continue
        if found := _step(spec, max(one.job.step, one.job.steps)):
            yield one.seconds * step_size(one.job.spec) / found.seconds


class _Step(NamedTuple):
    """A step, or an episode of an eval job."""

    seconds: float
    basis: str


def _step(spec: JobSpec, steps: int) -> _Step | None:
    """Return how long a step takes by round figures; None for a model of unknown size. Several policies sample equal
    parts of an episode's tokens, one after another, and one trainer has all of them."""
    policies = [spec_of(spec, name) for name in spec.policies or ("",)]
    sizes: dict[str, str] = {}
    phases: list[_Phases] = []
    for own in policies:
        try:
            count, source = known_parameters(own.model.base)
        except OSError:  # the checks of the model say what is wrong with it
            return None
        if not count:
            return None
        sizes[own.model.base] = f"{parameters_text(count)} ({source})"
        phases.append(_phases(own, count, steps, 1 / len(policies)))
    sampling, training = (sum(seconds) for seconds in zip(*phases, strict=True))
    stale = spec.kind == "rl" and min(own.algorithm.max_staleness for own in policies) > 0
    overlapped = stale and spec.rollout.sleep != "always"
    step_s = max(sampling, training) if overlapped else sampling + training
    models = " and ".join(dict.fromkeys(sizes.values()))
    uses = ((spec.resources.rollout_gpus, _samplers(spec)), (spec.resources.trainer_gpus, spec.kind != "eval"))
    on = " and ".join(dict.fromkeys((GPU if gpus else CPU).name for gpus, there in uses if there))
    long = f"rows of {_tokens(spec.data):.3g} tokens" if spec.data is not None else "the longest answers that it allows"
    basis = f"assumed, because no job like it has run here: {models} on {on}, and {long}"
    return _Step(step_s / (steps if spec.kind == "eval" else 1), basis)


def _samplers(spec: JobSpec) -> int:
    return spec.resources.rollout_workers if spec.kind in ("rl", "eval") else 0


def _estimate(settings: Settings, spec: JobSpec, steps: int, seconds: float, basis: str) -> JobEstimate:
    samplers, trainers = _samplers(spec), 0 if spec.kind == "eval" else 1
    worker_s = seconds * (samplers + trainers)
    gpu_s = seconds * (samplers * spec.resources.rollout_gpus + trainers * spec.resources.trainer_gpus)
    cost = settings.cost(worker_s, gpu_s)
    return {
        "jobs": 1,
        "steps": steps,
        "seconds": seconds,
        "seconds_low": seconds,
        "seconds_high": seconds,
        "worker_s": worker_s,
        "gpu_s": gpu_s,
        "cost": cost,
        "currency": "" if cost is None else settings.price_currency,
        "like": [],
        "basis": basis,
    }


def _is_simulated(spec: JobSpec) -> bool:
    """Return whether its times are those of a simulation, which the size of a model does not tell."""
    samples = spec.kind in ("rl", "eval")
    trains = spec.kind != "eval"
    return (samples and spec.rollout.engine == "toy") or (trains and spec.train.learner == "simulated")


def _simulated_step_s(spec: JobSpec) -> float | None:
    """Return the seconds of a step whose tokens, swaps and training take what the spec says; None if it does not say
    so, or if its steps are too large to be simulated here. `opentinker plan` takes its time for those."""
    algorithm, rollout, train_s = spec.algorithm, spec.rollout, spec.train.simulated_step_s or 0.0
    if spec.kind != "rl" or spec.policies or rollout.toy is None or spec.train.learner != "simulated":
        return None
    batches = SIMULATED_STEPS + WARM_UP + algorithm.max_staleness  # this many more may be played than are trained on
    turns = algorithm.group_size * algorithm.groups_per_batch * rollout.max_turns * batches
    if max(turns, rollout.max_concurrent_groups * spec.resources.rollout_workers) > SIMULATED_TURNS:
        return None
    if not rollout.toy.seconds_per_token and not train_s:
        return None
    work = Work(
        group_size=algorithm.group_size,
        groups_per_batch=algorithm.groups_per_batch,
        max_staleness=algorithm.max_staleness,
        concurrent_groups=rollout.max_concurrent_groups,
        turns=rollout.max_turns,
        tokens=rollout.max_tokens / rollout.max_turns,
        token_s=rollout.toy.seconds_per_token,
        env_s=0.0,
        train_s=train_s,
        swap_s=rollout.toy.swap_seconds,
        sleeps=rollout.sleep == "always",
    )
    pools = Pools(rollout_workers=spec.resources.rollout_workers, env_workers=1, sessions=NEVER_FULL)
    return predict(work, pools, SIMULATED_STEPS).step_s


def _simulated_episode_s(spec: JobSpec, episodes: int) -> float | None:
    """Return the seconds of an eval job by its episodes; None if its tokens take no time."""
    toy, rollout = spec.rollout.toy, spec.rollout
    if toy is None or not toy.seconds_per_token:
        return None
    return _turns(spec, episodes) * rollout.max_tokens * toy.seconds_per_token / episodes


def _turns(spec: JobSpec, episodes: int) -> int:
    """Return how often the rollout workers play as many episodes as they have places for, to play all."""
    places = spec.rollout.max_concurrent_groups * (spec.algorithm.group_size if spec.kind == "rl" else 1)
    return -(-episodes // (places * spec.resources.rollout_workers))


def _tokens(data: DataSpec) -> float:
    """Return the tokens of a row."""
    return min(row_tokens(data) or data.max_length or ROW_TOKENS, data.max_length or float("inf"))


def _phases(spec: JobSpec, parameters: float, episodes: int, share: float) -> _Phases:
    """Return the seconds of a step; of an eval job, of all its episodes. `share`: the model's part of their tokens."""
    operations = (BACKWARD if spec.model.lora is None else BACKWARD - FORWARD) * parameters
    if spec.kind == "dpo":
        operations += FORWARD * parameters  # the reference
    trainer, ranks = (GPU if spec.resources.trainer_gpus else CPU), max(1, spec.resources.trainer_gpus)
    if spec.kind in ("sft", "dpo"):
        assert spec.data is not None
        rows = spec.data.batch_size * (PAIR if spec.kind == "dpo" else 1)
        return _Phases(0.0, rows * _tokens(spec.data) * operations / trainer.operations_per_s / ranks)
    if spec.kind == "rl":
        episodes = spec.algorithm.group_size * spec.algorithm.groups_per_batch
    longest = spec.rollout.max_tokens * share
    engine, gpus = (GPU if spec.resources.rollout_gpus else CPU), max(1, spec.resources.rollout_gpus)
    width = 4 if spec.model.dtype == "float32" else 2
    one_s = longest * (engine.token_s + width * parameters / engine.bytes_per_s / gpus)
    all_s = episodes * longest * FORWARD * parameters / engine.operations_per_s / gpus / spec.resources.rollout_workers
    sampling = max(one_s * _turns(spec, episodes), all_s)
    if spec.kind == "eval":
        return _Phases(sampling, 0.0)
    return _Phases(sampling, episodes * longest * PROMPT_SHARE * operations / trainer.operations_per_s / ranks)
