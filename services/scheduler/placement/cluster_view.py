"""The reconcile loop's view of the cluster: live workers and leases, combined with job records for the planner. Plain
memory, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from opentinker.services.scheduler.placement.gpu_matching import FreeWorkers, GpuMatcher, apart, described, shared_gpus
from opentinker.services.scheduler.placement.quotas import Used
from opentinker.services.scheduler.placement.shared_bases import shared_bases
from opentinker.services.scheduler.placement.shortages import too_few
from opentinker.services.scheduler.placement.trainer_groups import (
    RankNeed,
    Shape,
    choose_shape,
    group_in,
    rank_need,
    shape_of,
    shared_need,
)
from opentinker.services.scheduler.placement.types import (
    GB,
    LEASED,
    NAMES,
    NO_GPUS,
    ClusterView,
    Gpus,
    Held,
    Need,
    PlannedJob,
    Rules,
    Slot,
)
from opentinker.shared.runtime.leased_worker import RELEASE_TIMEOUT_S
from opentinker.shared.spec.frozen_models import is_scored
from opentinker.shared.tenant_limits import TenantLimits
from opentinker.shared.types.core import JobRecord, JobState, Lease, Pool
from opentinker.shared.types.env_protocol import SERVED
from opentinker.shared.types.workers import WorkerInfo

MAX_RETRY_S = 60.0
"""A job that lost workers waits no longer before the next try."""
BOTH = (Pool.TRAINER, Pool.ROLLOUT)
POOLS = {"rl": BOTH, "tinker": BOTH, "inference": (Pool.ROLLOUT,), "eval": (Pool.ROLLOUT,)}
"""Pools from which a job needs its own workers, by its kind; other kinds need a trainer."""


class Overdue:
    """Workers that should be free or gone and are not. By the local monotonic clock."""

    def __init__(self, drain_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`drain_s`: of the trainers."""
        self._drain_s, self._clock = drain_s, clock
        self._since: dict[tuple[object, ...], float] = {}
        """When each was first seen holding on to its work without a lease, or with one about to leave."""

    def find(self, workers: Iterable[WorkerInfo], leases: Iterable[Lease]) -> frozenset[str]:
        now, leased = self._clock(), {lease.worker for lease in leases}
        before, self._since = self._since, {}
        found = set()
        for worker in workers:
            held, leaves = worker.id in leased, worker.status == "draining"
            if worker.pool not in LEASED or _is_idle(worker) or (held and not leaves):
                continue
            key = worker.id, worker.incarnation, worker.job, worker.epoch, held
            since = self._since[key] = before.get(key, now)
            if now - since > RELEASE_TIMEOUT_S + (self._drain_s if leaves else 0.0):
                found.add(worker.id)
        return frozenset(found)


