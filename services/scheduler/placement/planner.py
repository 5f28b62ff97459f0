"""Assigns workers to jobs: a view of jobs, workers and leases and the time -> a list of decisions. No I/O, no clock.
`reconciler.py` carries the decisions out.

`plan` is called in every round of the reconcile loop and remembers nothing. In this order:

0. Jobs whose tenants have used up their day go back to the queue (`Requeue`), where they wait for the next one.
1. Jobs that have begun and lost a part of what they need get it back (`AddWorker`; `AddTrainers`: all trainers that
   share its ranks, or none), once their back-off is over. One that lacks a part for `gang_s`, while another waits for
   what it holds, goes back to the queue (`Requeue`): two halves of two jobs never wait for each other.
2. Queued jobs: highest priority first; among equals the tenant that holds least (its dominant share: the largest part
   of any pool that its jobs hold as their minimum, divided by its weight); of one tenant the oldest. A job starts with
   all that it needs (`Start`) or with nothing. One that cannot start never holds back the next, except:
   - what it lacks is lent to others: that much is taken back (`Reclaim`) and kept for it;
   - jobs of lower priority hold what it lacks: they are interrupted (`Preempt`), lowest priority and shortest run
     first, as few as do, and only after it waited for `preempt_after_s` and they ran for `min_run_s`. A job is never
     interrupted for one of the same priority, so no two interrupt each other in turns; but idle inference jobs of the
     same priority lend it their workers before another job is interrupted (`Sleep`);
   - it waited for `reserve_after_s`: the first such job in the order above has what is free and what becomes free kept
     for it, up to its need. Small jobs that keep coming cannot starve a large one; until then they fill the gaps. One
     behind it that may interrupt others has of this what it could interrupt them for, as far as who waits longer can
     interrupt them instead when its time comes.
3. Rollout workers that are left over are lent to jobs that may have more than they need (`AddWorker`), to the tenant
   that holds least first, and are taken back at a group boundary when another job can start with them.

A worker suits a job if it has the GPUs that the job needs (gpu_matching.py): only such workers are counted, assigned,
kept or taken back for it. A job that needs no GPUs takes workers without GPUs first.

Nothing is reserved, preempted or reclaimed for a job that could not start even then: its quota is used up, a pool is
too small for it, or an unleased service (env workers, reference-forward) is missing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from opentinker.services.scheduler.placement.gpu_matching import FreeWorkers, GpuMatcher
from opentinker.services.scheduler.placement.lending import lend
from opentinker.services.scheduler.placement.planner_state import Reservation, RunningJob, TenantState, Turn, with_end
from opentinker.services.scheduler.placement.preemption import Preemption
from opentinker.services.scheduler.placement.quotas import Used, used_up
from opentinker.services.scheduler.placement.shortages import (
    NOT_KEPT,
    HolderTexts,
    called,
    in_words,
    joined,
    missing,
    named,
    next_try,
    too_few,
)
from opentinker.services.scheduler.placement.types import (
    LEASED,
    OTHER_TENANTS,
    UNLIMITED,
    ClusterView,
    Counts,
    Decision,
    Need,
    PlacementPlan,
    PlannedJob,
    Preempt,
    Reclaim,
    Requeue,
    Sleep,
    Start,
)
from opentinker.shared.types.core import Pool


def plan(view: ClusterView) -> PlacementPlan:
    return _Planning(view).run()


_Lack = tuple[tuple[Pool, Need | None], ...]
"""Pools of which too few workers are free, and what is needed of them."""


class _Planning:
    """One run of `plan`: the remaining workers change as decisions are made."""

    def __init__(self, view: ClusterView) -> None:
        self.view, self.rules, self.now = view, view.rules, view.now
        self.decisions: list[Decision] = []
        self.waiting: dict[str, str] = {}
        self.matcher = matcher = GpuMatcher(view.gpus, view.shared_gpus)
        self.size = {pool: len(view.alive.get(pool, ())) for pool in LEASED}
        self.coming = FreeWorkers(matcher, view.coming)
        """Workers that will be free soon and are not assigned."""
        self.alive = FreeWorkers(matcher, view.alive)
        self.free = FreeWorkers(matcher, view.free, later=self.coming)
        self.reserve: Reservation | None = None
        self.tenants: dict[str, TenantState] = {}
        self.begun: dict[str, RunningJob] = {}
        """By rank."""
        for job in sorted(view.jobs, key=lambda job: (-job.priority, job.created, job.id)):
            tenant = self._tenant(job.tenant)
            if job.held:
                self.begun[job.id] = RunningJob(job, tenant)
            else:
                tenant.queue.append(job)
        self._count_leases()
        for one in self.begun.values():
            self._count(one)
        self.turns: list[Turn] = []
        """A heap; outdated turns are skipped."""
        self.lenders = [one for one in self.begun.values() if one.lent]
        """Jobs with workers that they could do without."""
        self.holders = HolderTexts(self.begun, matcher, self.rules.inference_lend_s)

    def run(self) -> PlacementPlan:
        self._stop_used_up()
        self._complete()
        self._start()
        self._lend()
        return PlacementPlan(self.decisions, self.waiting)

    def _count_leases(self) -> None:
        for lease in self.view.leases:
            if lease.leaving:
                self.coming.put(lease.pool, lease.worker)
            elif one := self.begun.get(lease.job):
                one.has[lease.pool] += 1
                one.own[lease.pool].append(lease.worker)
        for one in self.begun.values():
            least = one.job.needs.get(Pool.ROLLOUT, 0)
            if one.has[Pool.ROLLOUT] > least:
                found = self.matcher.least_first(one.own[Pool.ROLLOUT])
                one.own[Pool.ROLLOUT], one.lent = found[:least], found[least:]

    def _tenant(self, id: str) -> TenantState:
        if id not in self.tenants:
            limits = self.view.limits.get(id) or self.view.limits.get(OTHER_TENANTS) or UNLIMITED
            self.tenants[id] = TenantState(id, limits, self.view.used.get(id) or Used(), self.size)
        return self.tenants[id]

    def _count(self, one: RunningJob, sign: int = 1) -> None:
        """Add or remove a running job's usage; its minimum counts even while workers are missing."""
        tenant = one.tenant
        tenant.running += sign
        for pool, needed in one.job.needs.items():
            tenant.least[pool] += sign * needed
            tenant.total[pool] += sign * max(needed, one.has[pool])
        tenant.share = tenant.share_of(tenant.least)

    # --- jobs that have begun ------------------------------------------------------------------------------------

    def _stop_used_up(self) -> None:
        """Stop jobs of tenants that have used up their daily quota; they continue tomorrow from the checkpoints that
        they save now."""
        for one in self.begun.values():
            if why := used_up(one.tenant.limits, one.tenant.used):
                self.decisions.append(Requeue(one.job.id, why))
                self.waiting[one.job.id] = why
                self._requeue(one)
        self.lenders = [one for one in self.lenders if not one.requeued]

    def _complete(self) -> None:
        """Replace lost workers first: these jobs hold the others and have work that waiting jobs have not done yet."""
        broken = []
        for one in self.begun.values():
            if one.requeued:
                continue
            job, short = one.job, missing(one.job.needs, one.has)
            early = self.now < job.retry_at
            if short and not early:
                self.decisions += one.replace_lost(short, self.free)
                short = missing(job.needs, one.has)
            if short:
                broken.append((one, short))
            if short or job.absent:
                again = next_try(job) if short and early else ""
                self.waiting[job.id] = joined(self._lack(job, short), again)
            else:
                self.waiting[job.id] = ""
        # Lost workers may return, or leave soon: only now check who waits.
        long = [(one, short) for one, short in broken if self._lacks_long(one.job)]
        queued = self._short_of() if long else {}
        for one, short in reversed(long):  # one at a time: what it frees may be what the others lack
            job = one.job
            if other := self._job_in_need_of(one, broken, queued):
                lack = ", ".join(called(pool, job.gpus.get(pool)) for pool in short)
                who = named(other, job.tenant)
                self.decisions.append(Requeue(job.id, f"it lacks a {lack}, and {who} waits for what it holds"))
                self._requeue(one)
                break

    def _requeue(self, one: RunningJob) -> None:
        """Back to the queue; what it has becomes free, and its tenant has less."""
        for pool in LEASED:
            for worker in one.holds(pool):
                self.coming.put(pool, worker)
        one.requeued, one.lent = True, []
        self._count(one, -1)
        self._line_up(one.tenant)

    def _lacks_long(self, job: PlannedJob) -> bool:
        return bool(job.lost_at) and self.now - job.lost_at >= self.rules.gang_s

    def _short_of(self) -> dict[_Lack, PlannedJob]:
        """Return, by missing pools and needs, the first queued job that could start otherwise. Computed once a plan,
        however many jobs lack workers."""
        found: dict[_Lack, PlannedJob] = {}
        for job in self.view.jobs:
            if not job.held:
                lack = tuple((pool, job.gpus.get(pool)) for pool in missing(job.needs, self.free.count(job)))
                if lack and lack not in found and not self._is_blocked(job, self._tenant(job.tenant)):
                    found[lack] = job
        return found

    def _job_in_need_of(
        self, one: RunningJob, broken: Iterable[tuple[RunningJob, Counts]], queued: Mapping[_Lack, PlannedJob]
    ) -> PlannedJob | None:
        """A job that lacks something which this one holds."""

        def holds(pool: Pool, other: PlannedJob) -> bool:
            return bool(self.matcher.those(one.holds(pool), other, pool))

        for other, short in broken:
            if other is not one and self.now >= other.job.retry_at and any(holds(pool, other.job) for pool in short):
                return other.job
        return next((job for lack, job in queued.items() if any(holds(pool, job) for pool, _ in lack)), None)

    # --- the queue -----------------------------------------------------------------------------------------------

    def _alive(self, job: PlannedJob) -> Counts:
        """Return the number of suitable workers, free or not."""
        return self.alive.count(job) if job.gpus or self.matcher.has_banks else self.size

    def _blocked(self, job: PlannedJob, tenant: TenantState) -> str:
        """Describe why the job cannot start regardless of free workers."""
        alive = self._alive(job)
        if job.absent or missing(job.needs, alive):
            return too_few(job, alive, self.free.count(job), self.matcher)
        if self.now < job.retry_at:
            return next_try(job)
        return job.unready or tenant.over_quota(job)

    def _is_blocked(self, job: PlannedJob, tenant: TenantState) -> bool:
        """The same without words, which take their time."""
        late = self.now >= job.retry_at
        return not late or bool(
            job.absent or job.unready or missing(job.needs, self._alive(job)) or tenant.over_quota(job)
        )

    def _start(self) -> None:
        """Tenant by tenant, as the order at the top says: of each, the first job that had no turn yet."""
        self.preemption = Preemption(self.begun.values(), self.matcher, self.rules, self.now)
        for tenant in self.tenants.values():
            self._line_up(tenant)
        while self.turns:
            turn = heapq.heappop(self.turns)
            tenant = self.tenants[turn[-1]]
            if turn == tenant.next_turn():
                job = tenant.queue[tenant.tried]
                tenant.tried += 1
                self._try_to_start(job, tenant)
                self._line_up(tenant)

    def _line_up(self, tenant: TenantState) -> None:
        """Again when its share has changed."""
        if turn := tenant.next_turn():
            heapq.heappush(self.turns, turn)

    def _try_to_start(self, job: PlannedJob, tenant: TenantState) -> None:
        if why := self._blocked(job, tenant):
            self.waiting[job.id] = why
            return
        short = missing(job.needs, self.free.count(job))
        if not short:
            self._begin(job, tenant)
            return
        other = self.reserve and named(self.reserve.job, job.tenant)
        kept = f"what is free is kept for {other}, which waits longer" if other else ""
        self.waiting[job.id] = joined(self._lack(job, short), kept)
        processes = self.alive.processes(job, self.free, self.coming)
        soon = next((one for one in processes if self._make_room(job, one)), None)
        if soon is not None and not missing(job.needs, self.free.count(job)):
            self._begin(job, tenant)
        elif soon is not None:
            self._reserve(job, tenant, soon, soon=True)
        elif not self.reserve and self.now - job.since >= self.rules.reserve_after_s:
            if lasting := with_end(processes, self.begun.values(), job):
                self._reserve(job, tenant, lasting[0], soon=False)
            else:
                self.waiting[job.id] = joined(self.waiting[job.id], NOT_KEPT)

    def _lack(self, job: PlannedJob, short: Counts) -> str:
        """Describe missing workers and their holders."""
        holders = {pool: self.holders.of(job, pool) for pool in short}
        return in_words(dict(short), self._alive(job), job.absent, job.gpus, holders)

    def _begin(self, job: PlannedJob, tenant: TenantState) -> None:
        chosen = tuple(worker for pool, n in job.needs.items() for worker in self.free.take(job, pool, n))
        self._return_own(job, tenant)
        self.decisions.append(Start(job.id, chosen, job.ranks))
        self.begun[job.id] = one = RunningJob(job, tenant)
        one.has.update(job.needs)
        self._count(one)
        self.waiting[job.id] = ""

    def _reserve(self, job: PlannedJob, tenant: TenantState, process: Sequence[str], *, soon: bool) -> None:
        """Keep free and coming workers, for this job and none behind it. `process`: see `FreeWorkers.processes`."""
        reserve = Reservation(job)
        for pool, needed in job.needs.items():
            reserve.free[pool] = self.free.take(job, pool, needed, process)
            rest = needed - len(reserve.free[pool])
            reserve.coming[pool] = self.coming.take(job, pool, rest, process or reserve.free[pool])
            rest -= len(reserve.coming[pool])
            if not soon and pool == Pool.ROLLOUT:
                lent = [worker for one in self.lenders for worker in self._spared(one, job)]
                reserve.owed = self.matcher.least_first(lent)[:rest]
                rest -= len(reserve.owed)
            reserve.lacks[pool] = rest
        tenant.promised_jobs += 1
        tenant.promised_workers += sum(job.needs.values())
        if not soon:
            self.reserve = reserve

    def _make_room(self, job: PlannedJob, process: Sequence[str]) -> bool:
        """Cover what is short with what others can do without and what jobs of lower priority hold, and take it from
        them. Return whether that was enough; otherwise nothing is taken. `process`: see `FreeWorkers.processes`."""
        there = process or self.free.group(job)
        short = missing(missing(job.needs, self.free.count(job, process)), self.coming.count(job, there))
        group = process or [*there, *self.coming.group(job, there)]
        back = 0
        if Pool.ROLLOUT in short:
            lent = sum(len(self._spared(one, job)) for one in self.lenders)
            back = min(lent, short[Pool.ROLLOUT])
        left = missing(short, {Pool.TRAINER: 0, Pool.ROLLOUT: back})
        victims = self.preemption.victims(job, left, self.reserve, group)
        if victims is None:
            return False
        if victims and self.reserve:
            released = self.preemption.released(self.reserve, job, left, group)
            rest = missing(left, {pool: len(workers) for pool, workers in released.items()})
            victims = self.preemption.victims(job, rest, self.reserve, [*group, *released[Pool.TRAINER]])
            if victims is None:  # what they hold shares GPUs with what is released
                return False
            back += self.reserve.release(released, self.free, self.coming)
        for other in victims:
            self.decisions.append((Sleep if other.job.idle else Preempt)(other.job.id, job.id))
            if other.job.idle:
                del self.waiting[other.job.id]  # reconciler.py says what a job that sleeps waits for
            self._requeue(other)
            self.preemption.remove(other)
        if back:
            self._take_back(self.lenders, back, job)
        return True

    def _spared(self, one: RunningJob, job: PlannedJob) -> Sequence[str]:
        """Return workers that this job can spare and that are not owed to another that has waited longer."""
        owed = self.reserve.owed if self.reserve else ()
        return [worker for worker in self.matcher.those(one.lent, job, Pool.ROLLOUT) if worker not in owed]

    def _take_back(
        self, lenders: Iterable[RunningJob], count: int, wanted_by: PlannedJob, *, any_worker: bool = False
    ) -> None:
        """Take back up to `count` lent workers: from the lowest priority first, then the tenant that has most, then the
        youngest job. `any_worker`: also those that do not suit the job that wants them."""
        lenders = sorted(lenders, key=lambda one: (one.job.priority, -one.tenant.total_share, -one.job.created))
        lent = [
            (one, worker) for one in lenders for worker in (one.lent if any_worker else self._spared(one, wanted_by))
        ]
        for holder, worker in lent[:count]:
            holder.lent.remove(worker)
            holder.has[Pool.ROLLOUT] -= 1
            holder.tenant.total[Pool.ROLLOUT] -= 1
            self.coming.put(Pool.ROLLOUT, worker)
            self.decisions.append(Reclaim(holder.job.id, worker, wanted_by.id))

    def _return_own(self, job: PlannedJob, tenant: TenantState) -> None:
        """Reclaim workers lent to other jobs of its tenant if the quota has no room for both."""
        most, wanted = tenant.limits.workers, sum(tenant.total.values()) + sum(job.needs.values())
        if most is not None and wanted > most:
            own = [one for one in self.lenders if one.tenant is tenant]
            self._take_back(own, wanted - most, job, any_worker=True)

    # --- what is left over ---------------------------------------------------------------------------------------

    def _lend(self) -> None:
        kept = self.reserve.free[Pool.ROLLOUT] if self.reserve else []
        left_over = self.matcher.least_first([*self.free.all(Pool.ROLLOUT), *kept])
        if not left_over:
            return
        gave = {
            decision.job for decision in self.decisions if isinstance(decision, Preempt | Sleep | Requeue | Reclaim)
        }
        borrowers = [
            one
            for one in self.begun.values()
            if one.job.most and one.job.id not in gave and not missing(one.job.needs, one.has)
        ]
        self.decisions.extend(lend(borrowers, left_over, self.matcher))
