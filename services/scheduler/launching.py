"""Workers on demand: what the queue lacks is started, within limits; what failed to start is tried again later.

    launch loop   consumes jobs, heartbeats, leases and what the launcher has started; produces workers and `starting`;
                  looks every two seconds

What is lacking is no rule of its own: `placement.plan` is asked what it would do with as many workers more as may be
started, and what it would give to jobs is what is started. So order, quotas and minima are those of the queue.

Idle workers end by themselves. While one is on its way the reconcile loop counts it as coming: nobody is interrupted
for what will be there in a moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from opentinker.services.scheduler import placement
from opentinker.services.scheduler.cluster import Cluster
from opentinker.services.scheduler.launch_kubernetes import KubernetesLauncher
from opentinker.services.scheduler.launch_process import ProcessLauncher
from opentinker.services.scheduler.launcher import Launched, Launcher, LauncherFailed
from opentinker.services.scheduler.placing import LEASED, AddWorker, Counts, Start, View
from opentinker.services.scheduler.reconcile import rules_of, used_today
from opentinker.shared.config import Settings
from opentinker.shared.service import Context
from opentinker.shared.types import JobRecord, JobState, Pool
from opentinker.shared.waiting import rest

log = structlog.get_logger()

LOOK_S = 2.0
PAUSE_S = (5.0, 300.0)
"""First and longest pause of a pool after one that did not come up; doubled with each in a row."""


def launcher_of(settings: Settings) -> Launcher | None:
    """None: workers are started by others. Raises SpecError if what it is to start is not there."""
    match settings.launcher:
        case "process":
            return ProcessLauncher(settings)
        case "kubernetes":
            return KubernetesLauncher(settings)
    return None


def lacking(view: View, room: Counts) -> Counter[Pool]:
    """How many more workers of each pool jobs would get if so many more were free. What is `coming` goes first."""
    more = {pool: [f"{pool} {n}" for n in range(room.get(pool, 0) + view.coming.get(pool, 0))] for pool in LEASED}
    there = {pool: [*view.free.get(pool, ()), *more[pool]] for pool in LEASED}
    alive = {pool: view.alive.get(pool, 0) + room.get(pool, 0) for pool in LEASED}
    planned = placement.plan(replace(view, free=there, alive=alive, coming={}))
    used: set[str] = set()
    for decision in planned.decisions:
        if isinstance(decision, Start):
            used.update(decision.workers)
        elif isinstance(decision, AddWorker):
            used.add(decision.worker)
    return +Counter({pool: len(used.intersection(more[pool])) - view.coming.get(pool, 0) for pool in LEASED})


@dataclass
class _Failures:
    """Of one pool, in a row."""

    count: int = 0
    again_at: float = 0.0
    """Monotonic."""


class Launching:
    def __init__(self, ctx: Context, launcher: Launcher) -> None:
        self.ctx, self.launcher = ctx, launcher
        self.starting: Counter[Pool] = Counter()
        """Started, and not beating yet."""
        settings = ctx.settings
        self._most = {Pool.TRAINER: settings.launcher_trainers, Pool.ROLLOUT: settings.launcher_rollout_workers}
        self._failures = {pool: _Failures() for pool in self._most}
        self._fresh: set[str] = set()
        """Started in this life of the scheduler, and not heard of yet."""
        self._seen: dict[str, float] = {}
        """By name, when it last beat; monotonic."""
        self._known: dict[str, float] = {}
        """By name, when it was first seen or started."""
        self._ending: set[str] = set()

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except LauncherFailed as error:
                log.warning("launcher_failed", error=str(error))
            await rest(LOOK_S)

    async def look(self) -> None:
        """Once over everything. Raises LauncherFailed."""
        launched = await self.launcher.running()
        workers, leases = await self.ctx.store.workers(), await self.ctx.store.leases()
        beating = {worker.id for worker in workers}
        kept = [one for one in launched if not await self._over(one, beating)]
        self.starting.clear()
        self.starting.update(one.pool for one in kept if one.name not in beating)
        cluster = Cluster(workers, leases)
        jobs = [job for job in await self.ctx.store.active_jobs() if _wants_workers(job)]
        view = cluster.view(
            jobs,
            now=time.time(),
            limits=self.ctx.settings.tenants,
            used=await used_today(self.ctx, {job.tenant for job in jobs}),
            rules=rules_of(self.ctx.settings),
            starting=self.starting,
        )
        here = Counter(one.pool for one in launched)
        room = {pool: max(0, most - here[pool]) for pool, most in self._most.items()}
        taken = beating | {one.name for one in launched}
        for pool, count in lacking(view, room).items():
            await self._start(pool, count, taken)

    async def _over(self, one: Launched, beating: set[str]) -> bool:
        """It has ended, or is ended because it says nothing."""
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
            log.info("launched_worker_over", launched=one.name, pool=one.pool, why=why)
            if one.name in self._fresh:
                self._fresh.discard(one.name)
                self._failed(one.pool)
            self._ending.add(one.name)
        await self.launcher.end(one.name)
        if one.ended:
            self._ending.discard(one.name)
            self._seen.pop(one.name, None)
            self._known.pop(one.name, None)
        return True

    def _failed(self, pool: Pool) -> None:
        failures = self._failures[pool]
        pause_s = min(PAUSE_S[1], PAUSE_S[0] * 2**failures.count)
        failures.count += 1
        failures.again_at = time.monotonic() + pause_s
        log.warning("launched_worker_failed", pool=pool, in_a_row=failures.count, again_in_s=pause_s)

    async def _start(self, pool: Pool, count: int, taken: set[str]) -> None:
        if time.monotonic() < self._failures[pool].again_at:
            return
        for name in _names(self.launcher.prefix, pool, self._most[pool], taken)[:count]:
            log.info("launch", launched=name, pool=pool)
            self._known[name] = time.monotonic()
            self._seen.pop(name, None)
            self._fresh.add(name)
            await self.launcher.start(pool, name)
            self.starting[pool] += 1


def _wants_workers(job: JobRecord) -> bool:
    return (job.state.held or job.state == JobState.QUEUED) and not job.asleep


def _names(prefix: str, pool: Pool, most: int, taken: set[str]) -> Sequence[str]:
    """Free slots."""
    names = (f"{prefix}-{pool}-{n}" for n in range(most))
    return [name for name in names if name not in taken]


def on_their_way(launching: Launching | None) -> Mapping[Pool, int]:
    return {} if launching is None else launching.starting
