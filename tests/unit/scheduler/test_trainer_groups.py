"""How many trainers share the ranks of a job, and what is planned for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.gpu_matching import FreeWorkers, GpuMatcher
from opentinker.services.scheduler.placement.planner import plan
from opentinker.services.scheduler.placement.trainer_groups import (
    RankNeed,
    Shape,
    choose_shape,
    group_of,
    rank_need,
)
from opentinker.services.scheduler.placement.types import AddTrainers, Gpus, Need, Preempt, Requeue, Rules, Start
from opentinker.services.scheduler.placement.worker_watch import WorkerWatch
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.types.core import JobRecord, JobState, Lease, Pool
from opentinker.shared.types.workers import Gpu
from tests.support.factories import make_spec
from tests.unit.scheduler.placing import NOW, TRAINER, held, job, planned, started


def need(ranks: int, least: int = 0, **changes: Any) -> RankNeed:
    fields = {"whole": False, "gpus": False, "memory": 0}
    return RankNeed(ranks=ranks, least=least or ranks, **{**fields, **changes})


def rooms(*each: int) -> list[Gpus]:
    return [Gpus(ranks=ranks) for ranks in each]


@pytest.mark.parametrize(
    ("wish", "free", "alive", "expected"),
    [
        (need(1), [], [], Shape(1, 1, 1)),
        (need(4), [Gpus()], [Gpus()], Shape(4, 1, 4)),  # any number on the CPU, where nobody says otherwise
        (need(4), rooms(2, 2, 4), rooms(2, 2, 4), Shape(4, 1, 4)),  # as few as can be
        (need(4), rooms(2, 2), rooms(2, 2, 4), Shape(4, 2, 2)),  # that are free now
        (need(3), rooms(2, 2), rooms(2, 2), Shape(3, 2, 2)),
        (need(3), rooms(2, 1), rooms(2, 1, 1), Shape(3, 3, 1)),  # divided evenly: two and one do not fit here
        (need(4), rooms(2), rooms(2, 2), Shape(4, 2, 2)),  # waits for the other one
        (need(4), rooms(1), rooms(1), Shape(4, 4, 1)),  # waits for three more
        (need(4), [], [], Shape(4, 1, 4)),
        (need(4, whole=True), rooms(2, 2), rooms(2, 2), Shape(4, 1, 4)),
        (need(4, gpus=True), [Gpus((80, 80))] * 2, [Gpus((80, 80))] * 2, Shape(4, 2, 2)),
        (need(4, gpus=True, memory=60), [Gpus((80, 40))] * 2, [Gpus((80, 40))] * 2, Shape(4, 4, 1)),
        (need(2, gpus=True), [Gpus()], [Gpus()], Shape(2, 1, 2)),  # nobody has a GPU
    ],
)
def test_ranks_are_put_on_few_trainers_that_have_room(
    wish: RankNeed, free: list[Gpus], alive: list[Gpus], expected: Shape
) -> None:
    for patient in (True, False):
        assert choose_shape(wish, free, alive, patient=patient) == expected


def test_fewer_ranks_are_enough_once_the_others_did_not_come() -> None:
    wish = need(4, least=2)
    assert choose_shape(wish, rooms(2), rooms(2, 2), patient=True) == Shape(4, 2, 2)
    assert choose_shape(wish, rooms(2), rooms(2, 2), patient=False) == Shape(2, 1, 2)
    assert choose_shape(wish, rooms(1, 1, 1), rooms(1, 1, 1), patient=False) == Shape(3, 3, 1)
    assert choose_shape(wish, rooms(1), rooms(1, 1), patient=False) == Shape(2, 2, 1), "it waits for two"
    assert choose_shape(need(4, least=2), rooms(1), rooms(1), patient=False) == Shape(4, 4, 1)


def test_what_a_spec_asks_for() -> None:
    def asked(**resources: Any) -> RankNeed:
        spec = make_spec(train={"steps": 1}, resources=resources).model_dump(mode="json")
        return rank_need(spec)

    assert asked() == need(1)
    assert asked(trainer_ranks=4, min_trainer_ranks=2) == need(4, 2)
    assert asked(trainer_gpus=2, gpu_memory_gb=40) == need(2, gpus=True, memory=40 * 10**9)
    assert need(4).need(Shape(4, 2, 2)) == Need(ranks=2) and need(1).need(Shape(1, 1, 1)) is None
    assert need(4, gpus=True).need(Shape(4, 2, 2)) == Need(2, 0, 2)


def test_the_ranks_of_a_group_are_divided_evenly() -> None:
    trainers = [worker_info(f"trainer-{n}", Pool.TRAINER) for n in range(3)]
    assert [(share.worker, share.ranks) for share in group_of(trainers, 8)] == [
        ("trainer-0", 3), ("trainer-1", 3), ("trainer-2", 2),
    ]  # fmt: skip
    assert group_of(trainers[:1], 0) == ()


def queued(spec: dict[str, Any]) -> JobRecord:
    """A job that needs trainers alone."""
    del spec["environment"]
    return JobRecord(
        id="j", name="j", kind="sft", tenant="t", state=JobState.QUEUED, version=1, epoch=0, created=NOW, updated=NOW,
        step=0, steps=1, reason="", spec=spec, since=NOW - 3600,
    )  # fmt: skip


WIDE: dict[str, Any] = {"needs": {TRAINER: 2}, "most": 0, "ranks": 2}


def test_a_group_gets_all_its_trainers_or_none() -> None:
    assert planned(job("a", **WIDE), trainers=2).decisions == [Start("a", ("trainer-0", "trainer-1"), 2)]
    found = planned(job("a", **WIDE), job("b", **WIDE), trainers=3)
    assert started(found) == ["a"], "nothing is held for b"
    assert found.waiting["b"].startswith("a free trainer")
    broken = held("a", lost_at=NOW - 1, **WIDE)
    assert planned(broken, trainers=1).decisions == []
    assert planned(broken, trainers=2).decisions == [AddTrainers("a", ("trainer-0", "trainer-1"), 2)]
    partly = held("a", "trainer-0", lost_at=NOW - 1, **WIDE)
    assert planned(partly, trainers=3).decisions == [], "what is left of the old group goes first"


def test_trainers_that_see_one_gpu_are_not_in_one_group() -> None:
    wants = job("a", **{**WIDE, "gpus": {TRAINER: Need(1, 0, 1)}})
    gpus = {f"trainer-{n}": Gpus((80,)) for n in range(3)}
    shared = {f"trainer-{n}": frozenset({"GPU-1"}) for n in range(2)}
    assert planned(wants, trainers=2, gpus=gpus, shared_gpus=shared).decisions == []
    found = planned(wants, trainers=3, gpus=gpus, shared_gpus=shared)
    assert found.decisions == [Start("a", ("trainer-0", "trainer-2"), 2)]
    both = [job(id, needs={TRAINER: 1}, most=0, gpus={TRAINER: Need(1)}) for id in "ab"]
    assert started(planned(*both, trainers=2, gpus=gpus, shared_gpus=shared)) == ["a", "b"], "jobs may share a GPU"


def on_gpus(*gpus: str) -> dict[str, Any]:
    """Trainers that see one GPU each, some the same, as arguments of `planned`."""
    shared = {f"trainer-{n}": frozenset({gpu}) for n, gpu in enumerate(gpus) if gpus.count(gpu) > 1}
    return {
        "trainers": len(gpus),
        "gpus": {f"trainer-{n}": Gpus((80,)) for n in range(len(gpus))},
        "shared_gpus": shared,
    }


WIDE_ON_GPUS: dict[str, Any] = {**WIDE, "gpus": {TRAINER: Need(1, 0, 1)}}
ONE: dict[str, Any] = {"needs": {TRAINER: 1}, "most": 0, "gpus": {TRAINER: Need(1)}}


def test_a_job_is_not_interrupted_for_a_group_that_cannot_use_its_gpu() -> None:
    there = on_gpus("GPU-1", "GPU-1", "GPU-2")
    wide = job("wide", priority=10, since=NOW - 60, **WIDE_ON_GPUS)
    big = held("big", "trainer-2", priority=10, **ONE)
    small = held("small", "trainer-1", **ONE)
    assert planned(small, big, wide, **there).decisions == [], "trainer-0 is free, and on the same GPU"
    low = held("low", "trainer-2", **ONE)
    assert planned(small, low, wide, **there).decisions == [Preempt("low", "wide")]
    full = held("other", "trainer-0", **ONE)
    found = planned(full, small, low, wide, **there).decisions
    assert len(found) == 2 and Preempt("low", "wide") in found, "one of each GPU"
    assert planned(full, small, wide, **on_gpus("GPU-1", "GPU-1")).decisions == []


def test_what_is_kept_for_a_group_is_on_gpus_apart() -> None:
    wide, busy = job("wide", since=NOW - 3600, created=1, **WIDE_ON_GPUS), held("busy", "trainer-2", **ONE)
    there = on_gpus("GPU-1", "GPU-1", "GPU-2")
    assert started(planned(busy, wide, job("small", **ONE), **there)) == ["small"], "of two on one GPU it keeps one"
    matcher = GpuMatcher(there["gpus"], there["shared_gpus"])
    coming = FreeWorkers(matcher, {TRAINER: ["trainer-1", "trainer-2"]})
    assert coming.take(wide, TRAINER, 1, ["trainer-0"]) == ["trainer-2"]


def test_a_trainer_that_sees_gpus_of_two_others_does_not_keep_their_group_from_forming() -> None:
    spec = make_spec(train={"steps": 1}, resources={"trainer_gpus": 4}).model_dump(mode="json")
    gpus = {"trainer-0": (2, 3), "trainer-1": (1, 2), "trainer-2": (3, 4)}
    trainers = [
        msgspec.structs.replace(
            worker_info(id, Pool.TRAINER),
            gpus=[Gpu(index=n, uuid=f"GPU-{n}", model="X", memory=80) for n in numbers],
        )
        for id, numbers in gpus.items()
    ]
    view = Cluster(trainers, []).view([queued(spec)], now=NOW, limits={}, used={}, rules=Rules())
    assert plan(view).decisions == [Start("j", ("trainer-1", "trainer-2"), 4)]


def test_who_lacks_trainers_because_they_share_a_gpu_is_told_so() -> None:
    found = planned(job("wide", **WIDE_ON_GPUS), **on_gpus("GPU-1", "GPU-1"))
    assert found.waiting["wide"] == (
        "2 trainers with a GPU (1 of them running, as trainers that share a GPU count once)"
    )


def test_trainers_that_see_one_gpu_have_room_for_one_rank() -> None:
    record = queued(make_spec(train={"steps": 1}, resources={"trainer_gpus": 2}).model_dump(mode="json"))

    def needed(*gpus: str) -> tuple[int, Need]:
        trainers = [
            msgspec.structs.replace(
                worker_info(f"trainer-{n}", Pool.TRAINER), gpus=[Gpu(index=0, uuid=uuid, model="X", memory=80)]
            )
            for n, uuid in enumerate(gpus)
        ]
        view = Cluster(trainers, []).view([record], now=NOW, limits={}, used={}, rules=Rules())
        return view.jobs[0].needs[TRAINER], view.jobs[0].gpus[TRAINER]

    assert needed("GPU-1", "GPU-2") == (2, Need(1, 0, 1))
    assert needed("GPU-1", "GPU-1", "GPU-2") == (2, Need(1, 0, 1))
    assert needed("GPU-1", "GPU-1") == (2, Need(1, 0, 1)), "it waits for another one"


def test_a_group_that_lacks_one_of_its_trainers_gets_it_from_a_job_that_waits_for_something_else() -> None:
    broken = held("a", "trainer-0", lost_at=NOW - 100, created=NOW - 3600)
    found = planned(broken, job("b", **WIDE), trainers=2, rollouts=0)
    assert [type(decision) for decision in found.decisions] == [Requeue]


@pytest.mark.parametrize(
    ("leader", "overdue", "leaves"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_group_whose_lead_is_told_to_stop_and_hangs_is_given_up(leader: bool, overdue: bool, leaves: bool) -> None:
    trainers = [worker_info(f"trainer-{n}", Pool.TRAINER) for n in range(2)]
    group = group_of(trainers, 2)
    leases = [
        Lease(job="j", worker=w.id, incarnation=w.incarnation, epoch=1, pool=TRAINER, group=group) for w in trainers
    ]
    stopping = 0 if leader else 1
    workers = [
        msgspec.structs.replace(w, job="j", epoch=1, status="draining" if n == stopping else "ready")
        for n, w in enumerate(trainers)
    ]
    settings = SimpleNamespace(drain_s=1.0)
    watch = WorkerWatch(SimpleNamespace(store=None, settings=settings), 1)  # type: ignore[arg-type]
    cluster = Cluster(workers, leases, {workers[stopping].id} if overdue else ())
    assert watch.leaving_group(leases, cluster) == (leases[stopping] if leaves else None)


def test_a_trainer_with_too_little_room_does_not_count() -> None:
    wants = job("a", **{**WIDE, "gpus": {TRAINER: Need(ranks=2)}})
    gpus = {"trainer-0": Gpus(ranks=1), "trainer-1": Gpus(ranks=2), "trainer-2": Gpus(ranks=4)}
    assert planned(wants, trainers=3, gpus=gpus).decisions == [Start("a", ("trainer-1", "trainer-2"), 2)]
    found = planned(wants, trainers=2, gpus=gpus)
    assert found.waiting["a"] == "2 trainers with room for 2 ranks (1 of them running)"
