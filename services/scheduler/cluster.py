"""What the reconcile loop saw in one look: live workers and leases; and what placement makes of it and of job records.
Plain memory, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from opentinker.services.scheduler.allowances import Used
from opentinker.services.scheduler.placing import LEASED, NAMES, Held, Job, Rules, View
from opentinker.shared.config import TenantLimits
from opentinker.shared.sessions import SERVED
from opentinker.shared.spec.frozen import is_scored
from opentinker.shared.types import JobRecord, JobState, Lease, Pool, WorkerInfo

LET_GO_S = 120.0
"""A job that came back to the queue waits so long for its last workers, which save what they have. After that they are
fenced off."""
POOLS = {"rl": (Pool.TRAINER, Pool.ROLLOUT), "inference": (Pool.ROLLOUT,), "eval": (Pool.ROLLOUT,)}
"""Of which a job needs workers of its own, by its kind; the others need a trainer."""


class Cluster:
    def __init__(self, workers: Iterable[WorkerInfo], leases: Iterable[Lease]) -> None:
        self.workers = {worker.id: worker for worker in workers}
        self._leases = {lease.worker: lease for lease in leases}

    def lease(self, worker: str) -> Lease:
        return self._leases[worker]

    def forget(self, lease: Lease) -> None:
        self._leases.pop(lease.worker, None)

    def alive(self, pool: Pool) -> list[WorkerInfo]:
        """By id; without those that serve one environment of a user."""
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
        return [lease for lease in self._leases.values() if lease.job == job and pool in (None, lease.pool)]

    def has_left(self, lease: Lease) -> bool:
        """Its worker has ended what it had begun, or is another process by now."""
        worker = self.workers.get(lease.worker)
        return worker is None or worker.incarnation != lease.incarnation or worker.job != lease.job

    def serving(self, job: str) -> bool:
        """A rollout worker of the job lives and has loaded its model."""
        return bool(self._ready(job))

    def quiet_s(self, job: str) -> float | None:
        """How long nobody has asked any of the job's ready rollout workers anything; None if none is ready."""
        return min((float(worker.detail.get("quiet_s", 0.0)) for worker in self._ready(job)), default=None)

    def _ready(self, job: str) -> list[WorkerInfo]:
        """Of those that hold a lease."""
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
        starting: Mapping[Pool, int] | None = None,
    ) -> View:
        """`jobs`: those that have begun or are queued. `starting`: workers that are on their way (launching.py)."""
        on_their_way = Counter(starting or {})
        alive = {pool: self.alive(pool) for pool in Pool}
        ours = [worker for pool in LEASED for worker in alive[pool]]
        free = {pool: [w.id for w in alive[pool] if w.id not in self._leases and _is_idle(w)] for pool in LEASED}
        busy = [w for w in ours if w.id not in self._leases and not _is_idle(w) and w.status != "draining"]
        winding_down = {worker.job for worker in ours if worker.job is not None}
        absent = {pool: not found for pool, found in alive.items()}
        return View(
            now=now,
            jobs=[self._job(job, now, winding_down, absent) for job in jobs],
            free=free,
            alive={pool: len(alive[pool]) + on_their_way[pool] for pool in LEASED},
            coming=Counter(worker.pool for worker in busy) + on_their_way,
            leases=[
                Held(lease.worker, lease.job, lease.pool, bool(lease.leaves_by))
                for _, lease in sorted(self._leases.items())
                if not self._draining(lease.worker)
            ],
            limits=limits,
            used=used,
            rules=rules,
        )

    def _job(self, job: JobRecord, now: float, winding_down: set[str], absent: Mapping[Pool, bool]) -> Job:
        resources = job.spec["resources"]
        pools = POOLS.get(job.kind, (Pool.TRAINER,))
        least = {Pool.TRAINER: 1, Pool.ROLLOUT: int(resources.get("min_rollout_workers", 1))}
        saving = job.state == JobState.QUEUED and job.id in winding_down and now - job.since < LET_GO_S
        return Job(
            id=job.id,
            tenant=job.tenant,
            priority=int(resources.get("priority", 0)),
            created=job.created,
            needs={pool: least[pool] for pool in pools},
            most=int(resources["rollout_workers"]) if Pool.ROLLOUT in pools else 0,
            held=job.state.held,
            since=job.since,
            retry_at=job.retry_at,
            lost_at=job.lost_at,
            absent=", ".join(self._absent(job, absent)),
            unready="its last workers, which save what they have" if saving else "",
        )

    def _absent(self, job: JobRecord, absent: Mapping[Pool, bool]) -> list[str]:
        """Env workers and reference-forward serve every job and are not leased."""
        if "environment" not in job.spec:
            return []
        name = str(job.spec["environment"]["name"])
        served = name if name.startswith(SERVED) else ""
        shared = ([] if served else [Pool.ENV]) + ([Pool.REFERENCE] if is_scored(job.spec) else [])
        found = [NAMES[pool] for pool in shared if absent[pool]]
        return found + ([f"whoever serves {served}"] if served and not self.serves(served, job.tenant) else [])

    def _draining(self, worker: str) -> bool:
        info = self.workers.get(worker)
        return info is not None and info.status == "draining"


def _is_idle(worker: WorkerInfo) -> bool:
    """It has let go of its last job."""
    return worker.job is None and worker.status == "idle"
