"""How many trainers share the ranks of a job: as few as have room for them. Plain memory, no I/O.

The ranks are divided evenly, so any trainers with room for the largest share will do, and the planner counts them like
other workers: a group starts with all its trainers, in one act, or with none, so no two groups wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentinker.services.scheduler.placement.types import GB, Gpus, Need
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.types.core import Lease
from opentinker.shared.types.trainer_group import RankShare
from opentinker.shared.types.workers import WorkerInfo


class Shape(NamedTuple):
    """`ranks` on `trainers`, at most `share` on each."""

    ranks: int
    trainers: int
    share: int


class RankNeed(NamedTuple):
    """Ranks and GPUs that a spec asks for."""

    ranks: int
    least: int
    """Ranks with which the job starts or continues if there is no room for all."""
    whole: bool
    """All ranks on one trainer."""
    gpus: bool
    """Each rank has a GPU."""
    memory: int
    """Bytes of each of these GPUs."""

    def need(self, shape: Shape) -> Need | None:
        """Return what each trainer must have; None: nothing."""
        if self.gpus:
            return Need(shape.share, self.memory, shape.share)
        return Need(ranks=shape.share) if shape.share > 1 else None

    def room(self, kind: Gpus) -> int:
        """Return the ranks that a trainer with these GPUs has room for."""
        if not self.gpus:
            return kind.ranks
        fit = 0
        while fit < len(kind.memory) and kind.memory[fit] >= self.memory:
            fit += 1
        return min(fit, kind.ranks)

    def rooms(self, kinds: Iterable[Gpus]) -> list[int]:
        """Return the room of each of these trainers, largest first."""
        return sorted(map(self.room, kinds), reverse=True)


def rank_need(spec: Mapping[str, Any]) -> RankNeed:
    """`spec`: as it is stored."""
    resources, policies = spec["resources"], spec.get("policies") or {}
    gpus = int(resources.get("trainer_gpus") or 0)
    ranks = int(resources.get("trainer_ranks") or max(1, gpus))
    least = int(resources.get("min_trainer_ranks") or ranks)
    if len(policies) > 1:  # their learners are in one process
        each = [int(own.get("trainer_ranks") or ranks) for own in policies.values()]
        ranks = least = gpus or sum(each)
    return RankNeed(ranks, min(least, ranks), len(policies) > 1, bool(gpus), _gpu_memory(resources))


def _gpu_memory(resources: Mapping[str, Any]) -> int:
    return int((resources.get("gpu_memory_gb") or 0.0) * GB)


def shared_need(spec: Mapping[str, Any]) -> Need | None:
    """Return what a job needs of a trainer that jobs share: one with a place for each policy. None: it trains alone.
    `spec`: as it is stored."""
    if not (base := bank_of(spec)):
        return None
    gpus = int(bool(spec["resources"].get("trainer_gpus")))  # the places of a process share its first
    memory = _gpu_memory(spec["resources"]) if gpus else 0
    return Need(gpus, memory, base=base, places=max(1, len(spec.get("policies") or ())))


def choose_shape(need: RankNeed, free: Sequence[Gpus], alive: Sequence[Gpus], *, patient: bool) -> Shape:
    """Return the shape to start with: of all ranks if trainers for them are free; else, unless `patient`, of as many as
    free trainers have room for; else the one to wait for."""
    if need.ranks == 1:
        return Shape(1, 1, 1)
    rooms, all_rooms = need.rooms(free), need.rooms(alive)
    found = _fit(need, rooms, need.ranks)
    if found is None and not patient:
        found = _largest(need, rooms)
    if found is None:
        found = _fit(need, all_rooms, need.ranks)
    if found is None and not patient:
        found = _largest(need, all_rooms)
    if found is not None:
        return found
    largest = max(all_rooms, default=0)
    if need.whole or not largest:
        return Shape(need.ranks, 1, need.ranks)
    trainers = -(-need.ranks // largest)
    return Shape(need.ranks, trainers, -(-need.ranks // trainers))


def shape_of(group: Sequence[RankShare]) -> Shape:
    """Return the shape of a group that there is."""
    return Shape(sum(share.ranks for share in group), len(group), max(share.ranks for share in group))


def _largest(need: RankNeed, rooms: Sequence[int]) -> Shape | None:
    """Return the shape of the most ranks that fit, below the number wished for."""
    shapes = (_fit(need, rooms, ranks) for ranks in range(need.ranks - 1, need.least - 1, -1))
    return next((shape for shape in shapes if shape is not None), None)


def _fit(need: RankNeed, rooms: Sequence[int], ranks: int) -> Shape | None:
    """Return the shape of `ranks` on the fewest of these trainers; None if there are too few."""
    for trainers in range(1, 1 + (1 if need.whole else min(ranks, len(rooms)))):
        share = -(-ranks // trainers)
        if len(rooms) >= trainers and rooms[trainers - 1] >= share:
            return Shape(ranks, trainers, share)
    return None


def group_of(trainers: Sequence[WorkerInfo], ranks: int) -> tuple[RankShare, ...]:
    """Divide the ranks among these trainers, the first of which leads; `ranks` 0: one trainer, as its spec says, or
    places of a shared one."""
    if not ranks and len(trainers) < 2:
        return ()
    each, more = divmod(ranks or len(trainers), len(trainers))
    return tuple(RankShare(one.id, one.incarnation, each + (place < more)) for place, one in enumerate(trainers))


def group_in(leases: Iterable[Lease]) -> Sequence[RankShare]:
    """Return the group of a job's trainers; empty if it has none, or one with all ranks of its spec."""
    return next((lease.group for lease in leases if lease.group), ())
