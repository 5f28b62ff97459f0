"""Who gets which worker: a view of jobs, workers and leases and the time -> a list of decisions. No I/O, no clock.

`plan` is called with every look of the reconcile loop and remembers nothing. In this order:

1. Jobs that have begun and lost a part of what they need get it back (`AddWorker`), once their back-off is over. One
   that lacks a part for `gang_s`, while another waits for what it holds, goes back to the queue (`Requeue`): two halves
   of two jobs never wait for each other.
2. Queued jobs: highest priority first; among equals the tenant that holds least (its dominant share: the largest part
   of any pool that its jobs hold as their minimum, divided by its weight); of one tenant the oldest. A job starts with
   all that it needs (`Start`) or with nothing. One that cannot start never holds back the next, except:
   - what it lacks is lent to others: that much is taken back (`TakeBack`) and kept for it;
   - jobs of lower priority hold what it lacks: they are interrupted (`Preempt`), lowest priority and shortest run
     first, as few as do, and only after it waited for `preempt_after_s` and they ran for `min_run_s`. A job is never
     interrupted for one of its own priority, so no two interrupt each other in turns;
   - it waited for `reserve_after_s`: the first such job in the order above has what is free and what becomes free kept
     for it, up to its need. Small jobs that keep coming cannot starve a large one; until then they fill the gaps.
3. Rollout workers that are left over are lent to jobs that may have more than they need (`AddWorker`), to the tenant
   that holds least first, and are taken back at a group boundary when another job can start with them.

Nothing is reserved, interrupted or taken back for a job that could not start then either: its quota is used up, a pool
is too small for it, or nobody runs what is not leased (env workers, reference-forward).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentinker.services.scheduler.allowances import Used, over_quota
from opentinker.services.scheduler.placing import (
    ANYBODY,
    LEASED,
    NAMES,
    UNLIMITED,
    AddWorker,
    Counts,
    Decision,
    Job,
    Plan,
    Preempt,
    Requeue,
    Start,
    TakeBack,
    View,
)
from opentinker.shared.config import TenantLimits
from opentinker.shared.types import Pool


def plan(view: View) -> Plan:
    return _Planning(view).run()


@dataclass(slots=True)
class Promised:
    jobs: int = 0
    workers: int = 0


class _Planning:
    """One run of `plan`: what is left to give, as it goes on."""

    def __init__(self, view: View) -> None:
        self.view, self.rules = view, view.rules
        self.jobs = {job.id: job for job in view.jobs}
        self.decisions: list[Decision] = []
        self.waiting: dict[str, str] = {}
        self.free = {pool: list(view.free.get(pool, ())) for pool in LEASED}
        self.coming = Counter({pool: view.coming.get(pool, 0) for pool in LEASED})
        """Workers that will be free soon, and are nobody's yet."""
        self.kept: list[str] = []
        """Rollout workers kept for `kept_for`, which cannot start soon: they may be lent meanwhile."""
        self.kept_for = ""
        self.has: dict[str, Counter[Pool]] = {job.id: Counter() for job in view.jobs}
        self.lent: dict[str, list[str]] = {}
        """By job, the rollout workers that it could do without."""
        self.least: dict[str, Counter[Pool]] = {}
        """By tenant, the minimum of its jobs that have begun."""
        self.total: dict[str, Counter[Pool]] = {}
        """The same with what is lent to them."""
        self.running: Counter[str] = Counter()
        self.promised: defaultdict[str, Promised] = defaultdict(Promised)
        """By tenant, of its quota, for jobs of it that something is kept for."""
        rollouts: dict[str, list[str]] = {}
        for lease in view.leases:
            if lease.leaving:
                self.coming[lease.pool] += 1
            elif lease.job in self.has:
                self.has[lease.job][lease.pool] += 1
                if lease.pool == Pool.ROLLOUT:
                    rollouts.setdefault(lease.job, []).append(lease.worker)
        for job in view.jobs:
            if job.held:
                self._count(job)
                self.lent[job.id] = rollouts.get(job.id, [])[job.needs.get(Pool.ROLLOUT, 0) :]

    def run(self) -> Plan:
        self._complete()
        self._start()
        self._lend()
        return Plan(self.decisions, self.waiting)

    def _count(self, job: Job) -> None:
        """Of a job that has begun. What it needs is its own whether or not it has it at this moment."""
        self.running[job.tenant] += 1
        least = self.least.setdefault(job.tenant, Counter())
        total = self.total.setdefault(job.tenant, Counter())
        for pool, needed in job.needs.items():
            least[pool] += needed
            total[pool] += max(needed, self.has[job.id][pool])

    def _limits(self, tenant: str) -> TenantLimits:
        return self.view.limits.get(tenant) or self.view.limits.get(ANYBODY) or UNLIMITED

    def _share(self, tenant: str, held: Mapping[str, Counter[Pool]]) -> float:
        counts: Mapping[Pool, int] = held.get(tenant, {})
        parts = [count / max(1, self.view.alive.get(pool, 0)) for pool, count in counts.items()]
        return max(parts, default=0.0) / self._limits(tenant).weight

    # --- jobs that have begun ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """What they lost comes first: they hold the rest of it, and did work that others have not done yet."""
        broken = []
        for job in sorted((job for job in self.view.jobs if job.held), key=_by_rank):
            short = self._short(job)
            early = self.view.now < job.retry_at
            for pool in [] if early else list(short):
                while short[pool] and self.free[pool]:
                    self.decisions.append(AddWorker(job.id, self.free[pool].pop(0), pool))
                    self.has[job.id][pool] += 1
                    short[pool] -= 1
            short = +short
            if short:
                broken.append((job, short))
            self.waiting[job.id] = _joined(
                _lacks(short, self.view.alive, job.absent), _retry(job) if short and early else ""
            )
        for job, short in reversed(broken):  # one at a time: what it frees may be what the others lack
            if not job.lost_at or self.view.now - job.lost_at < self.rules.gang_s:
                continue  # what it lacks is on its way out, or may come back
            if other := self._wants_part_of(job, broken):
                lack = ", ".join(NAMES[pool] for pool in short)
                self.decisions.append(Requeue(job.id, f"it lacks a {lack}, and {other} waits for what it holds"))
                self.coming.update(self.has[job.id])
                self.lent.pop(job.id, None)
                break

    def _short(self, job: Job) -> Counter[Pool]:
        has = self.has[job.id]
        return Counter({pool: n - has[pool] for pool, n in job.needs.items() if n > has[pool]})

    def _wants_part_of(self, job: Job, broken: Iterable[tuple[Job, Counter[Pool]]]) -> str:
        """A job that lacks something which this one holds."""
        holds = {pool for pool, count in self.has[job.id].items() if count}
        for other, short in broken:
            if other.id != job.id and holds & set(short) and self.view.now >= other.retry_at:
                return other.id
        for other in self.view.jobs:
            lacks = not other.held and any(pool in holds and not self.free[pool] for pool in other.needs)
            if lacks and not self._blocked(other):
                return other.id
        return ""

    # --- the queue -----------------------------------------------------------------------------------------------

    def _blocked(self, job: Job) -> str:
        """Why it cannot start whatever becomes free; in words."""
        alive = self.view.alive
        small = [pool for pool, n in job.needs.items() if n > alive.get(pool, 0)]
        if small or job.absent:
            short = {p: n - len(self.free[p]) for p, n in job.needs.items() if len(self.free[p]) < n}
            few = [p for p in small if alive.get(p, 0)]
            counts = [f"{job.needs[p]} {NAMES[p]}s ({alive[p]} of them running)" for p in few]
            rest = {p: n for p, n in short.items() if p not in few}
            return _joined(_lacks(rest, alive, job.absent), *counts)
        if self.view.now < job.retry_at:
            return _retry(job)
        if job.unready:
            return job.unready
        return over_quota(
            self._limits(job.tenant),
            self.view.used.get(job.tenant, Used()),
            jobs=self.running[job.tenant] + self.promised[job.tenant].jobs,
            workers=sum(self.least.get(job.tenant, {}).values()) + self.promised[job.tenant].workers,
            more=sum(job.needs.values()),
        )

    def _start(self) -> None:
        """Tenant by tenant, as the order at the top says; a start changes its tenant's share and nobody else's."""
        queues: dict[str, list[Job]] = {}
        for job in sorted((job for job in self.view.jobs if not job.held), key=_by_rank):
            queues.setdefault(job.tenant, []).append(job)
        turns: list[tuple[int, float, float, str, int]] = []

        def take_turn(tenant: str, place: int) -> None:
            if place < len(queues[tenant]):
                job = queues[tenant][place]
                turn = (-job.priority, self._share(tenant, self.least), job.created, tenant, place)
                heapq.heappush(turns, turn)

        for tenant in queues:
            take_turn(tenant, 0)
        while turns:
            *_, tenant, place = heapq.heappop(turns)
            self._try(queues[tenant][place])
            take_turn(tenant, place + 1)

    def _try(self, job: Job) -> None:
        if why := self._blocked(job):
            self.waiting[job.id] = why
            return
        short = Counter({pool: n - len(self.free[pool]) for pool, n in job.needs.items() if n > len(self.free[pool])})
        if not short:
            chosen = tuple(self.free[pool].pop(0) for pool, n in job.needs.items() for _ in range(n))
            self._return_own(job)
            self.decisions.append(Start(job.id, chosen))
            self.has[job.id].update(job.needs)
            self._count(job)
            self.waiting[job.id] = ""
            return
        kept = f"what is free is kept for {self.kept_for}, which waits longer" if self.kept_for else ""
        self.waiting[job.id] = _joined(_lacks(short, self.view.alive), kept)
        soon = self._make_room(job, +Counter({pool: n - self.coming[pool] for pool, n in short.items()}))
        if soon or (not self.kept_for and self.view.now - job.since >= self.rules.reserve_after_s):
            self._keep(job, soon=soon)

    def _keep(self, job: Job, *, soon: bool) -> None:
        """What is free, and what comes, up to its need, is for this job and nobody behind it."""
        for pool, needed in job.needs.items():
            aside, self.free[pool] = self.free[pool][:needed], self.free[pool][needed:]
            self.coming[pool] -= min(self.coming[pool], needed - len(aside))
            if not soon and pool == Pool.ROLLOUT:
                self.kept = aside
        self.promised[job.tenant].jobs += 1
        self.promised[job.tenant].workers += sum(job.needs.values())
        if not soon:
            self.kept_for = job.id

    def _make_room(self, job: Job, short: Counter[Pool]) -> bool:
        """True if what others can do without and what jobs of lower priority hold covers what is short; then it is
        taken from them."""
        lent = [(self.jobs[holder], worker) for holder, workers in self.lent.items() for worker in workers]
        back = min(len(lent), short[Pool.ROLLOUT])
        victims = self._victims(job, +(short - Counter({Pool.ROLLOUT: back})))
        if victims is None:
            return False
        for other in victims:
            self.decisions.append(Preempt(other.id, job.id))
            self.coming.update(self.has[other.id])
            del self.lent[other.id]
        self._take_back([pair for pair in lent if pair[0] not in victims], back, job)
        return True

    def _take_back(self, lent: list[tuple[Job, str]], count: int, wanted_by: Job) -> None:
        lent.sort(key=lambda pair: (pair[0].priority, -self._share(pair[0].tenant, self.total), -pair[0].created))
        for holder, worker in lent[:count]:
            self.lent[holder.id].remove(worker)
            self.has[holder.id][Pool.ROLLOUT] -= 1
            self.total[holder.tenant][Pool.ROLLOUT] -= 1
            self.coming[Pool.ROLLOUT] += 1
            self.decisions.append(TakeBack(holder.id, worker, wanted_by.id))

    def _return_own(self, job: Job) -> None:
        """What is lent to other jobs of its tenant goes where the quota has no room for both."""
        most, held = self._limits(job.tenant).workers, sum(self.total.get(job.tenant, {}).values())
        if most is not None and held + sum(job.needs.values()) > most:
            own = [(self.jobs[id], w) for id, ws in self.lent.items() for w in ws if self.jobs[id].tenant == job.tenant]
            self._take_back(own, held + sum(job.needs.values()) - most, job)

    def _victims(self, job: Job, short: Counter[Pool]) -> list[Job] | None:
        """As few as hold, as their minimum, what is short; None if all that may be interrupted do not."""
        if not short:
            return []
        if self.view.now - job.since < self.rules.preempt_after_s:
            return None
        own = {
            other.id: self.has[other.id] - Counter({Pool.ROLLOUT: len(self.lent[other.id])})
            for other in self.view.jobs
            if other.held
            and other.priority < job.priority
            and other.id in self.lent
            and self.view.now - other.since >= self.rules.min_run_s
        }
        chosen, left = [], short.copy()
        for other in sorted((self.jobs[id] for id in own), key=lambda other: (other.priority, -other.since)):
            if any(own[other.id][pool] for pool in left):
                chosen.append(other)
                left = left - own[other.id]
        if left:
            return None
        for other in list(chosen):  # of those that came first some may not be needed any more
            rest = [one for one in chosen if one is not other]
            if all(sum(own[one.id][pool] for one in rest) >= n for pool, n in short.items()):
                chosen = rest
        return chosen

    # --- what is left over ---------------------------------------------------------------------------------------

    def _lend(self) -> None:
        gone = {decision.job for decision in self.decisions if isinstance(decision, Preempt | Requeue | TakeBack)}
        may = [
            job
            for job in self.view.jobs
            if (job.held or self.has[job.id]) and job.most and job.id not in gone and not self._short(job)
        ]
        for worker in self.free[Pool.ROLLOUT] + self.kept:
            room = [job for job in may if self.has[job.id][Pool.ROLLOUT] < job.most and self._may_have_more(job)]
            if not room:
                return
            job = min(room, key=self._lending_order)
            self.decisions.append(AddWorker(job.id, worker, Pool.ROLLOUT))
            self.has[job.id][Pool.ROLLOUT] += 1
            self.total[job.tenant][Pool.ROLLOUT] += 1

    def _lending_order(self, job: Job) -> tuple[int, float, int, float]:
        return -job.priority, self._share(job.tenant, self.total), self.has[job.id][Pool.ROLLOUT], job.created

    def _may_have_more(self, job: Job) -> bool:
        most = self._limits(job.tenant).workers
        return most is None or sum(self.total[job.tenant].values()) < most


def _by_rank(job: Job) -> tuple[int, float, str]:
    return -job.priority, job.created, job.id


def _lacks(short: Mapping[Pool, int], alive: Counts, absent: str = "") -> str:
    """`a free trainer; rollout worker, env worker (none is running)`"""
    busy = [
        f"a free {NAMES[pool]}" if n == 1 else f"{n} more free {NAMES[pool]}s"
        for pool, n in short.items()
        if alive.get(pool, 0)
    ]
    none = ", ".join([NAMES[pool] for pool in short if not alive.get(pool, 0)] + ([absent] if absent else []))
    return "; ".join(busy + ([f"{none} (none is running)"] if none else []))


def _retry(job: Job) -> str:
    return f"another try at {time.strftime('%H:%M:%S', time.gmtime(job.retry_at))} UTC, after its last failure"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
