"""Routes over HTTP, against a scheduler in this process and real servers: jobs, and what is running."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY, MetricSource
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import WAIT_S, Server, free_port, until, wait_port
from tests.support.api import SPEC, Http, bearing, mistakes, read_events
from tests.support.scheduling import new_job, scheduler_process


async def test_jobs_come_page_by_page(http: Http) -> None:
    jobs = [await http.job() for _ in range(5)]
    seen: list[list[str]] = []
    query = "limit=2"
    while True:
        status, page = await http("GET", f"/v1/jobs?{query}")
        assert status == 200
        seen.append([job["id"] for job in page["jobs"]])
        if not page["more"]:
            break
        query = f"limit=2&before={page['cursor']}"
    assert seen == [jobs[:2:-1], jobs[2:0:-1], jobs[:1]]
    for wrong, field in (("limit=0", "limit"), ("limit=1001", "limit"), ("before=j-0000000000", "before")):
        status, body = await http("GET", f"/v1/jobs?{wrong}")
        assert status == 422 and set(mistakes(body)) == {field}


async def test_a_job_says_since_when_it_is_in_the_queue_or_runs(http: Http, store: Store) -> None:
    job = await http.job()
    _, queued = await http("GET", f"/v1/jobs/{job}")
    assert queued["since"] == queued["created"]
    await http("POST", f"/v1/jobs/{job}/pause")
    _, resumed = await http("POST", f"/v1/jobs/{job}/resume")
    assert resumed["since"] > queued["since"] and resumed["created"] == queued["created"]


# --- one job ----------------------------------------------------------------------------------------------------


async def test_job_shows_ledger_workers_and_last_metrics(http: Http, ctx: Context, store: Store) -> None:
    job = await http.job()
    admission = Admission(store.redis, job)
    await Admission(store.redis, job, 1).restore(step=0, max_staleness=1, groups_per_batch=2, total=10, discarded={})
    await store.transition(job, JobState.RUNNING)
    _, seqs = await admission.issue(2)
    await admission.accept(seqs[0])
    await store.transition(job, JobState.QUEUED)
    await store.beat(
        WorkerInfo(id="rollout-7", incarnation="i", pool=Pool.ROLLOUT, host="here", pid=1, job=job, status="ready"), 60
    )
    source = MetricSource(ctx.bus, job, "trainer")
    for step in (1, 2):
        await source.emit(step, {"reward/mean": step / 10})
    await ctx.bus.nc.flush()
    status, body = await until(
        lambda: http("GET", f"/v1/jobs/{job}"),
        lambda found: "trainer" in found[1]["metrics"] and "trainer" in found[1]["waiting_for"],
    )
    assert status == 200
    assert body["metrics"]["trainer"]["step"] == 2 and body["metrics"]["trainer"]["values"] == {"reward/mean": 0.2}
    ledger = body["ledger"]
    assert (ledger["issued"], ledger["running"], ledger["pending"], ledger["balanced"]) == (2, 1, 1, True)
    assert [w["id"] for w in body["workers"]] == ["rollout-7"]


async def test_cancel_may_be_repeated_but_not_after_another_end(http: Http, store: Store) -> None:
    job = await http.job()
    for _ in range(2):
        status, body = await http("POST", f"/v1/jobs/{job}/cancel")
        assert (status, body["state"], body["waiting_for"]) == (200, "cancelled", "")
    done = await http.job()
    await store.transition(done, JobState.SUCCEEDED)
    status, body = await http("POST", f"/v1/jobs/{done}/cancel")
    assert status == 409 and "succeeded" in body["detail"] and body["hint"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/events",
        "/events?format=json",
        "/metrics",
        "/transcripts",
        "/checkpoints",
        "/checkpoints/latest/download",
        "/checkpoints/5/download",
    ],
)
@pytest.mark.parametrize("id", ["j-0000000000", "j-UPPERCASE0", "nonsense", "..%2f..%2fetc", "j-*", "%00"])
async def test_unknown_jobs_are_404(http: Http, id: str, path: str) -> None:
    status, body = await http("GET", f"/v1/jobs/{id}{path}")
    assert status == 404 and body["status"] == 404 and body["hint"]


async def test_job_of_another_tenant_looks_like_an_unknown_one(http: Http, store: Store) -> None:
    await store.create_job(id="j-foreign000", spec=SPEC, tenant="other")
    foreign, unknown = await http("GET", "/v1/jobs/j-foreign000"), await http("GET", "/v1/jobs/j-unknown000")
    assert foreign[0] == unknown[0] == 404
    assert str(foreign[1]).replace("foreign", "unknown") == str(unknown[1])
    assert (await http("GET", "/v1/jobs"))[1]["jobs"] == []
    assert (await http("POST", "/v1/jobs/j-foreign000/cancel"))[0] == 404


async def test_wrong_methods_and_paths_are_told(http: Http) -> None:
    for method, path in (("DELETE", "/v1/jobs"), ("PUT", "/v1/workers"), ("GET", "/v1/jobs/j-0000000000/cancel")):
        status, body = await http(method, path)
        assert status == 405 and body["title"] == "Method not allowed"
    assert (await http("GET", "/v2"))[0] == 404


# --- the rest ---------------------------------------------------------------------------------------------------


async def test_workers_queues_health_and_metrics(http: Http, store: Store) -> None:
    await store.beat(WorkerInfo(id="env-0", incarnation="i", pool=Pool.ENV, host="here", pid=1), 60)
    _, body = await http("GET", "/v1/workers")
    assert [(w["id"], w["pool"], w["lease"]) for w in body["workers"]] == [("env-0", "env", None)]
    _, body = await http("GET", "/v1/queues")
    streams = ["TICKETS", "EXAMS", "SCORES", "GROUPS", "COMMANDS", "SAMPLES", "METRICS", "LOGS", "TIMELINES"]
    assert [q["stream"] for q in body["queues"]] == streams
    assert (await http("GET", "/healthz"))[1]["status"] == "ok"
    assert (await http("GET", "/readyz"))[1] == {"ready": True, "nats": True}
    status, text = await http("GET", "/metrics")
    assert status == 200 and b'opentinker_http_requests_total{method="GET",route="/v1/queues",status="200"}' in text


async def test_a_stream_has_begun_when_its_first_bytes_go_out(http: Http, store: Store) -> None:
    job = await new_job(store, "j-0123456789")
    route = "/v1/jobs/{id}/events"

    def begun() -> float:
        return REGISTRY.get_sample_value("opentinker_http_seconds_count", {"route": route}) or 0.0

    before = begun()
    async with http.session.get(f"{http.url}/v1/jobs/{job}/events", headers=bearing()) as response:
        assert response.status == 200
        assert begun() == before + 1 and not response.content.is_eof()


async def test_openapi_says_what_inference_routes_answer(http: Http) -> None:
    _, document = await http("GET", "/openapi.json")
    answers = document["paths"]["/v1/jobs/{id}/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "404", "409", "413", "429", "500", "503", "504"} <= answers.keys() and "422" not in answers
    assert answers["400"]["content"]["application/json"]["schema"]["$ref"].endswith("OpenAIError")
    answers = document["paths"]["/v1/jobs/{id}/v1/messages"]["post"]["responses"]
    assert answers["400"]["content"]["application/json"]["schema"]["$ref"].endswith("AnthropicError")


async def test_openapi_describes_every_route_and_the_spec(http: Http) -> None:
    status, document = await http("GET", "/openapi.json")
    assert status == 200
    operations = {(method, path) for path, item in document["paths"].items() for method in item}
    assert ("post", "/v1/jobs") in operations and ("get", "/v1/jobs/{id}/checkpoints/{step}/download") in operations
    assert len(operations) >= 26
    parameters = {p["name"] for p in document["paths"]["/v1/jobs"]["get"]["parameters"]}
    assert {"before", "limit", "state", "tag", "sort"} <= parameters
    schemas = document["components"]["schemas"]
    references = [r for r in str(document).split("'") if r.startswith("#/components/schemas/")]
    assert {r.rpartition("/")[2] for r in references} <= schemas.keys()
    assert schemas["AlgorithmSpec"]["properties"]["group_size"]["description"]


async def test_restart_and_sigterm(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> None:
    port = free_port()
    async with aiohttp.ClientSession(headers=bearing()) as session:
        http = Http(session, f"http://127.0.0.1:{port}")
        process = scheduler_process(nats_server, valkey_server, port, tmp_path)
        try:
            wait_port(port, process)
            job = await http.job()
            process.kill()
            process.wait()
            process = scheduler_process(nats_server, valkey_server, port, tmp_path)
            wait_port(port, process)
            assert (await http("GET", f"/v1/jobs/{job}"))[1]["state"] == "queued"
            async with session.get(
                f"{http.url}/v1/jobs/{job}/events"
            ) as response:  # an open stream does not hold it up
                assert len(await read_events(response, 1)) == 1
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
