"""Tenants get equal shares of tokens for data of any sizes; order is kept; every command gets its turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.services.trainer.bank.fair_queue import FairQueue, Waiting
from opentinker.services.trainer.bank.tenant_totals import MOST_TENANTS

QUANTUM, PASS = 32, 100
UNITS = st.lists(st.integers(1, QUANTUM), min_size=1, max_size=12)
COMMANDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), UNITS), min_size=1, max_size=25)


def queue_of(commands: list[tuple[int, int, list[int]]], alone: int = -1, quantum: int = QUANTUM) -> FairQueue[int]:
    """`alone`: tenant whose units share no pass."""
    queue = FairQueue[int](QUANTUM, quantum)
    for number, (tenant, adapter, units) in enumerate(commands):
        queue.push(Waiting(f"t{tenant}", f"t{tenant}a{adapter}", number, units, tenant == alone))
    return queue


def finish_taken(queue: FairQueue[int], taken: list[tuple[Waiting[int], int]]) -> None:
    for waiting, _ in taken:
        if waiting.taken == len(waiting.units):
            queue.finish(waiting)


@given(commands=COMMANDS, adapters=st.integers(1, 4), alone=st.integers(-1, 4), quantum=st.sampled_from([2, QUANTUM]))
@settings(max_examples=60, deadline=None)
def test_everything_is_taken_once_in_order_and_within_bounds(
    commands: list[tuple[int, int, list[int]]], adapters: int, alone: int, quantum: int
) -> None:
    queue, order = queue_of(commands, alone, quantum), list[int]()
    taken_units = Counter[int]()
    for _ in range(sum(len(u) for *_, u in commands)):
        taken = queue.take(PASS, adapters)
        sizes = [sum(w.units[w.taken - count : w.taken]) for w, count in taken]
        assert taken and 0 < sum(sizes) <= PASS
        assert len({w.adapter for w, _ in taken}) == len(taken) <= adapters
        if any(waiting.alone for waiting, _ in taken):
            assert [count for _, count in taken] == [1]
        for waiting, count in taken:
            taken_units[waiting.command] += count
            if waiting.taken == len(waiting.units):
                order.append(waiting.command)
        finish_taken(queue, taken)
        if not len(queue):
            break
    assert not len(queue) and queue.tokens() == 0
    assert taken_units == {number: len(u) for number, (*_, u) in enumerate(commands)}
    for tenant in range(5):
        for adapter in range(2):
            own = [n for n in order if commands[n][:2] == (tenant, adapter)]
            assert own == sorted(own)


@given(sizes=st.lists(st.integers(1, QUANTUM), min_size=2, max_size=5), passes=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_shares_of_busy_tenants_differ_by_at_most_a_turn(sizes: list[int], passes: int) -> None:
    """The bound of the paper: the quantum and twice the largest unit, however long it takes."""
    queue = queue_of([(n, 0, [size] * (passes * PASS // size + 1)) for n, size in enumerate(sizes)])
    served = Counter[str]()
    for _ in range(passes):
        for waiting, count in queue.take(PASS, len(sizes)):
            served[waiting.tenant] += sum(waiting.units[waiting.taken - count : waiting.taken])
    shares = [served[f"t{n}"] for n in range(len(sizes))]
    assert max(shares) - min(shares) <= QUANTUM + 2 * QUANTUM
    assert sum(shares) > passes * (PASS - QUANTUM)


@pytest.mark.parametrize("quantum", [2, QUANTUM])
def test_a_tenant_whose_units_share_no_pass_has_its_share(quantum: int) -> None:
    """And passes of the others are not cut short by its turns."""
    queue = queue_of([(n, 0, [20 + n] * 2000) for n in range(3)], 1, quantum)
    served, mixed = Counter[str](), list[int]()
    for _ in range(200):
        taken = queue.take(PASS, 8)
        sizes = [sum(waiting.units[waiting.taken - count : waiting.taken]) for waiting, count in taken]
        for (waiting, _), size in zip(taken, sizes, strict=True):
            served[waiting.tenant] += size
        if not taken[0][0].alone:
            mixed.append(sum(sizes))
    assert max(served.values()) - min(served.values()) <= 3 * QUANTUM
    assert min(mixed) > PASS - 22 - quantum


def test_a_flood_does_not_delay_a_small_command() -> None:
    queue = queue_of([(0, 0, [QUANTUM] * 1000), (1, 0, [5])])
    (flood, _), (small, count) = queue.take(PASS, 8)
    assert (flood.tenant, small.tenant, count) == ("t0", "t1", 1)


def test_tenants_without_a_slot_are_first_in_the_next_pass() -> None:
    queue = queue_of([(n, 0, [10] * 1000) for n in range(5)])
    seen = [{w.tenant for w, _ in queue.take(PASS, 2)} for _ in range(5)]
    assert all(len(tenants) == 2 for tenants in seen)
    for first in range(3):
        assert len(set[str]().union(*seen[first : first + 3])) == 5


def test_a_step_holds_back_later_commands_of_its_adapter_alone() -> None:
    queue = queue_of([(0, 0, []), (0, 0, [5]), (0, 1, [7])])
    assert [(w.command, count) for w, count in queue.take(PASS, 8)] == [(2, 1)]
    (step,) = [w for w in queue.heads() if not w.units]
    queue.finish(step)
    assert [(w.command, count) for w, count in queue.take(PASS, 8)] == [(1, 1)]


def test_turns_with_steps_are_remembered_of_the_latest_tenants() -> None:
    queue = FairQueue[int](QUANTUM)
    for number in range(MOST_TENANTS + 3):
        queue.push(Waiting(f"t{number}", f"a{number}", 0, []))
        (step,) = queue.steps(1)
        queue.finish(step)
    assert len(queue._last_steps) == MOST_TENANTS and f"t{MOST_TENANTS + 2}" in queue._last_steps


def test_tenants_take_turns_with_steps() -> None:
    queue = FairQueue[int](QUANTUM)
    for adapter in range(4):
        for number in range(2):
            queue.push(Waiting("many", f"m{adapter}", number, []))
    queue.push(Waiting("one", "o", 0, []))
    queue.push(Waiting("late", "l", 0, []))
    served = []
    for _ in range(3):
        (step,) = queue.steps(1)
        queue.finish(step)
        served.append(step.tenant)
    assert sorted(served) == ["late", "many", "one"]
    queue.push(Waiting("one", "o", 1, []))
    assert [step.tenant for step in queue.steps(3)] == ["many", "one", "many"]


def test_a_unit_above_the_quantum_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="more than 32 tokens"):
        queue_of([(0, 0, [33])])
