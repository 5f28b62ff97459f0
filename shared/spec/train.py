"""The tables on training: optimizer steps, checkpoints, resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.spec.base import (
    MAX_ENGINE_RANKS,
    MAX_RANKS,
    Coefficient,
    Factor,
    Fraction,
    Ranks,
    SpecPart,
    Steps,
    Tokens,
    Workers,
)
from opentinker.shared.tenant_limits import MAX_PRIORITY, MIN_PRIORITY
from opentinker.shared.types.mistakes import fill, mistake

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

SIMULATED = "learner = 'simulated'"
RewindCause = Literal["entropy", "reward_cliff", "zero_variance", "length_drift", "kl", "ratio_tails", "non_finite"]
ALARMS = ("entropy", "reward_cliff", "zero_variance", "length_drift", "kl", "ratio_tails")
"""Names of the alarms, as in the metrics `alarm/NAME`."""
ALARM_WINDOW = 20
"""Steps that an alarm looks at; a job goes back to a checkpoint from before them."""


class AlarmBounds(SpecPart):
    """Bounds of the alarms of `services/trainer/collapse_alarm.py` that have no other setting."""

    zero_variance: Fraction = 0.95
    """rl: `zero_variance` rings if over 20 steps the median share of groups with equal rewards is at least this and
    `target` (or 0.9 of the way from the worst reward to the best) is not reached. Of algorithms without a group
    baseline, batches count. 0: never."""
    length_drift: Annotated[float, Field(ge=0.0, le=1e6)] = 2.0
    """rl: `length_drift` rings if answers are this many times longer or shorter than 20 steps before and the reward has
    not risen. 0: never."""
    kl: Annotated[float, Field(ge=0.0, le=1e6)] = 0.1
    """rl: `kl` rings if over 20 steps the median KL divergence of sampler and trainer (`ratio/k3`, nats) is above this.
    0: never."""
    ratio_tails: Fraction = 0.3
    """rl: `ratio_tails` rings if over 20 steps the median effective sample size of the importance ratios (`ess`) is
    below this. 0: never."""


class TrainSpec(SpecPart):
    learner: Literal["torch", "simulated"] = "torch"
    """The learner; `simulated` only waits, for load tests, and refuses options that it would ignore."""
    simulated_step_s: Annotated[float, Field(ge=0.0, le=86_400.0)] | None = None
    """simulated: duration of a step; default: none."""
    steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Batches to train on; each raises the weight version by one. Required unless `data.epochs` is set."""
    lr: Coefficient = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Steps over which lr rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """lr after the warmup: constant, or falling with every step until the end of `steps`."""
    lr_end: Fraction | None = None
    """linear, cosine: final share of lr, which a step after the last would have; default 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW: decay of the mean of squared gradients."""
    weight_decay: Coefficient = 0.0
    """AdamW: decoupled decay."""
    grad_clip: Factor = 1.0
    """Largest global gradient norm."""
    parallel: Literal["data", "zero1", "zero2", "zero3"] = "data"
    """Sharding over the ranks of resources.trainer_ranks. `data`: the batch. `zero1`: also the optimizer's state;
    `zero2`: also gradients; `zero3`: also weights (DeepSpeed's ZeRO). Each needs less memory and more traffic than the
    one before."""
    tokens_per_micro_batch: Tokens = 8192
    """Packed tokens per forward pass; a longer trajectory gets a separate one."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and recompute the rest: the same gradients with a
    fraction of the memory, for about a third more time."""
    checkpoint_every: Steps = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=1_000_000)] = 3
    """Number of newest checkpoints that stay on disk; policies that train on the same matches keep at most two more."""
    target: Annotated[dict[str, Annotated[float, Field(ge=-1e12, le=1e12)]], Field(max_length=100)] = {}
    """Stop early once the mean of the last 10 steps of each named metric reaches the value, e.g. {"exact" = 0.9}. For a
    metric of [validation], e.g. {"val/exact" = 0.9}, the last complete evaluation counts, and training waits for it."""
    entropy_alarm: Coefficient = 0.01
    """rl: event `collapse_alarm` if over 20 steps the entropy is below this (nats), nine groups of ten have equal
    rewards, and `target` (or 0.9 of the way from the worst reward to the best) is not reached. 0: never."""
    collapse_alarm: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """rl: the same event (`reward_cliff`) if over 20 steps `exact`, or `reward/mean` without it, has lost this share of
    its best gain, or of its distance from the worst reward. 0: never."""
    alarms: AlarmBounds = AlarmBounds()
    """rl: bounds of the other alarms; docs/metrics.md lists them."""
    rewind_on: Annotated[list[RewindCause], Field(max_length=10)] = []
    """rl: alarms that make the job go back to the last checkpoint from before the alarm's window, with new episodes;
    `non_finite` is a step refused for a loss or gradient that is NaN or infinite. See docs/metrics.md."""
    rewinds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Times that the job goes back; the next alarm of `rewind_on` fails it."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the trainer: adapter initialisation, dropout, the order of [data]."""
    deterministic: bool = False
    """Two runs give bitwise identical weights, even if killed and resumed. Requirements and cost:
    docs/deterministic.md."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.warmup_steps > self.steps > 0:
            found.append(mistake("warmup_steps", self.warmup_steps, f"is larger than steps={self.steps}"))
        if self.schedule != "constant":
            fill(self, {"lr_end": self.lr_end or 0.0})
        elif self.lr_end is not None:
            found.append(mistake("lr_end", self.lr_end, "needs schedule = 'linear' or 'cosine'"))
        if self.learner == "simulated":
            fill(self, {"simulated_step_s": self.simulated_step_s or 0.0})
        elif self.simulated_step_s is not None:
            found.append(mistake("simulated_step_s", self.simulated_step_s, f"needs {SIMULATED}"))
        return found


class ResourceSpec(SpecPart):
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    """Jobs of higher priority start first and may preempt lower ones, which continue later. The operator may set a
    lower maximum than 10 for a tenant."""
    rollout_workers: Workers = 1
    """Maximum number of processes that generate for the job. It needs min_rollout_workers; idle ones beyond that are
    lent to it, and taken back when another job can start with them."""
    min_rollout_workers: Workers = 1
    """Rollout workers with which the job starts, and which it keeps."""
    trainer: Literal["auto", "own", "shared"] = "auto"
    """`shared`: LoRA jobs of one base train in one process and share the base, so that one trains while the episodes of
    another play. Needs a trainer with the setting `bank_jobs`; docs/shared-trainers.md says which jobs can. `auto`:
    shared if the job can and, when it is submitted, such a trainer with a free place for each policy trains this base
    or nothing; otherwise own."""
    trainer_gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of the job's trainers, one rank each; 0: trains on the CPU. With a shared trainer 0 or 1: it trains on its
    first GPU then, and so do all that share it."""
    rollout_gpus: Annotated[int, Field(ge=0, le=MAX_ENGINE_RANKS)] = 0
    """GPUs of each rollout worker, on one machine; with several, the model is divided among them
    (rollout.tensor_parallel). 0: workers without one are preferred, and vLLM uses the device of its worker."""
    gpu_memory_gb: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Minimum memory of each of these GPUs (10^9 bytes)."""
    trainer_ranks: Ranks | None = None
    """Processes that share each batch; default: one per GPU, or one. Where no trainer has room for all, several share
    them. See train.parallel. With [policies], the default of each policy, and one trainer has all."""
    min_trainer_ranks: Ranks | None = None
    """Ranks with which the job starts, or continues after a loss, if there is no room for all; default: trainer_ranks.
    They never become more while it runs."""

    def resolve(self) -> list[dict[str, Any]]:
        ranks = self.trainer_ranks or max(1, self.trainer_gpus)
        if self.trainer_gpus and ranks != self.trainer_gpus:
            problem = f"must be trainer_gpus={self.trainer_gpus}, one rank per GPU, or left out"
            return [mistake("trainer_ranks", ranks, problem)]
        if (self.min_trainer_ranks or 1) > ranks:
            problem = f"is larger than trainer_ranks={ranks}"
            return [mistake("min_trainer_ranks", self.min_trainer_ranks, problem)]
        if self.min_rollout_workers > self.rollout_workers:
            problem = f"is larger than rollout_workers={self.rollout_workers}"
            return [mistake("min_rollout_workers", self.min_rollout_workers, problem)]
        if self.gpu_memory_gb is not None and not self.trainer_gpus and not self.rollout_gpus:
            problem = "needs trainer_gpus or rollout_gpus: it is their memory"
            return [mistake("gpu_memory_gb", self.gpu_memory_gb, problem)]
        fill(self, {"trainer_ranks": ranks})
        return []

    @property
    def ranks(self) -> int:
        return self.trainer_ranks or 1


def settle_parallel(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `train.parallel`."""
    parallel = spec.train.parallel
    if parallel == "data":
        return []
    found = []
    if spec.resources.ranks == 1:
        table = "" if spec.policies else "resources."
        found.append(f"needs {table}trainer_ranks > 1: a single rank has nothing to share")
    if spec.algorithm.advantage == "gae" and spec.value_model is None:
        found.append("does not go with algorithm.advantage = 'gae', whose critic is whole on every rank; take 'data'")
    return [mistake("train.parallel", parallel, problem) for problem in found]


