"""Admission where policies train in turns, in lockstep or at different speeds."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Discard
from tests.integration.shared.staleness.admissions import pair, policy


async def scheduled(store: Store, job: str, **changes: Any) -> tuple[Admission, Admission]:
    return await pair(store, job, (2, 2), **{"max_staleness": 0, **changes})


async def play(one: Admission) -> list[int]:
    """Play what may start."""
    seqs = (await one.issue(50))[1]
    for seq in seqs:
        await one.accept(seq)
    return seqs


async def test_the_fastest_gates_alone(store: Store) -> None:
    a, b = await scheduled(store, "drop", gate="fastest")
    assert await play(a) == [0, 1], "both are as fast"
    assert await a.train(1, [0, 1]) == 2
    assert await play(a) == [], "its new version is not served"
    await a.set_version(1)
    assert await play(a) == [2, 3]
    await a.train(2, [2, 3])
    await a.set_version(2)
    assert await play(b) == [4, 5], "whoever asks"
    assert (await b.ledger()).pending == 6
    assert await b.discard(1, Discard.SURPLUS, [0, 1]) == 2 and await play(b) == []
    assert await a.finish(Discard.SURPLUS) == 2
    assert await b.train(1, [2, 3]) == 2
    await b.set_version(1)
    assert await play(b) == [], "alone it gates itself: two more are pending"
    assert await b.train(2, [4, 5]) == 2
    await b.set_version(2)
    assert await play(b) == [6, 7]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_a_step_of_several_batches_counts_as_one(store: Store) -> None:
    a, b = await scheduled(store, "grow", gate="fastest")
    for step in (1, 2, 3):
        await a.train(step, await play(a))
        await a.set_version(step)
    assert await b.train(1, [0, 1, 2, 3, 4, 5]) == 6
    await b.set_version(1)
    ledger = await b.ledger()
    assert (ledger.trained, ledger.pending, ledger.balanced) == (6, 0, True)
    await a.finish(Discard.SURPLUS)
    assert await play(b) == [6, 7], "room for a batch after one step, not after three"
    again = await policy(store, "grow", "b", 2, step=1, trained=6, gate="fastest", max_staleness=0, groups_per_batch=2)
    ledger = await again.ledger()
    assert (ledger.trained, ledger.pending, ledger.balanced) == (6, 2, True)
    assert await again.train(2, [6, 7]) == 2
    await again.set_version(2)
    assert await play(again) == [8, 9]


async def test_only_the_policy_whose_turn_it_is_gates_and_starts_no_more_than_its_turn_needs(store: Store) -> None:
    a, b = await scheduled(store, "turns", gate="turn", turn=2, max_staleness=5)
    assert await play(b) == [0, 1, 2, 3], "two steps, though its staleness allows more"
    assert await b.discard(1, Discard.RESTING, [0, 1, 2, 3]) == 4
    assert await play(a) == []
    await a.train(1, [0, 1])
    await a.train(2, [2, 3])
    await a.set_version(1)
    assert await play(a) == [], "the last version of its turn is not served"
    await a.set_version(2)
    assert await play(a) == [4, 5, 6, 7]
    assert await a.discard(3, Discard.RESTING, [4, 5, 6, 7]) == 4
    await b.train(1, [4, 5])
    await b.train(2, [6, 7])
    await b.set_version(2)
    assert await play(a) == [8, 9, 10, 11]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_in_lockstep_the_one_that_lacks_matches_gates(store: Store) -> None:
    a, b = await scheduled(store, "step", gate="neediest")
    assert await play(a) == [0, 1]
    assert await a.discard(1, Discard.ABSENT, [0]) == 1
    assert await play(b) == [2], "b has all it needs, a lacks one"
    assert await b.train(1, [0, 1]) == 2 and await b.discard(2, Discard.STALE, [2]) == 1
    assert await a.train(1, [1, 2]) == 2
    await a.set_version(1)
    await b.set_version(1)
    assert await play(a) == [3, 4]


async def test_in_lockstep_nothing_starts_while_only_one_new_version_is_served(store: Store) -> None:
    a, b = await scheduled(store, "swap", gate="neediest")
    seqs = await play(a)
    await a.train(1, seqs)
    await b.train(1, seqs)
    await a.set_version(1)
    assert await play(a) == [], "b still plays with its version 0"
    await b.set_version(1)
    assert await play(a) == [2, 3]


@pytest.mark.parametrize(("gate", "turn"), [("all", 0), ("fastest", 0), ("turn", 1), ("neediest", 0)])
async def test_a_policy_that_has_trained_all_its_groups_gates_no_longer(store: Store, gate: Any, turn: int) -> None:
    """Its last evaluation may take long; `finish` comes after that."""
    law: dict[str, Any] = {"max_staleness": 0, "groups_per_batch": 2, "gate": gate, "turn": turn}
    a, b = [await policy(store, f"last-{gate}", name, total=total, **law) for name, total in (("a", 2), ("b", 8))]
    first = await play(a)
    assert first == [0, 1]
    await a.train(1, first)
    await a.set_version(1)
    if gate != "turn":
        await b.train(1, first)
        await b.set_version(1)
    else:
        await b.discard(0, Discard.RESTING, first)
    assert await play(b) == [2, 3]
    assert (await a.ledger()).balanced and (await b.ledger()).balanced
