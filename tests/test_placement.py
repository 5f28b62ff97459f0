"""Who gets which worker: single rules, and a cluster on a fake clock in which anything may happen."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from opentinker.services.scheduler.allowances import Used
from opentinker.services.scheduler.placement import plan
from opentinker.services.scheduler.placing import (
    AddWorker,
    Held,
    Job,
    Plan,
    Preempt,
    Requeue,
    Rules,
    Start,
    TakeBack,
    View,
)
from opentinker.shared.config import TenantLimits
from opentinker.shared.types import Pool
from tests.placement_model import Model

TRAINER, ROLLOUT = Pool.TRAINER, Pool.ROLLOUT
NOW = 1e6
SEEDS = range(*map(int, os.environ.get("OPENTINKER_PLACEMENT_SEEDS", "0:500").split(":")))
EVENTS = int(os.environ.get("OPENTINKER_PLACEMENT_EVENTS", "100"))
"""Of each seed."""


def job(id: str, **changes: Any) -> Job:
    fields: dict[str, Any] = {"tenant": "t", "priority": 0, "created": NOW - 10, "since": NOW - 10, "most": 1}
    return Job(id=id, **{**fields, "needs": {TRAINER: 1, ROLLOUT: 1}, **changes})


def held(id: str, *workers: str, **changes: Any) -> tuple[Job, list[Held]]:
    """A job that has begun an hour ago, and its leases."""
    leases = [Held(worker, id, Pool(worker.split("-")[0])) for worker in workers]
    return job(id, held=True, **{"since": NOW - 3600, "created": NOW - 3600, **changes}), leases


def planned(*jobs: Job | tuple[Job, list[Held]], trainers: int = 0, rollouts: int = 0, **view: Any) -> Plan:
    """`trainers`, `rollouts`: in all; those that nobody holds are free."""
    leases = [lease for one in jobs if isinstance(one, tuple) for lease in one[1]]
    taken = {lease.worker for lease in leases}
    ids = {TRAINER: [f"trainer-{i}" for i in range(trainers)], ROLLOUT: [f"rollout-{i}" for i in range(rollouts)]}
    fields: dict[str, Any] = {
        "now": NOW,
        "jobs": [one[0] if isinstance(one, tuple) else one for one in jobs],
        "free": {pool: [id for id in found if id not in taken] for pool, found in ids.items()},
        "alive": {pool: len(found) for pool, found in ids.items()},
        "leases": leases,
    }
    return plan(View(**(fields | view)))


def started(found: Plan) -> list[str]:
    return [decision.job for decision in found.decisions if isinstance(decision, Start)]


def test_higher_priority_goes_first_and_then_the_older() -> None:
    jobs = [job("young", created=NOW), job("old", created=NOW - 99), job("high", created=NOW, priority=1)]
    assert started(planned(*jobs, trainers=2, rollouts=2)) == ["high", "old"]


def test_tenant_that_holds_least_for_its_weight_goes_first() -> None:
    running = held("r", "trainer-0", "rollout-0", tenant="busy"), held("s", "trainer-1", "rollout-1", tenant="heavy")
    waiting = job("b", tenant="busy", created=1), job("h", tenant="heavy", created=2), job("n", tenant="new", created=3)
    limits = {"heavy": TenantLimits(weight=4.0)}
    found = planned(*running, *waiting, trainers=4, rollouts=4, limits=limits)
    assert started(found) == ["n", "h"]
    assert found.waiting["b"] == "a free trainer; a free rollout worker"


def test_dominant_share_is_that_of_the_scarcer_pool() -> None:
    """One of two trainers is more than three of ten rollout workers."""
    served = held("s", "rollout-0", "rollout-1", "rollout-2", tenant="x", needs={ROLLOUT: 3})
    trains = held("t", "trainer-0", tenant="y", needs={TRAINER: 1}, most=0)
    waiting = job("b", tenant="y", created=1), job("a", tenant="x", created=2)
    assert started(planned(served, trains, *waiting, trainers=2, rollouts=10)) == ["a"]


def test_a_job_that_can_not_start_holds_nobody_back() -> None:
    large = job("large", needs={TRAINER: 1, ROLLOUT: 4}, created=1)
    other = held("o", "rollout-0", needs={ROLLOUT: 1})
    assert started(planned(large, other, job("small"), trainers=2, rollouts=4)) == ["small"]


def test_after_its_time_what_is_free_is_kept_for_the_large_job() -> None:
    large = job("large", needs={TRAINER: 1, ROLLOUT: 4}, created=1, since=NOW - 500)
    other = held("o", "rollout-0", needs={ROLLOUT: 1})
    found = planned(large, other, job("small"), trainers=2, rollouts=4)
    assert started(found) == []
    assert found.waiting["small"] == "a free rollout worker; what is free is kept for large, which waits longer"
    assert started(planned(large, other, job("small"), trainers=2, rollouts=5)) == ["large"]
    assert started(planned(large, other, job("small"), trainers=2, rollouts=3)) == ["small"], "it never fits"


def test_small_jobs_that_keep_coming_do_not_starve_the_large_one() -> None:
    """Each runs for 100 s; one comes every 10 s."""
    now, running = NOW, dict[str, tuple[Job, list[Held]]]()
    waiting = {"large": job("large", needs={ROLLOUT: 4}, created=NOW, since=NOW)}
    for number in range(100):
        now += 10
        waiting[f"s{number}"] = job(f"s{number}", needs={ROLLOUT: 1}, created=now, since=now)
        running = {id: (one, leases) for id, (one, leases) in running.items() if now - one.since < 100}
        found = planned(*running.values(), *waiting.values(), rollouts=4, now=now)
        for decision in found.decisions:
            assert isinstance(decision, Start)
            begun = waiting.pop(decision.job)
            running[begun.id] = held(begun.id, *decision.workers, needs=begun.needs, since=now)
        if "large" in running:
            break
    assert "large" in running and now - NOW <= Rules().reserve_after_s + 100 + 20


def test_quotas_of_jobs_workers_and_seconds() -> None:
    running = held("r", "trainer-0", "rollout-0")
    reasons: dict[str, dict[str, Any]] = {
        "its tenant's quota of 1 running jobs": {"limits": {"t": TenantLimits(running_jobs=1)}},
        "its tenant's quota of 3 workers": {"limits": {"*": TenantLimits(workers=3)}},
        "its tenant's quota of 50 GPU seconds a day, which is open again at midnight UTC": {
            "limits": {"t": TenantLimits(gpu_seconds_per_day=50)},
            "used": {"t": Used(90.0, 50.0)},
        },
    }
    for reason, view in reasons.items():
        found = planned(running, job("q"), job("other", tenant="u", created=NOW), trainers=3, rollouts=3, **view)
        assert found.waiting["q"] == reason
        assert started(found) == ["other"]


def test_what_is_lent_is_taken_back_from_who_has_most_and_kept_for_the_job() -> None:
    wide = held("w", "trainer-0", "rollout-0", "rollout-1", "rollout-2", most=3)
    found = planned(wide, job("n"), trainers=2, rollouts=3)
    assert [type(decision) for decision in found.decisions] == [TakeBack]
    leaving = (wide[0], [*wide[1][:3], Held("rollout-2", "w", ROLLOUT, leaving=True)])
    assert planned(leaving, job("n"), trainers=2, rollouts=3).decisions == [], "it is on its way"
    late = job("late", created=NOW, needs={ROLLOUT: 1})
    assert TakeBack("w", "rollout-1", "late") in planned(leaving, job("n"), late, trainers=2, rollouts=3).decisions


def test_left_over_rollout_workers_are_lent_evenly_and_within_quotas() -> None:
    a, b = held("a", "trainer-0", "rollout-0", most=4), held("b", "trainer-1", "rollout-1", most=4, tenant="u")
    found = planned(a, b, trainers=2, rollouts=6)
    assert Counter(d.job for d in found.decisions if isinstance(d, AddWorker)) == {"a": 2, "b": 2}
    found = planned(a, b, trainers=2, rollouts=6, limits={"u": TenantLimits(workers=3)})
    assert Counter(d.job for d in found.decisions if isinstance(d, AddWorker)) == {"a": 3, "b": 1}


def test_the_fewest_and_least_jobs_of_lower_priority_are_interrupted() -> None:
    low = held("low", "trainer-0", "rollout-0", priority=-1)
    recent = held("recent", "trainer-1", "rollout-1", since=NOW - 100)
    high = job("high", priority=1)
    found = planned(low, recent, high, trainers=2, rollouts=2)
    assert found.decisions == [Preempt("low", "high")]
    wide = job("wide", priority=1, needs={TRAINER: 1, ROLLOUT: 2})
    assert planned(low, recent, wide, trainers=2, rollouts=2).decisions == [
        Preempt("low", "wide"),
        Preempt("recent", "wide"),
    ]
    same = job("same", priority=-1)
    assert planned(low, recent, same, trainers=2, rollouts=2).decisions == [], "not for one of its own priority"
    fresh = held("fresh", "trainer-0", "rollout-0", priority=-1, since=NOW - 10)
    assert planned(fresh, high, trainers=1, rollouts=1).decisions == [], "it has just begun"
    assert planned(low, job("high", priority=1, since=NOW), trainers=1, rollouts=1).decisions == [], "it has just come"
    assert planned(low, high, trainers=1, rollouts=1, limits={"t": TenantLimits(workers=3)}).decisions == []


def test_lost_worker_is_replaced_before_anybody_starts_but_not_before_its_time() -> None:
    broken = held("b", "rollout-0")
    assert planned(broken, job("q"), trainers=1, rollouts=2).decisions[0] == AddWorker("b", "trainer-0", TRAINER)
    early = held("b", "rollout-0", retry_at=NOW + 5)
    found = planned(early, job("q"), trainers=1, rollouts=2)
    assert started(found) == ["q"] and "another try at" in found.waiting["b"]


def test_half_a_job_gives_way_to_one_that_waits_for_what_it_holds() -> None:
    a, b = held("a", "rollout-0", lost_at=NOW - 60), held("b", "trainer-0", lost_at=NOW - 60, created=NOW - 10)
    (decision,) = planned(a, b, trainers=1, rollouts=1).decisions
    assert isinstance(decision, Requeue) and decision.job == "b"
    assert planned(a, trainers=0, rollouts=1).decisions == [], "nobody wants it"


def test_thousand_queued_jobs_are_planned_in_good_time() -> None:
    jobs = [job(f"j{i}", tenant=f"t{i % 50}", created=NOW - i, priority=i % 3) for i in range(1000)]
    found = planned(*jobs, trainers=500, rollouts=500)
    assert len(started(found)) == 500
    assert Counter(d.job for d in found.decisions).most_common(1)[0][1] == 1


@pytest.mark.slow
def test_whatever_happens_no_job_is_stuck_and_no_worker_given_twice() -> None:
    """The long version: OPENTINKER_PLACEMENT_EVENTS=10000; OPENTINKER_PLACEMENT_SEEDS=0:20 does less of it."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for seed in SEEDS:
        model = Model(random.Random(seed))
        try:
            for _ in range(EVENTS):
                model.event()
                model.look()
            model.drain()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        counts += model.counts
    took_s = time.monotonic() - began
    print(f"{len(SEEDS)} seeds, {len(SEEDS) * EVENTS} events, {took_s:.1f} s: {dict(sorted(counts.items()))}")
    assert all(counts[kind] for kind in ("Start", "AddWorker", "TakeBack", "Preempt", "Requeue")), counts
