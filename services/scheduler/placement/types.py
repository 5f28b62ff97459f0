"""Types of placement: its view of the cluster and its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from opentinker.services.scheduler.placement.quotas import Used
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import Pool

LEASED = (Pool.TRAINER, Pool.ROLLOUT)
NAMES = {
    Pool.TRAINER: "trainer",
    Pool.ROLLOUT: "rollout worker",
    Pool.REFERENCE: "shared reference-forward",
    Pool.ENV: "env worker",
}
OTHER_TENANTS = "*"
"""In the limits, a tenant that is not named."""
UNLIMITED = TenantLimits()
Counts = Mapping[Pool, int]


UNKNOWN = 1 << 60
"""Bytes of a GPU that has not told yet: enough for every job."""
ANY_RANKS = 1 << 16
"""Room of a trainer that takes any number of ranks."""
GB = 10**9


class Gpus(msgspec.Struct, frozen=True):
    """Those of one worker, in the order in which ranks take them: the first, and what is nearest to it."""

    memory: tuple[int, ...] = ()
    """Bytes of each."""
    linked: int = 1
    """How many of them NVLink joins with the first, itself counted."""
    near: int = 1
    """How many are on its NUMA node; 1 also where that is not known."""
    ranks: int = ANY_RANKS
    """Ranks of a job that the worker has room for."""
    base: str | None = None
    """Base model that its jobs share (`spec.engines.bank_of`), empty before the first of them; None: it trains one job
    alone."""
    bank: str = ""
    """Process in which it is one of several that share a base."""

    def suit(self, need: Need) -> bool:
        if (self.base is None) != (not need.base) or (self.base and self.base != need.base):
            return False
        taken = self.memory[: need.gpus]
        return need.ranks <= self.ranks and len(taken) == need.gpus and all(memory >= need.memory for memory in taken)


NO_GPUS = Gpus()


class Need(msgspec.Struct, frozen=True):
    """GPUs and room that each worker of a pool needs for a job."""

    gpus: int = 0
    memory: int = 0
    """Bytes of each."""
    ranks: int = 1
    """Ranks that it must have room for."""
    base: str = ""
    """Base model that the job shares with others; empty: it trains alone."""
    places: int = 1
    """Trainers of one process that the job needs: with a shared base, one for each policy."""


class Slot(msgspec.Struct, frozen=True):
    """A worker that was started, or could be."""

    pool: Pool
    gpus: Gpus = Gpus()


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished, unpaused job in the planner's view."""

    id: str
    tenant: str
    priority: int
    created: float
    needs: Counts
    """Minimum of each pool."""
    gpus: Mapping[Pool, Need] = {}
    """Requirements of its workers; a pool that is not named needs none."""
    ranks: int = 0
    """Ranks that its trainers share; 0: one trainer has all of its spec."""
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
    """Description of missing services that are not leased."""
    kind: str = ""
    idle: bool = False
    """An inference job without requests for `Rules.inference_lend_s`: its workers may be lent."""
    unready: str = ""
    """Reason why it cannot start yet regardless of free workers: its last workers have not released it."""


class Held(msgspec.Struct, frozen=True):
    """A lease whose worker does its work."""

    worker: str
    job: str
    pool: Pool
    leaving: bool = False
    """It is being taken back, and ends what it has begun."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; settings of the scheduler under the same names, the first four with `queue_` before them."""

    reserve_after_s: float = 300.0
    preempt_after_s: float = 5.0
    min_run_s: float = 60.0
    gang_s: float = 15.0
    inference_lend_s: float = 0.0
    """0: idle inference jobs keep their workers."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    now: float
    jobs: Sequence[PlannedJob]
    free: Mapping[Pool, Sequence[str]]
    """Idle workers without a lease."""
    alive: Mapping[Pool, Sequence[str]]
    """All workers, and those that were just started."""
    coming: Mapping[Pool, Sequence[str]] = {}
    """Workers without a lease that have not let go of their last job yet, or were just started."""
    gpus: Mapping[str, Gpus] = {}
    """GPUs of workers that have some."""
    shared_gpus: Mapping[str, frozenset[str]] = {}
    """UUIDs of GPUs that several trainers see, by trainer: the ranks of a job need a GPU each."""
    leases: Sequence[Held] = ()
    limits: Mapping[str, TenantLimits] = {}
    used: Mapping[str, Used] = {}
    """By tenant, today."""
    rules: Rules = Rules()


class Start(msgspec.Struct, frozen=True):
    job: str
    workers: tuple[str, ...]
    ranks: int = 0
    """See `PlannedJob.ranks`."""


class AddTrainers(msgspec.Struct, frozen=True):
    """All trainers of a job that has none."""

    job: str
    workers: tuple[str, ...]
    ranks: int = 0


class AddWorker(msgspec.Struct, frozen=True):
    """One rollout worker more."""

    job: str
    worker: str
    pool: Pool


class Reclaim(msgspec.Struct, frozen=True):
    """The worker ends what it has begun and goes."""

    job: str
    worker: str
    wanted_by: str


class Preempt(msgspec.Struct, frozen=True):
    """Return a job to the queue; it continues from its checkpoint."""

    job: str
    by: str


class Sleep(msgspec.Struct, frozen=True):
    """An idle inference job lends its workers: it ends what it has begun, and the next request wakes it."""

    job: str
    by: str


class Requeue(msgspec.Struct, frozen=True):
    """Back to the queue: its tenant has used up its day, or it lacks a part of what it needs and others wait for the
    rest."""

    job: str
    why: str


Decision = Start | AddTrainers | AddWorker | Reclaim | Preempt | Sleep | Requeue


class PlacementPlan(msgspec.Struct, frozen=True):
    decisions: list[Decision]
    waiting: dict[str, str]
    """By job, a description of what it waits for; empty for one that lacks nothing."""
