"""Lists of the Tinker API come in pages."""

from __future__ import annotations

import time

import pytest

from opentinker.services.scheduler.tinker import sessions_api
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.tinker import TinkerSession
from tests.integration.tinker.site import Client, FakeWorkers, checkpoint_of


async def sessions_of(workers: FakeWorkers, count: int) -> list[str]:
    ids = [f"s-{number:020x}" for number in range(count)]
    for number, id in enumerate(ids):
        made = TinkerSession(id=id, tenant="default", created=1000.0 + number, name=f"name{number}")
        await workers.store.open_session(made)
    return ids[::-1]


async def test_lists_come_in_pages(user: Client, workers: FakeWorkers, ctx: Context) -> None:
    session = await user.session()
    models = [await user.model(session, number) for number in range(4)][::-1]
    for at, model in enumerate(models):
        await workers.store.add_checkpoint(checkpoint_of(ctx, model, created=1000.0 - at))
        expired = checkpoint_of(ctx, model, name="gone", created=1000.5 - at, expires=time.time() - 1)
        await workers.store.add_checkpoint(expired)
    status, found = await user.get("training_runs?limit=2&offset=1")
    assert status == 200 and found["cursor"] == {"offset": 1, "limit": 2, "total_count": 4}
    assert [one["training_run_id"] for one in found["training_runs"]] == models[1:3]
    status, found = await user.get("checkpoints?limit=3&offset=2")
    assert found["cursor"] == {"offset": 2, "limit": 3, "total_count": 4}
    assert [one["tinker_path"].split("/")[2] for one in found["checkpoints"]] == models[2:]
    for offset in range(4):
        (one,) = (await user.get(f"checkpoints?limit=1&offset={offset}"))[1]["checkpoints"]
        assert one["tinker_path"] == f"tinker://{models[offset]}/weights/first"
    ids = await sessions_of(workers, 5)
    assert (await user.get("sessions?limit=2&offset=2"))[1]["sessions"] == ids[1:3]
    status, refused = await user.get("training_runs?project_id=p")
    assert status == 422 and "project_id" in refused["detail"], "all runs would look like the project's"
    for wrong in ("limit=0", "limit=1001", "offset=-1", "limit=x"):
        for path in ("sessions", "training_runs", "checkpoints"):
            assert (await user.get(f"{path}?{wrong}"))[0] == 422
    assert (await user.get(f"sessions/{session}"))[1]["training_run_ids"] == sorted(models)


async def test_a_search_reads_a_bounded_number_of_sessions(
    user: Client, workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_api, "SEARCHED", 4)
    monkeypatch.setattr(sessions_api, "SEARCHED_AT_ONCE", 2)
    ids, found, cursor, calls = await sessions_of(workers, 7), [], None, 0
    while True:
        answer = await user.ok("sessions/search", display_name="name1", limit=3, cursor=cursor)
        found += [one["session_id"] for one in answer["sessions"]]
        calls += 1
        if (cursor := answer["next_cursor"]) is None:
            break
    assert found == [ids[5]] and calls == 2
    pages, cursor = [], None
    while True:
        answer = await user.ok("sessions/search", limit=3, cursor=cursor)
        pages.append([one["session_id"] for one in answer["sessions"]])
        if (cursor := answer["next_cursor"]) is None:
            break
    assert pages == [ids[:3], ids[3:6], ids[6:]]
    assert (await user.ok("sessions/search", session_id=ids[6]))["sessions"][0]["session_id"] == ids[6]


async def test_a_search_continues_after_its_last_session_was_removed(user: Client, workers: FakeWorkers) -> None:
    ids = await sessions_of(workers, 5)
    first = await user.ok("sessions/search", limit=2)
    await workers.store.close_session(await workers.store.session("default", ids[1]))
    found = await user.ok("sessions/search", limit=9, cursor=first["next_cursor"])
    assert [one["session_id"] for one in found["sessions"]] == ids[2:]
    wrong = {"last_session_id": ids[1], "last_created_at": "yesterday"}
    assert (await user.post("sessions/search", limit=9, cursor=wrong))[0] == 422
