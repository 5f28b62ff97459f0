"""The nouns of placement: what it sees and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentinker.services.scheduler.allowances import Used
from opentinker.shared.config import TenantLimits
from opentinker.shared.types import Pool

LEASED = (Pool.TRAINER, Pool.ROLLOUT)
NAMES = {
    Pool.TRAINER: "trainer",
    Pool.ROLLOUT: "rollout worker",
    Pool.REFERENCE: "reference-forward",
    Pool.ENV: "env worker",
}
ANYBODY = "*"
"""In the limits, a tenant that is not named."""
UNLIMITED = TenantLimits()
Counts = Mapping[Pool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What placement knows of a job that is neither paused nor over."""

    id: str
    tenant: str
    priority: int
    created: float
    needs: Counts
    """Of each pool the least that it works with."""
    most: int = 0
    """Rollout workers that it may have."""
    held: bool = False
    """It has begun: starting or running. Else it is queued."""
    since: float = 0.0
    """When it came to the queue or, of one that has begun, when it started."""
    retry_at: float = 0.0
    """After failures: no new try before."""
    lost_at: float = 0.0
    """When it last lost a worker."""
    absent: str = ""
    """What it needs beside workers of its own, and nobody runs; in words."""
    unready: str = ""
    """Why it cannot start yet whatever is free: its last workers have not let go."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease whose worker does its work."""

    worker: str
    job: str
    pool: Pool
    leaving: bool = False
    """It is being taken back, and ends what it has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Seconds; settings of the scheduler under the same names, with `queue_` before them."""

    reserve_after_s: float = 300.0
    preempt_after_s: float = 5.0
    min_run_s: float = 60.0
    gang_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    now: float
    jobs: Sequence[Job]
    free: Mapping[Pool, Sequence[str]]
    """Idle workers without a lease."""
    alive: Counts
    coming: Counts = field(default_factory=dict)
    """Workers without a lease that have not let go of their last job yet."""
    leases: Sequence[Held] = ()
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    used: Mapping[str, Used] = field(default_factory=dict)
    """By tenant, today."""
    rules: Rules = Rules()


@dataclass(frozen=True, slots=True)
class Start:
    job: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddWorker:
    job: str
    worker: str
    pool: Pool


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The worker ends what it has begun and goes."""

    job: str
    worker: str
    wanted_by: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Back to the queue, from where it goes on with its checkpoint."""

    job: str
    by: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Back to the queue: it lacks a part of what it needs, and others wait for the rest."""

    job: str
    why: str


Decision = Start | AddWorker | TakeBack | Preempt | Requeue


@dataclass(frozen=True, slots=True)
class Plan:
    decisions: list[Decision]
    waiting: dict[str, str]
    """By job, in words, what it waits for; empty for one that lacks nothing."""
