"""Matches workers to jobs by GPUs, and by the base model of trainers that jobs share: workers with the same are one
kind, and placement counts kinds. Plain memory.

The trainers of a process that jobs share are one kind, since they have its base in common. The first job in an unused
process decides on the base: what it leaves is free again when the base is known.

A worker that suits is chosen in this order: the fewest GPUs, so that what needs none goes where there are none; then
those whose GPUs NVLink joins, or that are on one NUMA node, as far as the job has ranks for them; then the least
memory, then the least room for ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from opentinker.services.scheduler.placement.types import ANY_RANKS, LEASED, NO_GPUS, Gpus, Need, PlannedJob
from opentinker.shared.runtime.gpus import nearest
from opentinker.shared.types.core import Pool
from opentinker.shared.types.workers import Gpu

ANY = Need()
NONE: frozenset[str] = frozenset()


class GpuMatcher:
    """`gpus`: of workers that have some; `shared`: see `ClusterView.shared_gpus`."""

    def __init__(self, gpus: Mapping[str, Gpus], shared: Mapping[str, frozenset[str]] | None = None) -> None:
        self.shared = shared or {}
        self.kinds = [NO_GPUS, *sorted({*gpus.values()} - {NO_GPUS}, key=_size)]
        number = {kind: n for n, kind in enumerate(self.kinds)}
        self._kind = {worker: number[kind] for worker, kind in gpus.items()}
        self.has_banks = any(kind.base is not None for kind in self.kinds)
        self._suiting: dict[Need, list[int]] = {}
        if not self.has_banks:
            self._suiting[ANY] = list(range(len(self.kinds)))

    def kind(self, worker: str) -> int:
        """Return the place of the worker's kind in `kinds`."""
        return self._kind.get(worker, 0)

    def suiting(self, job: PlannedJob, pool: Pool) -> list[int]:
        """Kinds that do for the job, the first choice first."""
        need = job.gpus.get(pool, ANY) if job.gpus else ANY
        found = self._suiting.get(need)
        if found is None:
            fine = [number for number, kind in enumerate(self.kinds) if kind.suit(need)]
            found = self._suiting[need] = sorted(fine, key=lambda number: _order(self.kinds[number], need))
        return found

    def those(self, workers: Sequence[str], job: PlannedJob, pool: Pool) -> Sequence[str]:
        """Return those of these workers of a pool that suit the job."""
        if not job.gpus and not self.has_banks:
            return workers
        if len(suiting := self.suiting(job, pool)) == len(self.kinds):
            return workers
        return [worker for worker in workers if self.kind(worker) in suiting]

    def is_group(self, job: PlannedJob, pool: Pool) -> bool:
        """Return whether the job needs several trainers that not any will do for: on GPUs that some may share, or of
        one process."""
        if pool != Pool.TRAINER or job.needs.get(pool, 0) < 2:
            return False
        need = job.gpus.get(pool, ANY)
        return need.places > 1 or bool(self.shared and need.gpus)

    def is_of_one_process(self, job: PlannedJob) -> bool:
        """Return whether the job needs several trainers of one process."""
        return self.is_group(job, Pool.TRAINER) and job.gpus[Pool.TRAINER].places > 1

    def divides_gpus(self, job: PlannedJob, pool: Pool) -> bool:
        """Return whether trainers that share a GPU count once for the job."""
        return self.is_group(job, pool) and job.gpus[pool].gpus > 0 and job.gpus[pool].places == 1

    def added(self, workers: Sequence[str], job: PlannedJob, pool: Pool, next_to: Sequence[str]) -> Sequence[str]:
        """Return those of these workers of a pool that suit the job; of a group's trainers only those that share no GPU
        with each other and with `next_to`, or that are in one process with them."""
        found = self.those(workers, job, pool)
        if not self.is_group(job, pool):
            return found
        if (places := job.gpus[pool].places) > 1:
            return self._together(found, places, next_to)
        return apart(found, self.shared, next_to)

    def _together(self, workers: Iterable[str], places: int, next_to: Sequence[str]) -> list[str]:
        """Return those in the process of `next_to`, or else in the first one with that many places, or with most."""
        found: dict[str, list[str]] = {}
        for worker in workers:
            found.setdefault(self.kinds[self.kind(worker)].bank, []).append(worker)
        if next_to:
            return found.get(self.kinds[self.kind(next_to[0])].bank, [])
        return max(found.values(), key=lambda some: min(len(some), places), default=[])

    def least_first(self, workers: Iterable[str]) -> list[str]:
        """Return the workers, those with fewer GPUs first and otherwise in the given order."""
        return sorted(workers, key=self.kind) if self._kind else list(workers)


