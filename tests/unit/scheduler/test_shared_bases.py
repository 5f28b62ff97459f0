"""Placement of jobs that share a trainer and its base model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.placement.planner import plan
from opentinker.services.scheduler.placement.reconciler import gpus_counted
from opentinker.services.scheduler.placement.shared_bases import UNCLEAR
from opentinker.services.scheduler.placement.shortages import NOT_KEPT
from opentinker.services.scheduler.placement.trainer_groups import group_of
from opentinker.services.scheduler.placement.types import AddTrainers, Gpus, Need, PlacementPlan, Preempt, Rules, Start
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.spec.engines import bank_of
from opentinker.shared.types.core import JobRecord, JobState, Lease, Pool
from opentinker.shared.types.workers import Gpu, WorkerInfo
from tests.samples.row_samples import row_spec
from tests.unit.scheduler.placing import TRAINER, held, job, planned, started

A, B = {TRAINER: Need(base="a")}, {TRAINER: Need(base="b")}
ALONE: dict[str, Any] = {"needs": {TRAINER: 1}, "most": 0}


def workers(*processes: str, jobs: int = 3, **fields: Any) -> list[WorkerInfo]:
    """Of trainers that train as many jobs each."""
    return [
        msgspec.structs.replace(worker_info(f"{bank}.{n}", TRAINER), bank=bank, **fields)
        for bank in processes
        for n in range(jobs)
    ]


def record(id: str, base: str, state: JobState = JobState.QUEUED, shared: bool = True, **resources: Any) -> JobRecord:
    resources = {"trainer": "shared" if shared else "own", **resources}
    spec = row_spec(base, "rows.jsonl", model={"lora": {}}, resources=resources)
    return JobRecord(
        id=id, name=id, kind="sft", tenant="t", state=state, version=1, epoch=1, created=1.0, updated=1.0, step=0,
        steps=1, reason="", spec=spec.model_dump(mode="json"),
    )  # fmt: skip


def game(id: str, base: str, policies: int, state: JobState = JobState.QUEUED, **changes: Any) -> JobRecord:
    """A job with several policies, each an adapter of the base; no rollout workers are needed here."""
    plain = record(id, base, state)
    own = {f"p{n}": {"model": plain.spec["model"]} for n in range(policies)}
    return msgspec.structs.replace(plain, spec={**plain.spec, "policies": own}, **changes)


def leases(job: str, worker: WorkerInfo) -> Lease:
    return Lease(job=job, worker=worker.id, incarnation=worker.incarnation, epoch=1, pool=TRAINER)


def placed(
    found: list[WorkerInfo], jobs: list[JobRecord], held: list[Lease] | None = None, now: float = 10.0
) -> PlacementPlan:
    view = Cluster(found, held or []).view(jobs, now=now, limits={}, used={}, rules=Rules())
    return plan(view)


def chosen(found: PlacementPlan) -> dict[str, str]:
    return {one.job: one.workers[0] for one in found.decisions if isinstance(one, Start)}


def test_a_job_goes_where_its_base_is_then_where_none_is_and_nowhere_else() -> None:
    gpus = {"trainer-0": Gpus(base="b"), "trainer-1": Gpus(base=""), "trainer-2": Gpus(base="a")}
    plans = [planned(job("j", gpus=A, **ALONE), trainers=n, gpus=gpus) for n in (3, 2, 1)]
    assert [[d.workers for d in p.decisions if isinstance(d, Start)] for p in plans] == [
        [("trainer-2",)], [("trainer-1",)], [],
    ]  # fmt: skip
    assert plans[2].waiting["j"] == "trainer for jobs that share a (setting bank_jobs) (none is running)"


def test_other_jobs_take_no_shared_trainer_and_shared_jobs_no_other() -> None:
    gpus = {"trainer-0": Gpus(base="")}
    found = planned(job("own", **ALONE), job("shared", gpus=A, **ALONE), trainers=2, gpus=gpus)
    assert {d.job: d.workers for d in found.decisions if isinstance(d, Start)} == {
        "own": ("trainer-1",), "shared": ("trainer-0",),
    }  # fmt: skip
    assert started(planned(job("own", **ALONE), trainers=1, gpus=gpus)) == []
    assert started(planned(job("shared", gpus=A, **ALONE), trainers=1)) == []


def test_a_job_of_higher_priority_interrupts_one_of_its_base() -> None:
    gpus = {"trainer-0": Gpus(base="b"), "trainer-1": Gpus(base="a")}
    other, same = held("other", "trainer-0", gpus=B, **ALONE), held("same", "trainer-1", gpus=A, **ALONE)
    found = planned(other, same, job("urgent", priority=5, gpus=A, **ALONE), trainers=2, gpus=gpus)
    assert [decision.job for decision in found.decisions] == ["same"]


def test_the_first_job_decides_on_the_base_before_others_join() -> None:
    free = workers("shared-0")
    jobs = [record("j-1", "a"), record("j-2", "b"), record("j-3", "a")]
    assert chosen(placed(free, jobs)) == {"j-1": "shared-0.0"}, "one at a time, until it is known"
    begun = [record("j-1", "a", JobState.STARTING), *jobs[1:]]
    found = placed(free, begun, [leases("j-1", free[0])])
    assert chosen(found) == {"j-3": "shared-0.1"}
    assert "for jobs that share b in float32" in found.waiting["j-2"]


def test_two_processes_can_have_two_bases() -> None:
    free = workers("shared-0", "shared-1")
    found = placed(free, [record("j-1", "a"), record("j-2", "b"), record("j-3", "c")])
    assert chosen(found) == {"j-1": "shared-0.0", "j-2": "shared-1.0"}


@pytest.mark.parametrize(("base", "joins"), [("a in float32", True), ("b in float32", False), (None, False)])
def test_a_worker_that_still_saves_for_an_ended_job_says_which_base_there_is(base: str | None, joins: bool) -> None:
    saving, *free = workers("shared-0")
    detail = {} if base is None else {"base": base}
    saving = msgspec.structs.replace(saving, job="gone", status="ready", detail=detail)
    assert (chosen(placed([saving, *free], [record("j-1", "a")])) == {"j-1": "shared-0.1"}) is joins
    assert UNCLEAR not in [bank_of(record("j-1", base).spec) for base in ("a", UNCLEAR)]


def test_ranks_of_other_jobs_are_not_put_on_shared_trainers() -> None:
    wide = record("j-1", "a", shared=False)
    wide = msgspec.structs.replace(
        wide, spec={**wide.spec, "resources": {**wide.spec["resources"], "trainer_ranks": 2}}
    )
    assert chosen(placed(workers("shared-0"), [wide])) == {}
    own = [worker_info("trainer-0", Pool.TRAINER)]
    assert chosen(placed([*workers("shared-0"), *own], [wide])) == {"j-1": "trainer-0"}


def test_a_process_that_comes_back_is_for_the_jobs_that_it_has_lost() -> None:
    """Not for a job of another base, while they wait for their next try."""
    lost = msgspec.structs.replace(record("j-1", "a", JobState.RUNNING), retry_at=60.0)
    found = placed(workers("shared-0"), [lost, record("j-2", "b")])
    assert chosen(found) == {}
    found = placed(workers("shared-0", "shared-1"), [lost, record("j-2", "b")])
    assert chosen(found) == {"j-2": "shared-1.0"}


LONG = Rules().reserve_after_s + 10.0


def test_a_process_takes_no_more_jobs_when_one_of_another_base_has_waited_long() -> None:
    """It then goes to that base as soon as it trains nothing."""
    found = workers("trainer-0")
    first, other, later = record("j-1", "a", JobState.RUNNING), record("j-2", "b"), record("j-3", "a")
    has = [leases("j-1", found[0])]
    assert chosen(placed(found, [first, other, later], has)) == {"j-3": "trainer-0.1"}
    assert chosen(placed(found, [first, other, later], has, now=LONG)) == {}
    assert chosen(placed(found, [other, later], now=LONG)) == {"j-2": "trainer-0.0"}
    assert chosen(placed(found, [first, later], has, now=LONG)) == {"j-3": "trainer-0.1"}


def test_the_process_with_the_fewest_jobs_is_kept_for_another_base_unless_one_of_them_has_no_end() -> None:
    found = workers("trainer-0", "trainer-1")
    running = [record(f"j-{n}", "a", JobState.RUNNING) for n in range(3)]
    has = [leases("j-0", found[0]), leases("j-1", found[1]), leases("j-2", found[3])]
    waiting = [record("j-8", "b"), record("j-9", "a")]
    assert chosen(placed(found, [*running, *waiting], has, now=LONG)) == {"j-9": "trainer-0.2"}
    endless = [*running[:2], msgspec.structs.replace(running[2], kind="tinker")]
    assert chosen(placed(found, [*endless, *waiting], has, now=LONG)) == {"j-9": "trainer-1.1"}


def all_chosen(found: PlacementPlan) -> dict[str, tuple[str, ...]]:
    return {one.job: one.workers for one in found.decisions if isinstance(one, Start | AddTrainers)}


def test_policies_get_all_their_places_in_one_process_or_none() -> None:
    one, other = workers("shared-0", jobs=2), workers("shared-1")
    running = record("j-1", "a", JobState.RUNNING)
    taken = [leases("j-1", one[0])]
    assert all_chosen(placed([*one, *other], [running, game("j-2", "a", 2)], taken)) == {
        "j-2": ("shared-1.0", "shared-1.1"),
    }, "the place that is left in the first does not count"  # fmt: skip
    found = placed(one, [running, game("j-2", "a", 2)], taken)
    assert found.decisions == []
    assert found.waiting["j-2"] == (
        "a free trainer for jobs that share a in float32 (setting bank_jobs; 2 places of one process)"
        " (held by sft job j-1)"
    )
    found = placed(one, [game("j-2", "a", 3)])
    assert found.decisions == []
    assert found.waiting["j-2"] == (
        "3 trainers for jobs that share a in float32 (setting bank_jobs; 3 places of one process) (2 of them running)"
    )


def test_two_jobs_with_policies_never_hold_a_part_of_their_places_each() -> None:
    """Three places for two jobs that need two: the second waits, and holds nothing, until the first has ended."""
    found = workers("shared-0")
    first, second = game("j-1", "a", 2), game("j-2", "a", 2)
    assert all_chosen(placed(found, [first, second])) == {"j-1": ("shared-0.0", "shared-0.1")}
    has = [leases("j-1", one) for one in found[:2]]
    begun = game("j-1", "a", 2, JobState.RUNNING)
    assert placed(found, [begun, second], has).decisions == []
    lost = msgspec.structs.replace(begun, lost_at=9.0)
    assert all_chosen(placed(found, [lost, second])) == {"j-1": ("shared-0.0", "shared-0.1")}
    assert all_chosen(placed(found[:1], [lost, second])) == {}, "while the process comes back"


def test_a_job_with_policies_opens_an_unused_process_for_its_base_alone() -> None:
    free = workers("shared-0", jobs=4)
    found = placed(free, [game("j-1", "a", 2), record("j-2", "b"), record("j-3", "a")])
    assert all_chosen(found) == {"j-1": ("shared-0.0", "shared-0.1")}
    begun = game("j-1", "a", 2, JobState.STARTING)
    has = [leases("j-1", one) for one in free[:2]]
    assert all_chosen(placed(free, [begun, record("j-2", "b"), record("j-3", "a")], has)) == {"j-3": ("shared-0.2",)}


def test_a_job_with_policies_interrupts_as_many_jobs_of_its_process_as_it_needs() -> None:
    gpus = {f"trainer-{n}": Gpus(base="a", bank="one" if n < 3 else "two") for n in range(4)}
    need = {TRAINER: Need(base="a", places=2)}
    low = [held(f"low-{n}", f"trainer-{n}", gpus=A, **ALONE) for n in range(4)]
    wants = job("urgent", priority=5, gpus=need, needs={TRAINER: 2}, most=0)
    found = planned(*low, wants, trainers=4, gpus=gpus)
    assert len(found.decisions) == 2 and all(isinstance(one, Preempt) for one in found.decisions)
    assert {one.job for one in found.decisions} <= {"low-0", "low-1", "low-2"}, "of one process"
    assert (
        planned(low[0], low[3], wants, trainers=4, gpus={**gpus, "trainer-1": Gpus(), "trainer-2": Gpus()}).decisions
        == []
    )


def test_each_place_of_a_job_with_policies_knows_which_one_leads() -> None:
    places = workers("shared-0")[:2]
    assert [(share.worker, share.ranks) for share in group_of(places, 0)] == [("shared-0.0", 1), ("shared-0.1", 1)]


def test_places_that_a_long_waiting_job_needs_are_kept_for_it() -> None:
    """Single jobs that keep coming would take each place as it becomes free."""
    found = workers("shared-0", jobs=2)
    running, wide = record("j-1", "a", JobState.RUNNING), game("j-2", "a", 2)
    later = msgspec.structs.replace(record("j-3", "a"), since=LONG - 1.0, created=LONG - 1.0)
    has = [leases("j-1", found[0])]
    assert all_chosen(placed(found, [running, wide, later], has)) == {"j-3": ("shared-0.1",)}
    assert all_chosen(placed(found, [running, wide, later], has, now=LONG)) == {}


def test_places_are_kept_only_in_a_process_that_is_large_enough() -> None:
    """The one that becomes free in the large process is kept, and not the two of the small one."""
    small, large = workers("shared-0", jobs=2), workers("shared-1", jobs=4)
    running = [record(f"j-{n}", "a", JobState.RUNNING) for n in range(3)]
    has = [leases(one.id, worker) for one, worker in zip(running, large, strict=False)]
    later = [msgspec.structs.replace(record(f"j-{n}", "a"), since=LONG - 1.0, created=LONG - 1.0) for n in (6, 7, 8)]
    found = placed([*small, *large], [*running, game("j-5", "a", 3), *later], has, now=LONG)
    assert all_chosen(found) == {"j-6": ("shared-0.0",)}


def test_places_of_jobs_without_an_end_do_not_become_free() -> None:
    first, second = workers("shared-0"), workers("shared-1")
    endless = msgspec.structs.replace(record("j-1", "a", JobState.RUNNING), kind="tinker")
    running = [record(f"j-{n}", "a", JobState.RUNNING) for n in (2, 3)]
    has = [leases("j-1", first[0]), leases("j-2", second[0]), leases("j-3", second[1])]
    later = [msgspec.structs.replace(record(f"j-{n}", "a"), since=LONG - 1.0, created=LONG - 1.0) for n in (6, 7, 8)]
    found = placed([*first, *second], [endless, *running, game("j-5", "a", 3), *later], has, now=LONG)
    assert all_chosen(found) == {"j-6": ("shared-0.1",), "j-7": ("shared-0.2",)}
    found = placed(first, [endless, game("j-5", "a", 3), later[0]], has[:1], now=LONG)
    assert all_chosen(found) == {"j-6": ("shared-0.1",)}, "it could not have all three"
    assert found.waiting["j-5"].endswith("; " + NOT_KEPT)


@pytest.mark.parametrize("small", [2, 4])
def test_jobs_are_interrupted_where_all_places_can_be_had(small: int) -> None:
    """Though another process has a free place: it is too small, or its jobs are as urgent."""
    sizes = {"small": small, "large": 4}
    banks = [bank for bank, size in sizes.items() for _ in range(size)]
    gpus = {f"trainer-{n}": Gpus(base="a", bank=bank) for n, bank in enumerate(banks)}
    same = [held(f"same-{n}", f"trainer-{n}", gpus=A, priority=5, **ALONE) for n in range(1, small)]
    low = [held(f"low-{n}", f"trainer-{n}", gpus=A, **ALONE) for n in range(small, small + 4)]
    need = {TRAINER: Need(base="a", places=3)}
    wants = job("urgent", priority=5, gpus=need, needs={TRAINER: 3}, most=0)
    found = planned(*same, *low, wants, trainers=small + 4, gpus=gpus)
    assert len(found.decisions) == 3 and all(isinstance(one, Preempt) for one in found.decisions)
    assert {one.job for one in found.decisions} <= {one[0].id for one in low}


def test_nothing_is_placed_on_a_process_that_has_died_while_its_successor_begins_to_report() -> None:
    old, new = workers("shared-0"), workers("shared-0", pid=1 + workers("shared-0")[0].pid)
    lost = game("j-1", "a", 2, JobState.RUNNING, lost_at=9.0)
    assert all_chosen(placed([new[0], *old[1:]], [lost])) == {}
    assert all_chosen(placed([*new[:2], old[2]], [record("j-2", "a")])) == {}
    assert all_chosen(placed(new, [lost])) == {"j-1": ("shared-0.0", "shared-0.1")}


def test_a_process_is_kept_for_another_base_only_if_it_has_enough_places() -> None:
    small, large = workers("trainer-0", jobs=2), workers("trainer-1")
    running = [record(f"j-{n}", "a", JobState.RUNNING) for n in range(3)]
    has = [leases("j-0", small[0]), leases("j-1", large[0]), leases("j-2", large[1])]
    later = record("j-9", "a")
    found = placed([*small, *large], [*running, game("j-8", "b", 3), later], has, now=LONG)
    assert all_chosen(found) == {"j-9": ("trainer-0.1",)}, "the larger one is for b, though it has more jobs"
    found = placed([*small, *large], [*running, game("j-8", "b", 4), later], has, now=LONG)
    assert all_chosen(found) == {"j-9": ("trainer-0.1",)}
    full = [*has, leases("j-3", small[1])]
    running.append(record("j-3", "a", JobState.RUNNING))
    found = placed([*small, *large], [*running, game("j-8", "b", 4), later], full, now=LONG)
    assert all_chosen(found) == {"j-9": ("trainer-1.2",)}, "four places fit nowhere: nothing is kept"
    found = placed([*small, *large], [*running, game("j-8", "b", 3), later], full, now=LONG)
    assert all_chosen(found) == {}


def test_a_base_that_is_there_is_due_if_its_process_is_too_small() -> None:
    small, large = workers("trainer-0", jobs=2), workers("trainer-1")
    other = record("j-1", "b", JobState.RUNNING)
    jobs = [other, game("j-2", "a", 3), record("j-3", "b"), record("j-4", "a", JobState.RUNNING)]
    has = [leases("j-1", large[0]), leases("j-4", small[0])]
    assert all_chosen(placed([*small, *large], jobs, has)) == {"j-3": ("trainer-1.1",)}
    assert all_chosen(placed([*small, *large], jobs, has, now=LONG)) == {}


def test_a_base_that_is_there_is_due_if_a_job_without_an_end_holds_a_place_that_is_needed() -> None:
    first, second = workers("trainer-0"), workers("trainer-1")
    endless = msgspec.structs.replace(record("j-1", "a", JobState.RUNNING), kind="tinker")
    has = [leases("j-1", first[0]), leases("j-4", second[0])]
    jobs = [endless, record("j-4", "b", JobState.RUNNING), game("j-2", "a", 3), record("j-3", "b")]
    assert all_chosen(placed([*first, *second], jobs, has)) == {"j-3": ("trainer-1.1",)}
    assert all_chosen(placed([*first, *second], jobs, has, now=LONG)) == {}


def test_jobs_that_want_a_gpu_share_the_process_that_has_one_with_their_like() -> None:
    gpu = Gpu(index=0, uuid="GPU-1", model="X", memory=80 * 10**9)
    plain, fast = workers("plain", jobs=2), workers("fast", jobs=2, gpus=[gpu])
    counted = [gpus_counted(record("j", "a", trainer_gpus=gpus), fast[0]) for gpus in (0, 1)]
    assert counted == [0, 1], "for usage"
    wants = [record(id, "a", trainer_gpus=1) for id in ("j-1", "j-2", "j-3")]
    found = placed(plain + fast, wants[:2])
    assert {d.workers[0] for d in found.decisions if isinstance(d, Start)} == {"fast.0"}, "the first decides"
    begun = record("j-1", "a", JobState.RUNNING, trainer_gpus=1)
    of_begun = [leases("j-1", fast[0])]
    (start,) = placed(plain + fast, [begun, *wants[1:]], of_begun).decisions
    assert isinstance(start, Start) and (start.job, start.workers) == ("j-2", ("fast.1",))
    on_the_cpu = placed(fast, [begun, record("j-2", "a")], of_begun)
    assert not on_the_cpu.decisions, "the process trains that base on its GPU"
    waits = placed(plain, wants[:1]).waiting["j-1"]
    assert f"for jobs that share {bank_of(wants[0].spec)} (setting bank_jobs)" in waits and " on a GPU (" in waits
    large = record("j-1", "a", trainer_gpus=1, gpu_memory_gb=141)
    assert "bank_jobs; with 141 GB" in placed(fast, [large]).waiting["j-1"]
    policies = game("j-4", "a", 2)
    policies.spec["resources"] |= {"trainer_gpus": 1}
    (start,) = placed(plain + fast, [policies]).decisions
    assert isinstance(start, Start) and set(start.workers) == {"fast.0", "fast.1"}
