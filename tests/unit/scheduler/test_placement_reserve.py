"""A large job with reserved workers preempts no more than it needs, and starves no other job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from opentinker.services.scheduler.placement.planner import plan
from opentinker.services.scheduler.placement.types import (
    AddWorker,
    ClusterView,
    Gpus,
    Held,
    Need,
    PlannedJob,
    Preempt,
    Reclaim,
    Start,
)
from tests.unit.scheduler.placing import NOW, ROLLOUT, TRAINER, held, job, planned

LOOK_S = 2.0
SAVES_S = 5.0
"""An interrupted job lets go of its workers after that."""
LARGE = {"needs": {TRAINER: 1, ROLLOUT: 4}, "priority": 1, "created": 1, "since": NOW - 500, "tenant": "u"}
SMALL = {"needs": {ROLLOUT: 1}, "priority": 1, "tenant": "v"}
BUSY = held("busy", "trainer-0", needs={TRAINER: 1}, priority=1, most=0)
"""It has the only trainer."""


def lows(count: int) -> list[tuple[PlannedJob, list[Held]]]:
    return [held(f"low{i}", f"rollout-{i}", needs={ROLLOUT: 1}, priority=-1) for i in range(count)]


class Looks:
    """Round after round, each with the outcome of those before."""

    def __init__(
        self, running: Sequence[tuple[PlannedJob, list[Held]]], queue: Sequence[PlannedJob], rollouts: int
    ) -> None:
        self.now = NOW
        self.jobs = {one.id: one for one in [*(one for one, _ in running), *queue]}
        self.leases = {lease.worker: lease for _, leases in running for lease in leases}
        self.ids = {TRAINER: ["trainer-0"], ROLLOUT: [f"rollout-{i}" for i in range(rollouts)]}
        self.saving: dict[str, float] = {}
        self.interrupted: list[str] = []
        self.began: list[str] = []

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += LOOK_S
            self.saving = {worker: until for worker, until in self.saving.items() if until > self.now}
            taken = self.leases.keys() | self.saving.keys()
            view = ClusterView(
                now=self.now,
                jobs=list(self.jobs.values()),
                alive=self.ids,
                free={pool: [id for id in ids if id not in taken] for pool, ids in self.ids.items()},
                coming={pool: [id for id in ids if id in self.saving] for pool, ids in self.ids.items()},
                leases=list(self.leases.values()),
            )
            for decision in plan(view).decisions:
                self._apply(decision)

    def _apply(self, decision: object) -> None:
        match decision:
            case Start(id, workers):
                self.began.append(id)
                self.jobs[id] = replace(self.jobs[id], held=True, since=self.now)
                self.leases |= {worker: Held(worker, id, self._pool(worker)) for worker in workers}
            case Preempt(id, _):
                self.interrupted.append(id)
                self.end(id)
                self.jobs[id] = replace(self.jobs[id], held=False, since=self.now)
            case Reclaim(_, worker, _):
                del self.leases[worker]
            case AddWorker(id, worker, pool):
                self.leases[worker] = Held(worker, id, pool)
            case _:
                raise AssertionError(decision)

    def end(self, id: str) -> None:
        """Its workers let go of it after a while."""
        for worker in [worker for worker, lease in self.leases.items() if lease.job == id]:
            del self.leases[worker]
            self.saving[worker] = self.now + SAVES_S

    def _pool(self, worker: str) -> Any:
        return TRAINER if worker in self.ids[TRAINER] else ROLLOUT


def test_one_that_waits_behind_a_large_job_interrupts_no_more_than_it_needs() -> None:
    looks = Looks([BUSY, *lows(6)], [job("large", **LARGE), job("small", **SMALL)], rollouts=6)
    looks.look(30)
    assert looks.began == ["small"] and looks.interrupted == ["low0"]
    looks.end("busy")
    del looks.jobs["busy"]
    looks.look(10)
    assert looks.began == ["small", "large"]
    assert looks.interrupted == ["low0", "low1", "low2", "low3", "low4"], "its own, when it can start with them"


def test_it_has_what_is_free_and_kept_where_it_could_interrupt_others_for_as_much() -> None:
    looks = Looks([BUSY, *lows(6)], [job("large", **LARGE), job("small", **SMALL)], rollouts=8)
    looks.look(5)
    assert looks.began == ["small"] and looks.interrupted == []


def test_it_has_what_is_lent_and_would_be_kept() -> None:
    elastic = held("elastic", "rollout-1", "rollout-2", needs={ROLLOUT: 1}, priority=1, most=2)
    found = planned(BUSY, elastic, *lows(1), job("large", **LARGE | {"needs": {TRAINER: 1, ROLLOUT: 1}}),
                    job("small", **SMALL), trainers=1, rollouts=3)  # fmt: skip
    assert found.decisions == [Reclaim("elastic", "rollout-2", "small")]


def test_what_the_large_job_will_need_is_not_interrupted_for_who_is_behind_it() -> None:
    """Nor is what is kept for it taken: it could not start when its trainer is free."""
    for free in range(4):
        small = [job(f"small{i}", **SMALL, created=NOW + i) for i in range(9)]
        looks = Looks([BUSY, *lows(4)], [job("large", **LARGE), *small], rollouts=4 + free)
        looks.look(30)
        assert len(looks.began) == free and looks.interrupted == []
        looks.end("busy")
        del looks.jobs["busy"]
        looks.look(10)
        assert looks.began[free] == "large" and len(looks.interrupted) == 4


def test_what_is_of_no_use_to_the_large_job_is_interrupted_for_who_is_behind_it() -> None:
    large = job("large", **LARGE, gpus={ROLLOUT: Need(1)})
    gpus = {"rollout-4": Gpus((80,)), "rollout-5": Gpus((80,)), "rollout-6": Gpus((80,)), "rollout-7": Gpus((80,))}
    other = held("other", *gpus, needs={ROLLOUT: 4}, priority=1)
    found = planned(BUSY, other, *lows(1), large, job("small", **SMALL), trainers=1, rollouts=8, gpus=gpus)
    assert [d for d in found.decisions if isinstance(d, Preempt | Start)] == [Start("small", ("rollout-1",))]
    found = planned(BUSY, other, *lows(4), large, job("small", **SMALL), trainers=1, rollouts=8, gpus=gpus)
    assert found.decisions == [Preempt("low0", "small")]
