"""Admission of matches whose seats are played by several policies."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Discard, Ending
from opentinker.shared.types.errors import Fenced
from tests.integration.shared.staleness.admissions import pair, policy


async def test_a_match_starts_only_while_every_policy_has_room(store: Store) -> None:
    a, b = await pair(store, "two")
    assert (await a.issue(50))[1] == [0, 1, 2, 3]  # b: 2 versions of 2 groups; a alone would have room for 8
    assert (await b.issue(50))[1] == []
    for seq in range(4):
        assert await a.accept(seq) == "ok"
        assert await b.accept(seq) == "p"  # one acceptance is for all
    assert await b.train(1, [0, 1]) == 2
    await b.set_version(1)
    assert (await a.issue(50))[1] == [4, 5]
    assert await a.train(1, [0, 1, 2, 3]) == 4
    assert [(x.trained, x.pending, x.running, x.balanced) for x in [await a.ledger(), await b.ledger()]] == [
        (4, 0, 2, True),
        (2, 2, 2, True),
    ]


@pytest.mark.parametrize("gate", ["all", "fastest"])
async def test_no_match_starts_before_the_last_policy_is_restored(store: Store, gate: Any) -> None:
    a = await policy(store, f"half-{gate}", "a", step=3, gate=gate)
    assert (await a.issue(5))[1] == []


async def test_a_failed_match_is_void_for_all(store: Store) -> None:
    a, b = await pair(store, "void")
    await a.issue(1)
    assert await b.fail(0, Ending.ENV_ERROR) == (1, 0)
    assert await a.accept(0) == await b.accept(0) == "unknown"
    for one in (a, b):
        ledger = await one.ledger()
        assert (ledger.running, ledger.failed) == (0, {"env_error": 1}) and ledger.balanced


async def test_a_finished_policy_gates_no_match_and_counts_what_is_over_as_surplus(store: Store) -> None:
    a, b = await pair(store, "over", total=4)
    assert (await a.issue(9))[1] == [0, 1, 2, 3]
    for seq in range(4):
        await a.accept(seq)
    assert await a.discard(1, Discard.STALE, [0]) == 1  # a needs one more match than b
    assert await b.train(1, [0, 1]) == await b.train(2, [2, 3]) == 2
    await b.set_version(2)
    assert (await a.issue(9))[1] == [4], "b has had all that it may, and evaluates its last weights"
    assert await b.accept(4) == "ok"
    assert await b.finish(Discard.SURPLUS) == 1
    assert await b.accept(4) == "unknown" and await a.accept(4) == "p"
    assert await a.discard(1, Discard.STALE, [4]) == 1
    assert (await a.issue(9))[1] == [5]
    assert await b.accept(5) == "unknown" and await a.accept(5) == "p"
    assert await a.train(1, [1, 2, 3, 5]) == 4
    assert (await a.ledger()).balanced and (await b.ledger()).balanced


async def test_a_finished_policy_s_ledger_keeps_its_surplus_when_the_trainer_restarts(store: Store) -> None:
    a, b = await pair(store, "kept", total=4)
    await a.issue(9)
    for seq in range(4):
        await a.accept(seq)
    await a.discard(1, Discard.STALE, [0])
    await b.train(1, [0, 1])
    await b.discard(2, Discard.STALE, [2])
    await b.finish(Discard.SURPLUS)
    before = await b.ledger()
    assert (before.accepted, before.discarded, before.balanced) == (4, {"stale": 1, "surplus": 1}, True)
    for epoch in (2, 3):  # its last checkpoint is of step 1
        b = await policy(store, "kept", "b", epoch, step=1, groups_per_batch=2, total=4)
        ledger = await b.ledger()
        assert ledger.balanced and ledger.discarded["surplus"] == epoch - 1, "what it had undone, it discards again"
        await b.finish(Discard.SURPLUS)
        ledger = await b.ledger()
        assert (ledger.accepted, sum(ledger.discarded.values()), ledger.balanced) == (4, 2, True)
    b = await policy(store, "kept", "b", 4, groups_per_batch=2, total=4)  # the checkpoint of step 1 is damaged
    assert (await b.ledger()).discarded == {} and (await b.ledger()).balanced


async def test_what_a_resting_policy_discards_after_its_checkpoint_stays_discarded(store: Store) -> None:
    a, _ = await pair(store, "rests", max_staleness=9)
    await a.issue(20)
    for seq in range(12):
        await a.accept(seq)
    await a.train(1, [0, 1, 2, 3])
    await a.discard(1, Discard.RESTING, [4])  # the last that the checkpoint of step 1 has
    await a.discard(1, Discard.RESTING, [5, 6])
    await a.discard(2, Discard.STALE, [7])
    law: dict[str, Any] = {"max_staleness": 9}
    for epoch in (2, 3):  # the second time with what the trainer of epoch 2 has saved
        a = await policy(store, "rests", "a", epoch, step=1, discarded={"resting": 1 if epoch == 2 else 3}, **law)
        ledger = await a.ledger()
        assert ledger.balanced and (ledger.accepted, ledger.pending, ledger.discarded) == (12, 5, {"resting": 3})
    a = await policy(store, "rests", "a", 4, **law)  # the checkpoint of step 1 is damaged
    ledger = await a.ledger()
    assert ledger.balanced and (ledger.accepted, ledger.discarded) == (12, {"resting": 0})
    await store.redis.delete("adm:rests~a", "adm:rests~a:groups")
    a = await policy(store, "rests", "a", 5, step=1, discarded={"resting": 3}, **law)
    assert (await a.ledger()).discarded == {"resting": 3}, "the checkpoint knows what Redis has lost"


async def test_policies_go_back_to_checkpoints_of_their_own(store: Store) -> None:
    a, b = await pair(store, "back")
    await a.issue(4)
    for seq in range(4):
        await a.accept(seq)
    await a.train(1, [0, 1, 2, 3])
    await b.train(1, [0, 1])
    second = await policy(store, "back", "a", 2), await policy(store, "back", "b", 2, step=1, groups_per_batch=2)
    ledgers = [await one.ledger() for one in second]
    assert [(x.trained, x.pending) for x in ledgers] == [(0, 4), (2, 2)] and all(x.balanced for x in ledgers)
    with pytest.raises(Fenced):
        await a.train(1, [0])
