"""Placement of jobs that need GPUs, and of those that need none."""

from __future__ import annotations

from opentinker.services.scheduler.placement.types import AddWorker, Gpus, Need, Preempt, Reclaim, Start
from tests.unit.scheduler.placing import NOW, ROLLOUT, TRAINER, held, job, planned, started

TWO = {"trainer-1": Gpus((80, 80))}


def test_a_job_gets_a_trainer_that_has_the_gpus_it_needs() -> None:
    wants = job("wants", gpus={TRAINER: Need(2)}, created=1)
    (start,) = planned(wants, trainers=2, rollouts=1, gpus=TWO).decisions
    assert isinstance(start, Start) and start.workers == ("trainer-1", "rollout-0")
    found = planned(wants, job("other"), trainers=1, rollouts=1, gpus={})
    assert started(found) == ["other"], "it holds nobody back"
    assert "trainer with 2 GPUs (none is running)" in found.waiting["wants"]


def test_who_lacks_a_worker_with_gpus_is_told_so() -> None:
    wants = job("wants", gpus={TRAINER: Need(2), ROLLOUT: Need(1, 80 * 10**9)})
    assert planned(wants, trainers=1, rollouts=1).waiting["wants"] == (
        "trainer with 2 GPUs, rollout worker with a GPU of 80 GB (none is running)"
    )
    busy = held("b", "trainer-1", "rollout-0")
    gpus = {**TWO, "rollout-0": Gpus((85 * 10**9,)), "rollout-1": Gpus((40 * 10**9,))}
    found = planned(busy, wants, trainers=2, rollouts=2, gpus=gpus)
    assert found.waiting["wants"] == (
        "a free trainer with 2 GPUs and a free rollout worker with a GPU of 80 GB (held by job b)"
    )
    wide = job("wide", needs={ROLLOUT: 2}, gpus={ROLLOUT: Need(1, 80 * 10**9)})
    found = planned(wide, rollouts=2, gpus=gpus)
    assert found.waiting["wide"] == "2 rollout workers with a GPU of 80 GB (1 of them running)"


def test_who_needs_no_gpu_leaves_them_to_others() -> None:
    found = planned(job("plain", created=1), job("wants", gpus={TRAINER: Need(1)}), trainers=2, rollouts=2, gpus=TWO)
    assert [d.workers[0] for d in found.decisions if isinstance(d, Start)] == ["trainer-0", "trainer-1"]
    gpus = {"trainer-0": Gpus((80,) * 4), **TWO}
    (start,) = planned(job("one", gpus={TRAINER: Need(1)}), trainers=2, rollouts=1, gpus=gpus).decisions
    assert isinstance(start, Start) and start.workers[0] == "trainer-1", "the fewest that do"
    (start,) = planned(job("plain"), trainers=1, rollouts=1, gpus={"trainer-0": Gpus((80,))}).decisions
    assert isinstance(start, Start), "with a GPU rather than not at all"


def test_ranks_are_put_where_gpus_are_joined() -> None:
    wants = job("wants", needs={TRAINER: 1}, gpus={TRAINER: Need(2)}, most=0)
    apart, node = Gpus((80, 80)), Gpus((80, 80), near=2)
    for gpus, expected in (
        ({"trainer-0": apart, "trainer-1": node}, "trainer-1"),
        ({"trainer-0": node, "trainer-1": Gpus((80, 80), linked=2)}, "trainer-1"),
        ({"trainer-0": apart, "trainer-1": Gpus((80,) * 8, linked=8, near=8)}, "trainer-0"),
    ):
        (start,) = planned(wants, trainers=2, gpus=gpus).decisions
        assert isinstance(start, Start) and start.workers == (expected,)


def test_only_what_has_gpus_is_taken_back_interrupted_and_kept_for_who_needs_them() -> None:
    gpus = {"rollout-1": Gpus((80,)), "trainer-1": Gpus((80,))}
    wide = held("w", "trainer-0", "rollout-0", "rollout-1", "rollout-2", most=3)
    wants = job("wants", needs={ROLLOUT: 1}, gpus={ROLLOUT: Need(1)})
    assert planned(wide, wants, trainers=1, rollouts=3, gpus=gpus).decisions == [Reclaim("w", "rollout-1", "wants")]

    low = held("low", "trainer-0", needs={TRAINER: 1}, priority=-2)
    other = held("other", "trainer-1", needs={TRAINER: 1}, priority=-1)
    high = job("high", needs={TRAINER: 1}, priority=1, gpus={TRAINER: Need(1)})
    assert planned(low, other, high, trainers=2, gpus=gpus).decisions == [Preempt("other", "high")]

    long = job("long", needs={TRAINER: 1}, gpus={TRAINER: Need(1)}, since=NOW - 500, created=1)
    holds = held("h", "trainer-1", needs={TRAINER: 1})
    found = planned(long, holds, job("small", needs={TRAINER: 1}), trainers=2, gpus=gpus)
    assert started(found) == ["small"], "what is kept for it is what it needs"


def test_what_is_lent_has_what_the_job_needs() -> None:
    a = held("a", "trainer-0", "rollout-0", most=3, gpus={ROLLOUT: Need(1)})
    b = held("b", "trainer-1", "rollout-1", most=3)
    gpus = {"rollout-0": Gpus((80,)), "rollout-3": Gpus((80,))}
    found = planned(a, b, trainers=2, rollouts=4, gpus=gpus)
    assert {d.job: d.worker for d in found.decisions if isinstance(d, AddWorker)} == {
        "b": "rollout-2",
        "a": "rollout-3",
    }