class Cluster:
    def __init__(
        self, workers: Iterable[WorkerInfo], leases: Iterable[Lease], overdue: Collection[str] = frozenset()
    ) -> None:
        self._overdue = overdue
        """Workers that are no longer counted on."""
        self.workers = {worker.id: worker for worker in workers}
        self._leases = {lease.worker: lease for lease in leases}
        self._of_job: dict[str, dict[str, Lease]] = {}
        """The same by job and worker."""
        for lease in self._leases.values():
            self._of_job.setdefault(lease.job, {})[lease.worker] = lease

    def lease(self, worker: str) -> Lease:
        return self._leases[worker]

    def holds(self, lease: Lease) -> bool:
        return lease.worker in self._leases

    def forget(self, lease: Lease) -> None:
        self._leases.pop(lease.worker, None)
        self._of_job.get(lease.job, {}).pop(lease.worker, None)

    def alive(self, pool: Pool) -> list[WorkerInfo]:
        """Return live workers by id, without those that serve one environment of a user."""
        return [
            worker
            for _, worker in sorted(self.workers.items())
            if worker.pool == pool and not worker.detail.get("served")
        ]

    def serves(self, environment: str, tenant: str) -> bool:
        """A process that serves this environment of a user is connected."""
        found = (worker.detail for worker in self.workers.values() if worker.detail.get("served") == environment)
        return any(detail["tenant"] == tenant for detail in found)

    def leases_outside(self, jobs: set[str]) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.job not in jobs]

    def leases_of(self, job: str, pool: Pool | None = None) -> list[Lease]:
        return [lease for lease in self._of_job.get(job, {}).values() if pool in (None, lease.pool)]

    def has_left(self, lease: Lease) -> bool:
        """Return whether the worker of the lease has finished its work, or is a new process by now."""
        worker = self.workers.get(lease.worker)
        return worker is None or worker.incarnation != lease.incarnation or worker.job != lease.job

    def is_overdue(self, worker: str) -> bool:
        """Return whether the worker should have let go of its work long ago."""
        return worker in self._overdue

    def serving(self, job: str) -> bool:
        """A rollout worker of the job lives and has loaded its model."""
        return bool(self._ready(job))

    def quiet_s(self, job: str) -> float | None:
        """Return how long the job's ready rollout workers have had no request; None if none is ready."""
        return min((float(worker.detail.get("quiet_s", 0.0)) for worker in self._ready(job)), default=None)

    def _ready(self, job: str) -> list[WorkerInfo]:
        """Return the ready rollout workers that hold a lease."""
        workers = [self.workers.get(lease.worker) for lease in self.leases_of(job, Pool.ROLLOUT)]
        return [worker for worker in workers if worker is not None and worker.ready_for(job)]

    # --- for placement ------------------------------------------------------------------------------------------

    def view(
        self,
        jobs: Iterable[JobRecord],
        *,
        now: float,
        limits: Mapping[str, TenantLimits],
        used: Mapping[str, Used],
        rules: Rules,
        starting: Mapping[str, Slot] | None = None,
    ) -> ClusterView:
        """`jobs`: those that have begun or are queued. `starting`: workers that are on their way (autoscaler.py)."""
        jobs = list(jobs)
        on_their_way = {id: slot for id, slot in (starting or {}).items() if id not in self.workers}
        alive = {pool: self.alive(pool) for pool in Pool}
        new = {pool: [id for id, slot in on_their_way.items() if slot.pool == pool] for pool in LEASED}
        ours = [worker for pool in LEASED for worker in alive[pool]]
        free = {pool: [w.id for w in alive[pool] if w.id not in self._leases and _is_idle(w)] for pool in LEASED}
        counted = {pool: [w.id for w in alive[pool] if w.id not in self._overdue] for pool in LEASED}
        busy = {w.id for w in ours if w.id not in self._leases and not _is_idle(w) and w.status != "draining"}
        bases, kept = shared_bases(ours, self._leases.values(), jobs, now - rules.reserve_after_s)
        gpus = {
            w.id: described(w.gpus, w.max_ranks, bases.get(w.id), w.bank)
            for w in ours
            if w.gpus or w.max_ranks or w.bank
        }
        free[Pool.TRAINER] = [id for id in free[Pool.TRAINER] if id not in kept]
        gpus |= {id: slot.gpus for id, slot in on_their_way.items() if slot.gpus != NO_GPUS}
        winding_down = {worker.job for worker in ours if worker.job is not None}
        absent = {pool: not found for pool, found in alive.items()}
        counted_or_new = {pool: counted[pool] + new[pool] for pool in LEASED}
        shared = shared_gpus({worker.id: worker.gpus for worker in alive[Pool.TRAINER]})
        trainers = [
            _largest_first((id for id in some[Pool.TRAINER] if id not in bases), gpus)
            for some in (free, counted_or_new)
        ]
        kinds = [[gpus.get(id, NO_GPUS) for id in some] for some in trainers]
        kinds_apart = [[gpus.get(id, NO_GPUS) for id in apart(some, shared)] for some in trainers]

        def shape(job: JobRecord, need: RankNeed) -> Shape:
            found = kinds_apart if need.gpus else kinds
            return self._shape(job, need, *found, patient=now - max(job.since, job.lost_at) < rules.gang_s)

        return ClusterView(
            now=now,
            jobs=[self._job(job, now, winding_down, absent, rules, shape) for job in jobs],
            free=free,
            alive=counted_or_new,
            coming={pool: [id for id in counted[pool] if id in busy or id in kept] + new[pool] for pool in LEASED},
            gpus=gpus,
            shared_gpus=shared,
            leases=[
                Held(lease.worker, lease.job, lease.pool, bool(lease.leaves_by))
                for _, lease in sorted(self._leases.items())
                if self._is_worked_for(lease)
            ],
            limits=limits,
            used=used,
            rules=rules,
        )

    def lacks(self, job: JobRecord) -> str:
        """Describe what the job needs and no process provides."""
        view = self.view([job], now=time.time(), limits={}, used={}, rules=Rules())
        (one,), matcher = view.jobs, GpuMatcher(view.gpus, view.shared_gpus)
        alive, free = (FreeWorkers(matcher, workers).count(one) for workers in (view.alive, view.free))
        return too_few(one, alive, free, matcher)

    def _shape(
        self, job: JobRecord, need: RankNeed, free: Sequence[Gpus], alive: Sequence[Gpus], *, patient: bool
    ) -> Shape:
        """Return the shape of the job's trainer group: of the one it has, or of the next."""
        if leases := self.leases_of(job.id, Pool.TRAINER):
            group = group_in(leases)
            return shape_of(group) if group else Shape(need.ranks, 1, need.ranks)
        return choose_shape(need, free, alive, patient=patient)

    def _job(
        self,
        job: JobRecord,
        now: float,
        winding_down: set[str],
        absent: Mapping[Pool, bool],
        rules: Rules,
        shape_of_group: Callable[[JobRecord, RankNeed], Shape],
    ) -> PlannedJob:
        resources = job.spec["resources"]
        pools = POOLS.get(job.kind, (Pool.TRAINER,))
        needs, gpus, ranks = dict[Pool, int](), dict[Pool, Need](), 0
        if Pool.TRAINER in pools and (places := shared_need(job.spec)) is not None:
            needs[Pool.TRAINER], gpus[Pool.TRAINER] = places.places, places
        elif Pool.TRAINER in pools:
            need = rank_need(job.spec)
            shape = shape_of_group(job, need)
            needs[Pool.TRAINER] = shape.trainers
            if (each := need.need(shape)) is not None:
                gpus[Pool.TRAINER] = each
            ranks = 0 if (shape.ranks, shape.trainers) == (need.ranks, 1) else shape.ranks
        if Pool.ROLLOUT in pools:
            needs[Pool.ROLLOUT] = int(resources.get("min_rollout_workers", 1))
            if count := int(resources.get("rollout_gpus", 0)):
                gpus[Pool.ROLLOUT] = Need(count, int((resources.get("gpu_memory_gb") or 0.0) * GB))
        saving = job.state == JobState.QUEUED and job.id in winding_down and now - job.since < RELEASE_TIMEOUT_S
        return PlannedJob(
            id=job.id,
            tenant=job.tenant,
            priority=int(resources.get("priority", 0)),
            created=job.created,
            needs=needs,
            gpus=gpus,
            ranks=ranks,
            most=int(resources["rollout_workers"]) if Pool.ROLLOUT in needs else 0,
            held=job.state.held,
            since=job.since,
            retry_at=job.retry_at if job.retry_at - now <= MAX_RETRY_S else 0.0,  # else a clock was set back
            lost_at=job.lost_at,
            absent=", ".join(self._absent(job, absent)),
            kind=job.kind,
            idle=self._lends(job, rules.inference_lend_s),
            unready="its last workers, which save what they have" if saving else "",
        )

    def _lends(self, job: JobRecord, lend_s: float) -> bool:
        if not lend_s or job.kind != "inference" or job.state != JobState.RUNNING:
            return False
        return (self.quiet_s(job.id) or 0.0) >= lend_s

    def _absent(self, job: JobRecord, absent: Mapping[Pool, bool]) -> list[str]:
        """Env workers and reference-forward serve every job and are not leased."""
        if "environment" not in job.spec:
            return []
        name = str(job.spec["environment"]["name"])
        served = name if name.startswith(SERVED) else ""
        shared = ([] if served else [Pool.ENV]) + ([Pool.REFERENCE] if is_scored(job.spec) else [])
        found = [NAMES[pool] for pool in shared if absent[pool]]
        return found + ([f"a process that serves {served}"] if served and not self.serves(served, job.tenant) else [])

    def _is_worked_for(self, lease: Lease) -> bool:
        """Return whether a holder works for the job. A worker about to leave does not; but a trainer then saves, and a
        successor that started before it has left would fence it off and train the same steps again."""
        worker = self.workers.get(lease.worker)
        if worker is None or worker.status != "draining":
            return True
        return lease.pool == Pool.TRAINER and not self.has_left(lease) and worker.id not in self._overdue


def _is_idle(worker: WorkerInfo) -> bool:
    """Return whether the worker has released its last job."""
    return worker.job is None and worker.status == "idle"


def _largest_first(trainers: Iterable[str], gpus: Mapping[str, Gpus]) -> list[str]:
    """Sort by the memory of their GPUs."""
    return sorted(trainers, key=lambda id: gpus.get(id, NO_GPUS).memory, reverse=True)
