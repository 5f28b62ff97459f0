"""Admission of groups by the staleness law, and the ledger in Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opentinker.shared.state.admission import Admission
from opentinker.shared.state.staleness import MAX_OPEN
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import Discard, Ending, JobState
from tests.integration.shared.staleness.admissions import restored
from tests.support.scheduling import new_job


async def admission(store: Store, job: str, epoch: int = 1, **changes: Any) -> Admission:
    return await restored(Admission(store.redis, job, epoch), **changes)


async def test_nothing_is_issued_before_the_trainer_has_started(store: Store) -> None:
    assert (await Admission(store.redis, "none").issue(5))[1] == []


async def test_only_a_trainer_restores(store: Store) -> None:
    with pytest.raises(ValueError, match="epoch"):
        await admission(store, "j", epoch=-1)


async def test_used_group_numbers_stay_used_when_redis_lost_them(store: Store) -> None:
    ours = await admission(store, "j", next_seq=17)
    assert (await ours.issue(2))[1] == [17, 18]


async def test_a_lost_reply_repeats_no_operation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats a command whose reply it lost: the answer and the effect are those of the first time."""
    ours = await admission(store, "j")
    once = ours._script

    async def twice(**call: Any) -> Any:
        await once(**call)
        return await once(**call)

    monkeypatch.setattr(ours, "_script", twice)
    assert (await ours.issue(3))[1] == [0, 1, 2]
    assert await ours.accept(0) == "ok"
    assert await ours.accept(1) == "ok"
    assert await ours.fail(2, Ending.ENV_ERROR) == (1, 2)
    assert await ours.train(1, [0]) == 1
    assert await ours.discard(1, Discard.INVALID, [1]) == 1
    ledger = await ours.ledger()
    assert (ledger.issued, ledger.running, ledger.trained, ledger.pending, ledger.accepted) == (3, 0, 1, 0, 2)
    assert ledger.balanced


async def test_an_operation_that_does_nothing_writes_nothing(store: Store) -> None:
    """The ticket loop asks for room five times a second per job: no key, and no line in the log on the disk."""
    ours = await admission(store, "j", total=1)
    assert (await ours.issue(5))[1] == [0]
    assert await ours.accept(0) == "ok"

    async def written() -> tuple[int, int]:
        return await store.redis.dbsize(), (await store.redis.info("persistence"))["rdb_changes_since_last_save"]

    before = await written()
    assert (await ours.issue(5))[1] == []
    assert await ours.accept(0) == "p" and await ours.accept(9) == "unknown"
    assert await ours.fail(0, Ending.ENV_ERROR) is None
    assert await ours.train(1, [9]) == 0
    assert await written() == before


async def test_cleared_job_keeps_its_ledger(store: Store) -> None:
    ours = await admission(store, "j")
    await ours.issue(4)
    await ours.accept(0)
    await ours.fail(1, Ending.ENV_ERROR)
    before = await ours.ledger()
    await ours.clear()
    assert await ours.ledger() == before and before.balanced
    assert await ours.running() == [] and await ours.accept(1) == "unknown"
    assert (await ours.issue(1))[1] == [], "a cleared job starts nothing, however much room its law leaves"


async def test_concurrent_issue_never_exceeds_the_law(store: Store) -> None:
    ours = await admission(store, "j")
    got = await asyncio.gather(*(Admission(store.redis, "j").issue(3) for _ in range(20)))
    seqs = [seq for _, some in got for seq in some]
    assert sorted(seqs) == list(range(8))
    assert (await ours.ledger()).running == 8


async def test_open_groups_have_a_bound_whatever_the_law_allows(store: Store) -> None:
    ours = await admission(store, "j", groups_per_batch=2**31, total=2**40)
    assert (await ours.issue(MAX_OPEN - 1))[1] == list(range(MAX_OPEN - 1))
    assert (await ours.issue(64))[1] == [MAX_OPEN - 1]
    assert (await ours.issue(64))[1] == []
    await ours.accept(0)
    await ours.fail(1, Ending.ENV_ERROR)
    assert (await ours.issue(64))[1] == [MAX_OPEN, MAX_OPEN + 1], "each that ends makes room for another"


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.PAUSED, JobState.CANCELLED])
async def test_a_job_without_workers_is_issued_nothing(store: Store, state: JobState) -> None:
    job = await new_job(store, f"j-{state}", JobState.RUNNING)
    ours = await admission(store, job)
    assert (await ours.issue(1))[1] == [0]
    await store.transition(job, state)
    assert (await ours.issue(1))[1] == []
