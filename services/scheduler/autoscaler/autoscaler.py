"""Starts workers on demand: those that the queue lacks, within limits; failed starts are tried again later.

    launch loop   consumes jobs, heartbeats, leases and what the launcher has started; produces workers and `starting`;
                  polls every two seconds

There is no separate rule for missing workers: `planner.plan` is asked what it would do with as many more workers as may
be started, and the workers that it would give to jobs are started. So order, quotas and minima are those of the queue,
and started workers have the GPUs that a job needs.

Idle workers end by themselves. The reconcile loop counts a starting worker as coming: no job is preempted for a worker
that will be there in a moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from opentinker.services.scheduler.autoscaler.base import Launched, Launcher, LauncherFailed, names_of
from opentinker.services.scheduler.autoscaler.kubernetes import KubernetesLauncher
from opentinker.services.scheduler.autoscaler.process import ProcessLauncher
from opentinker.services.scheduler.placement import planner
from opentinker.services.scheduler.placement.cluster_view import Cluster, Overdue
from opentinker.services.scheduler.placement.gpu_matching import described
from opentinker.services.scheduler.placement.operator_limits import view_of
from opentinker.services.scheduler.placement.types import (
    LEASED,
    NO_GPUS,
    UNKNOWN,
    AddTrainers,
    AddWorker,
    ClusterView,
    Gpus,
    Slot,
    Start,
)
from opentinker.services.scheduler.placement.untrained_jobs import waits_for_source
from opentinker.shared.asyncio_tools import every_despite
from opentinker.shared.backoff import exponential_delay_s
from opentinker.shared.config import Settings
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.workers import WorkerInfo

log = structlog.get_logger()

BACKOFF_S = (5.0, 300.0)
"""First and longest pause of a pool after one that did not come up; doubled with each in a row."""


def launcher_of(settings: Settings) -> Launcher | None:
    """None: workers are started by others. Raises SpecError if what it is to start is not there."""
    match settings.launcher:
        case "process":
            return ProcessLauncher(settings)
        case "kubernetes":
            return KubernetesLauncher(settings)
    return None


def workers_to_start(view: ClusterView, room: Mapping[str, Slot]) -> list[str]:
    """Return which of the workers in `room` placement would use if they ran. Workers that are `coming` are used
    first."""

    def with_room(workers: Mapping[Pool, Sequence[str]]) -> dict[Pool, list[str]]:
        return {
            pool: [*workers.get(pool, ()), *(name for name, slot in room.items() if slot.pool == pool)]
            for pool in LEASED
        }

    free = {pool: [*view.free.get(pool, ()), *view.coming.get(pool, ())] for pool in LEASED}
    gpus = {**view.gpus, **{name: slot.gpus for name, slot in room.items() if slot.gpus != NO_GPUS}}
    planned = planner.plan(
        msgspec.structs.replace(view, free=with_room(free), alive=with_room(view.alive), coming={}, gpus=gpus)
    )
    used: set[str] = set()
    for decision in planned.decisions:
        if isinstance(decision, Start | AddTrainers):
            used.update(decision.workers)
        elif isinstance(decision, AddWorker):
            used.add(decision.worker)
    return [name for name in room if name in used]


@dataclass
class _Failures:
    """Consecutive failures of one pool."""

    count: int = 0
    again_at: float = 0.0
    """Monotonic."""


class Autoscaler:
    def __init__(self, ctx: Context, launcher: Launcher, poll_s: float = 2.0) -> None:
        self._poll_s = poll_s
        self.ctx, self.launcher = ctx, launcher
        self.starting: dict[str, Slot] = {}
        """Started workers without a heartbeat yet."""
        settings = ctx.settings
        self._most = {Pool.TRAINER: settings.launcher_trainers, Pool.ROLLOUT: settings.launcher_rollout_workers}
        self._failures = {pool: _Failures() for pool in self._most}
        self._fresh: set[str] = set()
        """Started by this process, without a heartbeat yet."""
        self._seen: dict[str, float] = {}
        """By name, when it last beat; monotonic."""
        self._known: dict[str, float] = {}
        """By name, when it was first seen or started."""
        self._ending: set[str] = set()
        self._gpus: dict[Pool, Gpus] = {}
        """GPUs of started workers by pool, those with the most memory, for launchers that do not know them in advance.
        So nothing is started for a job that no worker of the pool could serve."""
        self._overdue = Overdue(settings.drain_s)

    async def run(self) -> None:
        await every_despite(self._poll_s, self.reconcile, "launcher_failed", LauncherFailed)

    async def reconcile(self) -> None:
        """One round. Raises LauncherFailed."""
        launched = await self.launcher.running()
        workers, leases = await self.ctx.store.workers(), await self.ctx.store.leases()
        beating = {worker.id for worker in workers}
        for worker in workers:
            if worker.id in self._fresh:
                self._learn(worker)
        kept = [one for one in launched if not await self._end_if_over(one, beating)]
        self.starting.clear()
        self.starting.update((one.name, self._slot(one.pool, one.name)) for one in kept if one.name not in beating)
        cluster = Cluster(workers, leases, self._overdue.find(workers, leases))
        active = await self.ctx.store.active_jobs()
        held = {job.id for job in active if job.state.held}
        awake = [job for job in active if (job.id in held or job.state == JobState.QUEUED) and not job.asleep]
        jobs = [job for job in awake if not waits_for_source(job, held)]
        view = await view_of(self.ctx, cluster, jobs, self.starting)
        here, taken = Counter(one.pool for one in launched), beating | {one.name for one in launched}
        room: dict[str, Slot] = {}
        for pool, most in self._most.items():
            free = [name for name in names_of(self.launcher.prefix, pool, most) if name not in taken]
            room |= {name: self._slot(pool, name) for name in free[: max(0, most - here[pool])]}
        for name in workers_to_start(view, room):
            await self._start(name, room[name])

    async def _end_if_over(self, one: Launched, beating: set[str]) -> bool:
        """Return whether a worker has ended; end one that sends no heartbeats."""
        now = time.monotonic()
        known = self._known.setdefault(one.name, now)
        if one.name in beating and not one.ended:
            self._seen[one.name] = now
            if one.name in self._fresh:
                self._failures[one.pool] = _Failures()
                self._fresh.discard(one.name)
            self._ending.discard(one.name)
            return False
        silent = now - self._seen.get(one.name, known) > self.ctx.settings.launcher_start_s
        if not (one.ended or silent or one.name in self._ending):
            return False
        if one.name not in self._ending:
            why = one.ended or f"it said nothing for {self.ctx.settings.launcher_start_s:g} s"
            log.info("launched_worker_ended", launched=one.name, pool=one.pool, why=why)
            if one.name in self._fresh:
                self._fresh.discard(one.name)
                self._back_off(one.pool)
            self._ending.add(one.name)
        await self.launcher.end(one.name)
        if one.ended:
            self._ending.discard(one.name)
            self._seen.pop(one.name, None)
            self._known.pop(one.name, None)
        return True

    def _back_off(self, pool: Pool) -> None:
        failures = self._failures[pool]
        failures.count += 1
        pause_s = exponential_delay_s(failures.count, *BACKOFF_S)
        failures.again_at = time.monotonic() + pause_s
        log.warning("launched_worker_failed", pool=pool, in_a_row=failures.count, again_in_s=pause_s)

    def _learn(self, worker: WorkerInfo) -> None:
        """Learn the properties of a worker from its first heartbeat."""
        if UNKNOWN in self.launcher.gpus(worker.pool, worker.id).memory:
            has = described(worker.gpus, worker.max_ranks)
            self._gpus[worker.pool] = max(has, self._gpus.get(worker.pool, has), key=lambda gpus: gpus.memory)

    def _slot(self, pool: Pool, name: str) -> Slot:
        gpus = self.launcher.gpus(pool, name)
        return Slot(pool, self._gpus.get(pool, gpus) if UNKNOWN in gpus.memory else gpus)

    async def _start(self, name: str, slot: Slot) -> None:
        if time.monotonic() < self._failures[slot.pool].again_at:
            return
        log.info("launch", launched=name, pool=slot.pool, gpus=len(slot.gpus.memory))
        self._known[name] = time.monotonic()
        self._seen.pop(name, None)
        self._fresh.add(name)
        await self.launcher.start(slot.pool, name)
        self.starting[name] = slot
