"""How long, how fast and on what: optimizer steps, checkpoints, resources."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from opentinker.shared.config import LEAST_PRIORITY, MOST_PRIORITY
from opentinker.shared.spec.base import Coefficient, Factor, Fraction, SpecPart, Steps, Tokens, Workers
from opentinker.shared.types.mistakes import fill

SIMULATED = "learner = 'simulated'"


class TrainSpec(SpecPart):
    learner: Literal["torch", "simulated"] = "torch"
    """The learner; `simulated` only waits, for load tests, and refuses options that it would ignore."""
    simulated_step_s: Annotated[float, Field(ge=0.0, le=86_400.0)] | None = None
    """Duration of a step of the simulated learner, which takes no time by default; only with it."""
    steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Batches to train on; each raises the weight version by one. Needed, unless `data.epochs` says how long."""
    lr: Coefficient = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Steps over which lr rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """lr after the warmup: constant, or falling with every step until the end of `steps`."""
    lr_end: Fraction | None = None
    """linear, cosine: the share of lr that would be left for a step after the last; default 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW: decay of the mean of squared gradients."""
    weight_decay: Coefficient = 0.0
    """AdamW: decoupled decay."""
    grad_clip: Factor = 1.0
    """Largest global gradient norm."""
    parallel: Literal["data", "zero1", "zero2", "zero3"] = "data"
    """What the ranks of resources.trainer_ranks share. `data`: the batch. `zero1`: the optimizer's state too;
    `zero2`: gradients too; `zero3`: weights too (DeepSpeed's ZeRO). Each needs less memory than the one before and
    more traffic."""
    tokens_per_micro_batch: Tokens = 8192
    """Packed tokens per forward pass; a longer trajectory gets a separate one."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again: the same gradients with a
    fraction of the memory, for about a third more time."""
    checkpoint_every: Steps = 50
    """Steps; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=1_000_000)] = 3
    """This many checkpoints, the newest, stay on disk."""
    target: Annotated[dict[str, Annotated[float, Field(ge=-1e12, le=1e12)]], Field(max_length=100)] = {}
    """Stop early once the mean of the last 10 steps of each named metric reaches the value, e.g. {"exact" = 0.9}. Of a
    metric of [validation], e.g. {"val/exact" = 0.9}, the last complete evaluation counts, and training waits for it."""
    entropy_alarm: Coefficient = 0.01
    """rl: an event `collapse_alarm` when over 20 steps the entropy is below this (nats), nine groups of ten have equal
    rewards, and `target` (or 0.9 of the way from the worst reward to the best) is not reached. 0: never."""
    collapse_alarm: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """rl: the same event when over 20 steps `exact`, or `reward/mean` without it, has lost this share of what it had
    gained at its best. 0: never."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the trainer: adapter initialisation, dropout, the order of [data]."""
    deterministic: bool = False
    """Two runs give the same weights, bit for bit, and so does one that was killed and resumed. What that needs and
    costs: docs/deterministic.md."""

    def resolve(self) -> list[dict[str, Any]]:
        found = []
        if self.warmup_steps > self.steps > 0:
            problem = f"is larger than steps={self.steps}"
            found.append({"field": "warmup_steps", "value": self.warmup_steps, "problem": problem})
        if self.schedule != "constant":
            fill(self, {"lr_end": self.lr_end or 0.0})
        elif self.lr_end is not None:
            found.append({"field": "lr_end", "value": self.lr_end, "problem": "needs schedule = 'linear' or 'cosine'"})
        if self.learner == "simulated":
            fill(self, {"simulated_step_s": self.simulated_step_s or 0.0})
        elif self.simulated_step_s is not None:
            problem = f"needs {SIMULATED}"
            found.append({"field": "simulated_step_s", "value": self.simulated_step_s, "problem": problem})
        return found


class ResourceSpec(SpecPart):
    priority: Annotated[int, Field(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] = 0
    """Jobs of higher priority go first, and may interrupt those of lower: these go on later from where they were. The
    operator may set a lower bound than 10 for a tenant."""
    rollout_workers: Workers = 1
    """Processes that generate for the job, at most. It needs min_rollout_workers; idle ones are lent to it beyond them,
    and taken back when another job can start with them."""
    min_rollout_workers: Workers = 1
    """The job starts with this many rollout workers, and keeps them."""
    trainer_gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """0 trains on the CPU; several have a rank each, on one machine. The job gets a trainer with this many."""
    rollout_gpus: Annotated[int, Field(ge=0, le=1)] = 0
    """1: its rollout workers must have a GPU. With 0 it takes those without one first, and vLLM what its worker has."""
    gpu_memory_gb: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Each of these GPUs has so much memory at least (10^9 bytes)."""
    trainer_ranks: Annotated[int, Field(gt=0, le=64)] | None = None
    """Processes on the trainer's machine that share each batch; default: one per GPU, or one. See train.parallel."""

    def resolve(self) -> list[dict[str, Any]]:
        ranks = self.trainer_ranks or max(1, self.trainer_gpus)
        if self.trainer_gpus and ranks != self.trainer_gpus:
            problem = f"must be trainer_gpus={self.trainer_gpus}, one rank per GPU, or left out"
            return [{"field": "trainer_ranks", "value": ranks, "problem": problem}]
        if self.min_rollout_workers > self.rollout_workers:
            problem = f"is larger than rollout_workers={self.rollout_workers}"
            return [{"field": "min_rollout_workers", "value": self.min_rollout_workers, "problem": problem}]
        if self.gpu_memory_gb is not None and not self.trainer_gpus and not self.rollout_gpus:
            problem = "needs trainer_gpus or rollout_gpus: it is their memory"
            return [{"field": "gpu_memory_gb", "value": self.gpu_memory_gb, "problem": problem}]
        fill(self, {"trainer_ranks": ranks})
        return []

    @property
    def ranks(self) -> int:
        return self.trainer_ranks or 1
