"""Rows of lists: kept between reads, and never other than the records are."""

from __future__ import annotations

from typing import Any

import pytest

from opentinker.shared.state import list_rows
from opentinker.shared.state.list_rows import ListRows
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.support.scheduling import new_job

JOBS = 7


@pytest.fixture
def read_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the rows that were read whole."""
    ids, rows = list[str](), ListRows._rows

    async def noting(self: ListRows, wanted: list[str]) -> Any:
        ids.extend(wanted)
        return await rows(self, wanted)

    monkeypatch.setattr(ListRows, "_rows", noting)
    monkeypatch.setattr(list_rows, "ROWS_AT_ONCE", 3)
    return ids


async def test_only_rows_that_changed_are_read_again(store: Store, read_ids: list[str]) -> None:
    rows = ListRows(store.redis)
    ids = [await new_job(store, f"j-{number:04}") for number in range(JOBS)]
    assert [row.id for row in await rows.of("default")] == ids[::-1] == read_ids
    read_ids.clear()
    await store.transition(ids[1], JobState.STARTING, epoch=1)
    await ListRows(store.redis).label(ids[3], {"name": "renamed"}, add=["new"], remove=[])
    await store.update(ids[4], epoch=-1, step=12)
    await store.redis.zrem("jobs:of:default", ids[0])
    await store.redis.delete(f"job:{ids[6]}")
    late = await new_job(store, "j-late")
    found = {row.id: row for row in await rows.of("default")}
    assert list(found) == [late, *ids[1:6][::-1]] and set(read_ids) == {late, ids[6], ids[4], ids[3], ids[1]}
    assert list(found.values()) == await ListRows(store.redis).of("default")
    changed = found[ids[1]].state, found[ids[3]].name, found[ids[3]].tags, found[ids[4]].step
    assert changed == (JobState.STARTING, "renamed", ("new",), 12)


async def test_rows_of_the_tenants_that_asked_last_are_kept(
    store: Store, read_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_rows, "MOST_TENANTS", 2)
    rows, tenants = ListRows(store.redis), ("a", "b", "c")
    for tenant in tenants:
        await new_job(store, f"j-{tenant}", tenant=tenant)
    for tenant in ("a", "b", "a", "c", "a", "b"):
        assert [row.id for row in await rows.of(tenant)] == [f"j-{tenant}"]
    assert read_ids == ["j-a", "j-b", "j-c", "j-b"]


async def test_rows_with_very_long_notes_are_not_kept(
    store: Store, read_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_rows, "MOST_NOTES", 20)
    rows, id = ListRows(store.redis), await new_job(store, "j-noted", notes="x" * 21)
    for _ in range(2):
        assert [row.notes for row in await rows.of("default")] == ["x" * 21]
    assert read_ids == [id] * 2