def all_ranks(spec: JobSpec) -> int:
    """Return the number of processes that train: one or several for each policy."""
    return sum(own.trainer_ranks or spec.resources.ranks for own in spec.policies.values()) or spec.resources.ranks


def rank_mistakes(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in how many ranks there are."""
    return _fewer_ranks(spec) + _policy_ranks(spec)


def _fewer_ranks(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `resources.min_trainer_ranks`."""
    least, ranks = spec.resources.min_trainer_ranks or 0, spec.resources.ranks
    if least in (0, ranks):
        return []
    problem = ""
    if len(spec.policies) > 1:
        problem = "must be left out in a job with several policies, whose ranks are all on one trainer"
    elif spec.train.deterministic:
        problem = f"must be trainer_ranks={ranks} with train.deterministic: other ranks round otherwise"
    return [mistake("resources.min_trainer_ranks", least, problem)] if problem else []


def _policy_ranks(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in the ranks of policies, whose learners are all in one trainer process."""
    found: list[tuple[str, Any, str]] = []
    gpus, several = spec.resources.trainer_gpus, len(spec.policies) > 1
    if several and gpus > 1:
        problem = (
            "must be 0 or 1 in a job with several policies, which share the trainer's first GPU, with one rank each: "
            "write trainer_gpus = 1; or trainer_gpus = 0 and trainer_ranks, which a policy may have of its own, for "
            "several ranks each on CPUs"
        )
        found.append(("resources.trainer_gpus", gpus, problem))
    for name, own in spec.policies.items():
        if gpus and own.trainer_ranks not in (None, spec.resources.ranks):
            problem = "must be left out with resources.trainer_gpus, which says how many ranks there are"
            found.append((f"policies.{name}.trainer_ranks", own.trainer_ranks, problem))
    if several and (total := all_ranks(spec)) > MAX_RANKS:
        problem = f"gives {total} ranks to {len(spec.policies)} policies; {MAX_RANKS} fit in a job"
        found.append(("resources.trainer_ranks", spec.resources.ranks, problem))
    partitioned = [name for name, own in spec.policies.items() if own.train.parallel != "data"]
    for name in partitioned[1:]:
        problem = f"must be 'data', as {partitioned[0]!r} has another: DeepSpeed joins one group of ranks per process"
        found.append((f"policies.{name}.train.parallel", spec.policies[name].train.parallel, problem))
    return [mistake(*one) for one in found]


def engine_ranks(spec: JobSpec) -> int:
    """Return the number of ranks among which an engine divides a model."""
    return spec.rollout.tensor_parallel or max(1, spec.resources.rollout_gpus)


def settle_gpus(spec: JobSpec) -> list[dict[str, Any]]:
    """Mistakes in `resources.rollout_gpus` and `rollout.tensor_parallel`."""
    gpus, ranks, found = spec.resources.rollout_gpus, spec.rollout.tensor_parallel, []
    if spec.rollout.engine != "vllm":
        by = f"does not apply with rollout.engine = {spec.rollout.engine!r}, which has no use for"
        found += [("resources.rollout_gpus", gpus, f"{by} a GPU")] if gpus else []
        found += [("rollout.tensor_parallel", ranks, f"{by} ranks")] if ranks and ranks > 1 else []
    elif gpus and ranks not in (None, gpus):
        found.append(("rollout.tensor_parallel", ranks, f"must be rollout_gpus={gpus}, one rank per GPU, or left out"))
    elif spec.train.deterministic and engine_ranks(spec) > 1:
        problem = "must be 1: nothing fixes how the parts of a sum are added over ranks (train.deterministic)"
        found.append(("rollout.tensor_parallel", engine_ranks(spec), problem))
    if not found and spec.rollout.engine == "vllm":
        fill(spec.rollout, {"tensor_parallel": engine_ranks(spec)})
    return [mistake(*one) for one in found]
