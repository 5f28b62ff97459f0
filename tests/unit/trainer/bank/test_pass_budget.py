"""Passes are as large as allowed, or short while several tenants send."""

from __future__ import annotations

import pytest

from opentinker.services.trainer.bank.fair_queue import FairQueue, Waiting
from opentinker.services.trainer.bank.pass_budget import RECENT_S, SHARED_PASS_S, SMALLEST, PassBudget


def test_a_tenant_alone_has_the_whole_pass_and_several_have_a_short_one() -> None:
    now = 0.0
    budget = PassBudget(8192, clock=lambda: now)
    budget.sent("a")
    assert budget.tokens([]) == 8192
    budget.sent("b")
    assert budget.tokens([]) == SMALLEST  # no speed is known
    budget.passed(1000, 0.1)
    assert budget.tokens([]) == int(10_000 * SHARED_PASS_S)
    for _ in range(50):
        budget.passed(100_000, 0.1)
    assert budget.tokens([]) == 8192
    for _ in range(50):
        budget.passed(100, 1.0)
    assert budget.tokens([]) == SMALLEST
    now = RECENT_S
    budget.sent("a")
    assert budget.tokens([]) == budget.tokens(["a"]) == 8192
    assert budget.tokens(["a", "b"]) == SMALLEST  # b sent long ago, and its command is still in the queue


def test_a_row_that_is_larger_than_the_pass_has_one_to_itself() -> None:
    queue = FairQueue[int](1000, quantum=100)
    for number, tenant in enumerate("abc"):
        queue.push(Waiting(tenant, tenant, number, [900] if tenant == "a" else [50, 50, 50]))
    seen = []
    while len(queue):
        taken = queue.take(256, 8)
        seen.append({waiting.tenant: count for waiting, count in taken})
        for waiting, _ in taken:
            if waiting.taken == len(waiting.units):
                queue.finish(waiting)
    assert {"a": 1} in seen and sum(one.get("b", 0) for one in seen) == 3


def test_a_flood_leaves_most_of_a_short_pass_to_others() -> None:
    queue = FairQueue[int](1000, quantum=100)
    queue.push(Waiting("flood", "f", 0, [100] * 1000))
    for number in range(3):
        queue.push(Waiting(f"t{number}", f"t{number}", 1 + number, [100] * 10))
    for _ in range(4):
        taken = {waiting.tenant: count for waiting, count in queue.take(800, 8)}
        assert taken == {"flood": 2, "t0": 2, "t1": 2, "t2": 2}


@pytest.mark.parametrize(("slots", "others", "models"), [(2, 2, 1), (8, 1, 12)])
def test_a_large_row_gets_its_turn_although_others_take_the_slots(slots: int, others: int, models: int) -> None:
    queue = FairQueue[int](8192, quantum=128)
    queue.push(Waiting("large", "l", 0, [2048]))
    for tenant in range(others):
        for model in range(models):
            queue.push(Waiting(f"t{tenant}", f"t{tenant}m{model}", 1, [100] * 10_000))
    for _ in range(200):
        if any(waiting.tenant == "large" for waiting, _ in queue.take(1024, slots)):
            return
    raise AssertionError("it waits for ever")