class FreeWorkers:
    """Workers by pool and kind, each kind in the order in which they were put in."""

    def __init__(
        self, matcher: GpuMatcher, workers: Mapping[Pool, Iterable[str]], later: FreeWorkers | None = None
    ) -> None:
        """`later`: gets what is left of an unused process when some of it are taken."""
        self._matcher, self._later = matcher, later
        self._workers: dict[Pool, list[deque[str]]] = {}
        for pool in LEASED:
            if len(matcher.kinds) == 1:
                self._workers[pool] = [deque(workers.get(pool, ()))]
                continue
            self._workers[pool] = [deque() for _ in matcher.kinds]
            for worker in workers.get(pool, ()):
                self.put(pool, worker)

    def put(self, pool: Pool, worker: str) -> None:
        self._workers[pool][self._matcher.kind(worker)].append(worker)

    def count(self, job: PlannedJob, next_to: Sequence[str] = ()) -> dict[Pool, int]:
        """Count suitable workers of each pool that the job needs. `next_to`: see `take`."""
        if len(self._matcher.kinds) == 1 and not job.gpus:
            return {pool: len(self._workers[pool][0]) for pool in job.needs}
        found = {}
        for pool in job.needs:
            kinds, found[pool] = self._workers[pool], 0
            for number in self._matcher.suiting(job, pool):
                found[pool] += len(kinds[number])
            if self._matcher.is_group(job, pool):
                found[pool] = len(self.group(job, next_to))
        return found

    def take(self, job: PlannedJob, pool: Pool, most: int, next_to: Sequence[str] = ()) -> list[str]:
        """Take up to `most` suitable workers. `next_to`: trainers that will be in a group with those taken."""
        if self._matcher.is_group(job, pool):
            group = self.group(job, next_to)[:most]
            for worker in group:
                self._workers[pool][self._matcher.kind(worker)].remove(worker)
            self._close(pool, group)
            return group
        taken: list[str] = []
        for number in self._matcher.suiting(job, pool):
            there = self._workers[pool][number]
            while there and len(taken) < most:
                taken.append(there.popleft())
        self._close(pool, taken)
        return taken

    def _close(self, pool: Pool, taken: Sequence[str]) -> None:
        """Leave the rest of unused processes to the jobs of the base that it is for now."""
        if self._later is None or not self._matcher.has_banks:
            return
        for number in {self._matcher.kind(worker) for worker in taken}:
            if self._matcher.kinds[number].base == "":
                rest, self._workers[pool][number] = self._workers[pool][number], deque()
                for worker in rest:
                    self._later.put(pool, worker)

    def group(self, job: PlannedJob, next_to: Sequence[str] = ()) -> list[str]:
        """Return trainers that the job may have together and with `next_to`; none if it needs no group."""
        if not self._matcher.is_group(job, Pool.TRAINER):
            return []
        kinds = self._workers[Pool.TRAINER]
        there = [worker for number in self._matcher.suiting(job, Pool.TRAINER) for worker in kinds[number]]
        return [*self._matcher.added(there, job, Pool.TRAINER, next_to)]

    def processes(self, job: PlannedJob, *there: FreeWorkers) -> list[list[str]]:
        """Return the trainers of each process that is large enough for a job that needs several places, those with the
        most trainers in `there` first; an empty choice for another job."""
        if not self._matcher.is_of_one_process(job):
            return [[]]
        kinds, found = self._workers[Pool.TRAINER], dict[str, list[str]]()
        for number in self._matcher.suiting(job, Pool.TRAINER):
            found.setdefault(self._matcher.kinds[number].bank, []).extend(kinds[number])
        ready = {worker for workers in there for worker in workers.all(Pool.TRAINER)}
        large = [trainers for trainers in found.values() if len(trainers) >= job.needs[Pool.TRAINER]]
        return sorted(large, key=lambda trainers: -len(ready.intersection(trainers)))

    def all(self, pool: Pool) -> list[str]:
        """Return all workers, those with fewer GPUs first."""
        return [worker for kind in self._workers[pool] for worker in kind]


def apart(workers: Sequence[str], shared: Mapping[str, frozenset[str]], next_to: Sequence[str] = ()) -> list[str]:
    """Return the most workers that share no GPU with each other and with `next_to`, of the choices that begin with each
    of them and have those after it in order."""
    first = [worker for worker in workers if worker in shared]
    orders = [workers, *([one, *(other for other in workers if other != one)] for one in first)]
    return max((_apart(order, shared, next_to) for order in orders), key=len)


def _apart(workers: Sequence[str], shared: Mapping[str, frozenset[str]], next_to: Sequence[str]) -> list[str]:
    """Return the workers, in order, without those that see a GPU of one before them or of `next_to`."""
    seen = set[str]().union(*(shared.get(worker, NONE) for worker in next_to))
    found = []
    for worker in workers:
        own = shared.get(worker, NONE)
        if own.isdisjoint(seen):
            found.append(worker)
            seen |= own
    return found


def shared_gpus(gpus: Mapping[str, Sequence[Gpu]]) -> dict[str, frozenset[str]]:
    """Return which of their GPUs others of these workers see too, of those of which this holds."""
    seen = Counter(gpu.uuid for own in gpus.values() for gpu in own)
    found = {worker: frozenset(gpu.uuid for gpu in own if seen[gpu.uuid] > 1) for worker, own in gpus.items()}
    return {worker: own for worker, own in found.items() if own}


def described(found: Sequence[Gpu], ranks: int = 0, base: str | None = None, bank: str = "") -> Gpus:
    """Return a worker's GPUs in the planner's types. `ranks`: the most that it takes of a job; 0: any number. `base`,
    `bank`: see Gpus."""
    ranks = ranks or ANY_RANKS
    if not found:
        return Gpus(ranks=ranks, base=base, bank=bank)
    first, *others = order = nearest(found)
    return Gpus(
        memory=tuple(gpu.memory for gpu in order),
        linked=1 + sum(gpu.index in first.links for gpu in others),
        near=1 + sum(gpu.numa == first.numa >= 0 for gpu in others),
        ranks=ranks,
        base=base,
        bank=bank,
    )


def _size(kind: Gpus) -> tuple[int, tuple[int, ...], int, str, str]:
    return len(kind.memory), kind.memory, kind.ranks, kind.base or "", kind.bank


def _order(kind: Gpus, need: Need) -> tuple[bool, int, bool, bool, tuple[int, ...], int]:
    """Trainers whose jobs share the base already come before those that have none."""
    unused = not kind.base
    return unused, len(kind.memory), kind.linked < need.gpus, kind.near < need.gpus, kind.memory, kind.ranks
