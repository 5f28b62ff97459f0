"""Pause, resume, priorities and failures over HTTP, from Python and from the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from opentinker.client import ApiConflict, AsyncClient
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState
from tests.conftest import Server, until
from tests.support.api import OPERATOR, SPEC, Http
from tests.support.scheduling import Workers, context, scheduler


async def test_pause_and_resume_may_be_repeated_and_refuse_what_is_over(http: Http, store: Store) -> None:
    job = await http.job()
    for _ in range(2):
        status, body = await http("POST", f"/v1/jobs/{job}/pause")
        assert (status, body["state"], body["reason"], body["waiting_for"]) == (200, "paused", "paused by request", "")
    assert [record.id for record in await store.active_jobs()] == [job], "it is not over"
    for _ in range(2):
        status, body = await http("POST", f"/v1/jobs/{job}/resume")
        assert (status, body["reason"]) == (200, "") and body["state"] == "queued"
    events = (await http("GET", f"/v1/jobs/{job}/events?format=json"))[1]["events"]
    assert [e["event"] for e in events if "state" in e] == ["queued", "paused", "unpaused"]
    await http("POST", f"/v1/jobs/{job}/pause")
    assert (await http("POST", f"/v1/jobs/{job}/cancel"))[1]["state"] == "cancelled"
    for verb, why in (("pause", "is cancelled: it cannot be paused"), ("resume", "there is nothing to resume")):
        status, body = await http("POST", f"/v1/jobs/{job}/{verb}")
        assert status == 409 and why in body["detail"]
    assert (await http("POST", "/v1/jobs/j-0000000000/pause"))[0] == 404


async def test_job_that_is_paused_in_its_sleep_does_not_sleep_when_it_is_resumed(http: Http, store: Store) -> None:
    job = await http.job()
    await store.update(job, asleep=True)
    await http("POST", f"/v1/jobs/{job}/pause")
    assert (await http("POST", f"/v1/jobs/{job}/resume"))[1]["asleep"] is False
    assert not (await store.job(job)).asleep


async def test_failures_are_listed_newest_first_and_counted(http: Http, store: Store) -> None:
    job = await http.job()
    for number in range(3):
        detail = {"group": number, "reason": "env_error", "error": f"Traceback...\nKeyError: {number}"}
        await store.update(job, event="group_failed", failure=True, detail=detail)
    status, body = await http("GET", f"/v1/jobs/{job}/failures?limit=2")
    assert status == 200 and [failure["group"] for failure in body["failures"]] == [2, 1]
    assert body["failures"][0]["error"].endswith("KeyError: 2") and body["counts"] == {}
    assert (await http("GET", f"/v1/jobs/{job}/failures?limit=0"))[0] == 422


async def test_priority_is_bounded(nats_server: Server, valkey_server: Server, store: Store, ctx: Context) -> None:
    tenants = {"*": {"max_priority": 0}}
    async with (
        context(nats_server, valkey_server, "scheduler-0", ctx.settings.data_dir, tenants=tenants) as bounded,
        scheduler(bounded) as url,
        AsyncClient(url) as client,
    ):
        low = await client.submit({**SPEC, "resources": {"priority": -2}})
        assert (await client.job(low["id"]))["priority"] == -2
        with pytest.raises(Exception, match=r"resources\.priority.*may be at most 0 for your jobs here"):
            await client.submit({**SPEC, "resources": {"priority": 1}})


async def test_commands(client: AsyncClient, store: Store) -> None:
    workers = Workers(store)
    await workers.start("env-0")
    job = str((await client.submit(SPEC))["id"])
    detail = {"group": 7, "reason": "timeout", "error": "too slow"}
    await store.update(job, event="group_failed", failure=True, detail=detail)

    async def told(*arguments: str) -> str:
        argv = [sys.executable, "-m", "opentinker.cli", *arguments, "--url", client.url]
        env = {**os.environ, "OPENTINKER_API_KEY": OPERATOR}
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert (await told("pause", job)).split() == [job, "paused"]
    assert (await told("resume", job)).split() == [job, "queued"]
    await until(lambda: store.job(job), lambda found: found.waiting_for)
    assert "trainer, rollout worker (none is running)" in await told("job", job)
    assert "too slow" in await told("failures", job)
    await workers.stop()
    await store.transition(job, JobState.CANCELLED)
    with pytest.raises(ApiConflict, match="cannot be paused"):
        await client.pause(job)
