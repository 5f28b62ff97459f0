"""Observes workers and leases over the rounds of the reconcile loop, and tells a lost worker from a late one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentinker.services.scheduler.placement.cluster_view import Cluster, Overdue
from opentinker.shared.runtime.liveness import HeartbeatWatch
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import Lease

OUTAGE_S = 1.5
"""After a longer interval without an observation, live workers may be missing."""


class WorkerWatch:
    """`leader`: the number of this scheduler's leadership. `clock`: monotonic."""

    def __init__(self, ctx: Context, leader: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._settings, self._leader, self._clock = ctx.store, ctx.settings, leader, clock
        self._watch = HeartbeatWatch(clock)
        self._overdue = Overdue(ctx.settings.drain_s, clock)
        self._observed_at = float("-inf")
        self.absence_counts_from = 0.0
        self._ignored_since: dict[Lease, float] = {}
        """When a live worker was first seen not acting on its lease."""
        self._leaving_since: dict[Lease, float] = {}
        """When a lease was first seen being taken back."""
        self._granted: set[Lease] = set()
        """Written by us, not by a scheduler that led before."""
        self._stopping: set[Lease] = set()
        """Whose holder was told to stop."""

    async def observe(self) -> Cluster:
        """Observe the cluster. Leases are read before jobs: a lease whose job has no workers then belongs to a job that
        has ended.

        A worker whose heart stands still by our clock is removed for all schedulers.
        """
        beats, leases = await self._store.beats(), await self._store.leases()
        now = self._clock()
        if now - self._observed_at > max(self._settings.worker_ttl_s / 2, OUTAGE_S):
            # After our start, or an outage of Redis, live workers may be missing. Give them time for a heartbeat.
            self.absence_counts_from = now + self._settings.worker_ttl_s
        self._observed_at = now
        silent = self._watch.silent(beats)
        lost = {beat.id for beat in silent if await self._store.remove_dead(beat, leader=self._leader)}
        self._leaving_since = {lease: self._leaving_since.get(lease, now) for lease in leases if lease.leaves_by}
        living = [beat for beat in beats if beat.id not in lost]
        return Cluster(living, leases, self._overdue.find(living, leases))

    def grant(self, leases: Iterable[Lease]) -> None:
        self._granted.update(leases)

    def forget(self, lease: Lease) -> None:
        self._ignored_since.pop(lease, None)
        self._granted.discard(lease)
        self._stopping.discard(lease)

    def loss_counts(self, lease: Lease) -> bool:
        """Return whether we granted the lease, and its holder was not told to stop."""
        return lease in self._granted and lease not in self._stopping

    def may_revoke(self, lease: Lease, cluster: Cluster) -> bool:
        """Return whether the lease is not being taken back, or has been, or we have waited for that long enough."""
        if not lease.leaves_by or cluster.has_left(lease):
            return True
        return self._clock() - self._leaving_since.get(lease, self._clock()) > self._settings.take_back_s

    def leaving_group(self, leases: Iterable[Lease], cluster: Cluster) -> Lease | None:
        """Return the lease of a trainer that was told to stop while others depend on its ranks. The lead saves when it
        is told itself; it counts once it takes too long, since the others would wait for it without end."""
        for lease in leases:
            worker = cluster.workers.get(lease.worker)
            if len(lease.group) < 2 or worker is None or worker.status != "draining" or cluster.has_left(lease):
                continue
            if lease.group[0].worker != lease.worker or cluster.is_overdue(lease.worker):
                return lease
        return None

    def why_lost(self, lease: Lease, cluster: Cluster) -> str | None:
        """Return the reason why the holder is lost; None if it works, or may."""
        worker, now = cluster.workers.get(lease.worker), self._clock()
        if worker is None:
            return "it stopped beating" if now >= self.absence_counts_from else None
        if worker.incarnation != lease.incarnation:
            return "its process was restarted"
        if worker.status == "draining":
            self._stopping.add(lease)
        if worker.job == lease.job or worker.status == "draining":
            self._ignored_since.pop(lease, None)
            return None
        since = self._ignored_since.setdefault(lease, now)
        return "it does not act on its lease" if now - since > 3 * self._settings.worker_ttl_s else None
