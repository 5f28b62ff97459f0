"""Placement: single rules, and a cluster on a fake clock in which anything may happen."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

from opentinker.services.scheduler.placement import planner
from opentinker.services.scheduler.placement.quotas import Used
from opentinker.services.scheduler.placement.types import (
    AddTrainers,
    AddWorker,
    Held,
    PlannedJob,
    Preempt,
    Reclaim,
    Requeue,
    Rules,
    Sleep,
    Start,
)
from opentinker.shared.tenant_limits import TenantLimits
from tests.support.placement.model import Model
from tests.unit.scheduler.placing import NOW, ROLLOUT, TRAINER, held, job, planned, started

SEEDS = range(*map(int, os.environ.get("OPENTINKER_PLACEMENT_SEEDS", "0:500").split(":")))
EVENTS = int(os.environ.get("OPENTINKER_PLACEMENT_EVENTS", "1000"))
"""Of each seed, but 10,000 of every 25th."""
BLOCK = 50


def test_higher_priority_goes_first_and_then_the_older() -> None:
    jobs = [job("young", created=NOW), job("old", created=NOW - 99), job("high", created=NOW, priority=1)]
    assert started(planned(*jobs, trainers=2, rollouts=2)) == ["high", "old"]


def test_tenant_that_holds_least_for_its_weight_goes_first() -> None:
    running = held("r", "trainer-0", "rollout-0", tenant="busy"), held("s", "trainer-1", "rollout-1", tenant="heavy")
    waiting = job("b", tenant="busy", created=1), job("h", tenant="heavy", created=2), job("n", tenant="new", created=3)
    limits = {"heavy": TenantLimits(weight=4.0)}
    found = planned(*running, *waiting, trainers=4, rollouts=4, limits=limits)
    assert started(found) == ["n", "h"]
    assert found.waiting["b"] == "a free trainer and a free rollout worker (held by job r and 1 more)"


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
    assert found.waiting["small"] == (
        "a free rollout worker (held by job o); what is free is kept for large, which waits longer"
    )
    assert started(planned(large, other, job("small"), trainers=2, rollouts=5)) == ["large"]
    assert started(planned(large, other, job("small"), trainers=2, rollouts=3)) == ["small"], "it never fits"


def test_small_jobs_that_keep_coming_do_not_starve_the_large_one() -> None:
    """Each runs for 100 s; one comes every 10 s."""
    now, running = NOW, dict[str, tuple[PlannedJob, list[Held]]]()
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
    assert [type(decision) for decision in found.decisions] == [Reclaim]
    leaving = (wide[0], [*wide[1][:3], Held("rollout-2", "w", ROLLOUT, leaving=True)])
    assert planned(leaving, job("n"), trainers=2, rollouts=3).decisions == [], "it is on its way"
    late = job("late", created=NOW, needs={ROLLOUT: 1})
    assert Reclaim("w", "rollout-1", "late") in planned(leaving, job("n"), late, trainers=2, rollouts=3).decisions


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
    assert planned(broken, job("q"), trainers=1, rollouts=2).decisions[0] == AddTrainers("b", ("trainer-0",))
    early = held("b", "rollout-0", retry_at=NOW + 5)
    found = planned(early, job("q"), trainers=1, rollouts=2)
    assert started(found) == ["q"] and "another try at" in found.waiting["b"]


def test_half_a_job_gives_way_to_one_that_waits_for_what_it_holds() -> None:
    a, b = held("a", "rollout-0", lost_at=NOW - 60), held("b", "trainer-0", lost_at=NOW - 60, created=NOW - 10)
    (decision,) = planned(a, b, trainers=1, rollouts=1).decisions
    assert isinstance(decision, Requeue) and decision.job == "b"
    assert planned(a, trainers=0, rollouts=1).decisions == [], "nobody wants it"


def endpoint(id: str, *workers: str, **changes: Any) -> tuple[PlannedJob, list[Held]]:
    """An inference job that runs."""
    return held(id, *workers, **{"kind": "inference", "needs": {ROLLOUT: 1}, **changes})


def test_an_idle_inference_job_lends_its_worker_to_a_job_of_its_own_priority() -> None:
    idle, busy = endpoint("idle", "rollout-0", idle=True), endpoint("busy", "rollout-1")
    found = planned(idle, busy, job("rl"), trainers=1, rollouts=2)
    assert found.decisions == [Sleep("idle", "rl")]
    assert planned(endpoint("busy", "rollout-0"), job("rl"), trainers=1, rollouts=1).decisions == []


def test_an_idle_inference_job_lends_nothing_to_a_job_of_lower_priority_nor_to_one_that_has_just_come() -> None:
    idle = endpoint("idle", "rollout-0", idle=True, priority=1)
    assert planned(idle, job("rl"), trainers=1, rollouts=1).decisions == []
    assert planned(idle, job("rl", priority=1, since=NOW), trainers=1, rollouts=1).decisions == []
    assert planned(idle, job("rl", priority=1), trainers=1, rollouts=1).decisions == [Sleep("idle", "rl")]


def test_idle_inference_jobs_go_before_jobs_of_lower_priority_are_interrupted() -> None:
    low = held("low", "trainer-0", "rollout-0", priority=-1)
    idle = endpoint("idle", "rollout-1", idle=True)
    found = planned(low, idle, job("rl"), trainers=2, rollouts=2)
    assert found.decisions == [Sleep("idle", "rl")]


def test_a_waiting_job_says_who_holds_what_it_needs() -> None:
    found = planned(endpoint("chat", "rollout-0"), job("rl"), trainers=1, rollouts=1)
    assert found.waiting["rl"] == (
        "a free rollout worker (held by inference job chat; cancel it or add a rollout worker)"
    )
    lends = planned(endpoint("chat", "rollout-0"), job("rl"), trainers=1, rollouts=1, rules=Rules(inference_lend_s=120))
    assert lends.waiting["rl"] == (
        "a free rollout worker (held by inference job chat; cancel it or add a rollout worker; "
        "an inference job lends its workers after 120 s without requests)"
    )
    above = endpoint("chat", "rollout-0", priority=1)
    never = planned(above, job("rl"), trainers=1, rollouts=1, rules=Rules(inference_lend_s=120))
    assert never.waiting["rl"] == found.waiting["rl"]


def test_jobs_of_who_has_used_up_the_day_go_back_to_the_queue() -> None:
    limits, used = {"t": TenantLimits(gpu_seconds_per_day=50)}, {"t": Used(90.0, 50.0)}
    running = held("r", "trainer-0", "rollout-0", "rollout-1", most=2)
    other = job("other", tenant="u")
    found = planned(running, other, trainers=1, rollouts=2, limits=limits, used=used)
    why = "its tenant's quota of 50 GPU seconds a day, which is open again at midnight UTC"
    assert found.decisions == [Requeue("r", why)] and found.waiting["r"] == why
    assert found.waiting["other"] == ("a free trainer and a free rollout worker (held by a job of another tenant)")
    full = {"t": TenantLimits(stored_gb=1)}
    assert not planned(running, trainers=1, rollouts=2, limits=full, used={"t": Used(stored=2 * 10**9)}).decisions


def test_nobody_is_told_which_job_of_another_tenant_it_is() -> None:
    large = job("j-blue", tenant="blue", needs={TRAINER: 1, ROLLOUT: 4}, priority=1, since=NOW - 500)
    other = held("o", "rollout-0", needs={ROLLOUT: 1}, tenant="blue", priority=1)
    mine, theirs = job("mine", tenant="red"), job("theirs", tenant="blue")
    found = planned(large, other, mine, theirs, trainers=3, rollouts=4)
    assert found.waiting["mine"].endswith("kept for a job of another tenant, which waits longer")
    assert found.waiting["theirs"].endswith("kept for j-blue, which waits longer")
    a = held("j-a", "rollout-0", lost_at=NOW - 60, tenant="red")
    b = held("j-b", "trainer-0", lost_at=NOW - 60, created=NOW - 10, tenant="blue")
    (decision,) = planned(a, b, trainers=1, rollouts=1).decisions
    assert isinstance(decision, Requeue)
    assert decision.why == "it lacks a rollout worker, and a job of another tenant waits for what it holds"


def test_what_is_lent_and_owed_to_who_waits_longer_stays_where_it_is() -> None:
    """Else the one behind takes it back, the one before has it then, it is lent again, and so on without end."""
    elastic, leases = held("e", "trainer-0", "rollout-0", most=9)
    queue = [
        job("large", needs={TRAINER: 1, ROLLOUT: 4}, created=1, since=NOW - 500, tenant="u"),
        job("small", needs={ROLLOUT: 1}, created=2, tenant="u"),
    ]
    kinds: Counter[str] = Counter()
    for look in range(60):
        for decision in planned((elastic, leases), *queue, trainers=1, rollouts=5, now=NOW + look).decisions:
            kinds[type(decision).__name__] += 1
            if isinstance(decision, AddWorker):
                leases = [*leases, Held(decision.worker, decision.job, decision.pool)]
            elif isinstance(decision, Reclaim):
                leases = [lease for lease in leases if lease.worker != decision.worker]
    assert kinds == {"AddWorker": 4}, "what is kept is lent once"
    found = planned((elastic, [*leases, Held("rollout-5", "e", ROLLOUT)]), *queue, trainers=1, rollouts=6)
    assert [(d.job, d.wanted_by) for d in found.decisions if isinstance(d, Reclaim)] == [("e", "small")]
    found = planned((elastic, leases), *queue, trainers=2, rollouts=5)
    assert {d.wanted_by for d in found.decisions if isinstance(d, Reclaim)} == {"large"}
    assert sum(isinstance(d, Reclaim) for d in found.decisions) == 4, "with a trainer it comes to who waits longer"


def test_what_is_owed_comes_back_where_a_quota_has_no_room_for_it() -> None:
    elastic = held("e", "trainer-0", "rollout-0", "rollout-1", most=9)
    other = held("o", "rollout-2", needs={ROLLOUT: 1}, tenant="v")
    large = job("large", needs={TRAINER: 1, ROLLOUT: 2}, created=1, since=NOW - 500, tenant="u")
    behind = job("behind", needs={TRAINER: 1}, most=0)
    limits = {"t": TenantLimits(workers=3)}
    found = planned(elastic, other, large, behind, trainers=3, rollouts=3, limits=limits)
    assert found.decisions == [Reclaim("e", "rollout-1", "behind"), Start("behind", ("trainer-2",))]


def test_the_queue_is_looked_at_once_however_many_jobs_lack_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def counted(*args: Any) -> str:
        said.append(args[0].id)
        return "too few"

    monkeypatch.setattr(planner, "too_few", counted)
    broken = [held(f"b{i}", f"rollout-{i}", lost_at=NOW - 60, retry_at=NOW + 60) for i in range(20)]
    queue = [job(f"q{i}") for i in range(30)]
    found = planned(*broken, *queue, rollouts=20)
    assert not found.decisions
    assert sorted(said) == sorted(one.id for one in queue), "each once, for its own words"


def test_thousand_queued_jobs_are_planned_in_good_time() -> None:
    jobs = [job(f"j{i}", tenant=f"t{i % 50}", created=NOW - i, priority=i % 3) for i in range(1000)]
    found = planned(*jobs, trainers=500, rollouts=500)
    assert len(started(found)) == 500
    assert Counter(d.job for d in found.decisions).most_common(1)[0][1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "longest"),
    [(SEEDS[0], EVENTS), *(pytest.param(seed, 10_000, marks=pytest.mark.nightly) for seed in SEEDS[::BLOCK])],
)
def test_whatever_happens_no_job_is_stuck_and_no_worker_given_twice(first: int, longest: int) -> None:
    """10,000 events of all seeds: `make simulation`. OPENTINKER_PLACEMENT_SEEDS=0:20 plays some of them."""
    counts: Counter[str] = Counter()
    seeds = range(first, min(first + BLOCK, SEEDS.stop))
    began, played = time.monotonic(), 0
    for seed in seeds:
        model = Model(random.Random(seed), with_gpus=seed % 3 == 1)
        events = max(EVENTS, longest) if seed % 25 == 0 else EVENTS
        try:
            for _ in range(events):
                model.event()
                model.look()
            model.drain()
        except AssertionError as error:
            error.add_note(f"seed {seed}, look {model.looks}")
            raise
        counts += model.counts
        played += events
    took_s = time.monotonic() - began
    print(f"seeds {seeds.start}:{seeds.stop}, {played} events, {took_s:.1f} s: {dict(sorted(counts.items()))}")
    assert all(counts[kind] for kind in ("Start", "AddWorker", "Reclaim", "Preempt", "Requeue")), counts
