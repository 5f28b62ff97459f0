"""What the reconcile loop saw in one look: live workers, leases, and who is free. Plain memory, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from opentinker.shared.types import Lease, Pool, WorkerInfo


class Cluster:
    def __init__(self, workers: Iterable[WorkerInfo], leases: Iterable[Lease]) -> None:
        self.workers = {worker.id: worker for worker in workers}
        self._leases = {lease.worker: lease for lease in leases}

    def remember(self, lease: Lease) -> None:
        self._leases[lease.worker] = lease

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

    def working(self, job: str, pool: Pool) -> list[Lease]:
        """Leases of the job whose holder is not on its way out."""
        return [lease for lease in self.leases_of(job, pool) if not self._draining(lease.worker)]

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

    def free(self, pool: Pool) -> WorkerInfo | None:
        """A live worker without a lease that has let go of its last job."""
        for worker in self.alive(pool):
            if worker.id not in self._leases and worker.job is None and worker.status == "idle":
                return worker
        return None

    def _draining(self, worker: str) -> bool:
        info = self.workers.get(worker)
        return info is not None and info.status == "draining"
