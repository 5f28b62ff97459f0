"""`opentinker status` of a server, whatever it may say."""

from __future__ import annotations

import asyncio

import pytest

from opentinker.cli.machine import status
from opentinker.local.processes import free_port
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.conftest import until
from tests.support.api import SPEC, Http
from tests.support.scheduling import Workers


async def test_cluster_status(
    http: Http, ctx: Context, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(store)
    await workers.start("trainer-0", "env-0")
    status_code, job = await http.submit(SPEC)
    assert status_code == 201
    await until(lambda: store.job(job["id"]), lambda found: found.waiting_for)
    found = await asyncio.to_thread(status.cluster, http.url)
    assert found["error"] == "" and found["jobs"] == {"queued": 1}
    assert found["workers"] == {"env": {"running": 1, "leased": 0}, "trainer": {"running": 1, "leased": 0}}
    assert [one["job"] for one in found["waiting"]] == [job["id"]] and "rollout worker" in found["waiting"][0]["for"]
    assert found["queues"]["TICKETS"] >= 0
    status._show_cluster(found)
    shown = capsys.readouterr().out
    assert "jobs: 1 queued" in shown and f"{job['id']} (test, queued) waits for" in shown.replace(job["name"], "test")
    await workers.stop()
    for _ in range(3):
        await http("POST", f"/v1/jobs/{await http.job()}/cancel")
    monkeypatch.setattr(status, "JOBS", 1)
    found = await asyncio.to_thread(status.cluster, http.url)
    assert found["jobs"] == {"queued": 1, "cancelled": 3} and len(found["waiting"]) == 1
    assert found["complete"] and "newest" not in shown
    monkeypatch.setattr(status, "MOST_COUNTED", 4)
    status._show_cluster(await asyncio.to_thread(status.cluster, http.url))
    assert "jobs: 1 queued, 3 cancelled (of the newest 4)\n" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_said() -> None:
    found = status.cluster(f"http://127.0.0.1:{free_port()}")
    assert "cannot reach" in found["error"]
