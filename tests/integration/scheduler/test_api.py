"""Routes over HTTP, against a scheduler in this process and real servers: submission, jobs, and what is running."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.services.scheduler.http.jobs import JOB_ID
from opentinker.services.scheduler.jobs.submit import new_id
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import ENV_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY, MetricSource
from opentinker.shared.state.admission import Admission
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool, WorkerInfo
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply
from tests.conftest import WAIT_S, Server, free_port, until, wait_port
from tests.support.api import SPEC, Http, bearing, mistakes, read_events
from tests.support.factories import safetensors
from tests.support.scheduling import new_job, scheduler_process


async def checked_by(bus: Bus, check: Callable[[EnvCheck], Awaitable[EnvCheckReply]]) -> None:
    await bus.serve(ENV_CHECK, check, "env")
    await bus.nc.flush()


# --- submission -------------------------------------------------------------------------------------------------


async def test_submitted_job_is_queued_with_the_whole_spec(http: Http) -> None:
    status, job = await http.submit()
    assert status == 201
    assert JOB_ID.match(job["id"]) and job["state"] == "queued"
    assert (await http("GET", f"/v1/jobs/{job['id']}"))[1]["spec"] == SPEC
    status, listed = await http("GET", "/v1/jobs")
    assert [j["id"] for j in listed["jobs"]] == [job["id"]]


def test_job_ids_do_not_repeat() -> None:
    assert len({new_id("j") for _ in range(1000)}) == 1000


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


async def test_every_mistake_is_told_at_once(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply(errors=[{"field": "environment.config.digits", "value": 99, "problem": "too many"}])

    await checked_by(bus, check)
    wrong = {
        "name": "",
        "model": {"base": "/nowhere/at/all"},
        "environment": {"name": "copy_digits", "config": {"digits": 99}},
        "algorithm": {"group_size": 1},
        "train": {"steps": 0, "learning_rate": 1.0},
    }
    status, body = await http.submit(wrong)
    assert status == 422
    assert set(mistakes(body)) == {
        "name",
        "model.base",
        "environment.config.digits",
        "algorithm.group_size",
        "train.steps",
        "train.learning_rate",
    }
    assert body["detail"].startswith("6 mistakes")
    assert (await http("GET", "/v1/jobs"))[1]["jobs"] == []


async def test_seats_that_the_algorithm_names_must_exist_in_the_environment(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        return EnvCheckReply(seats=["first", "second"])

    await checked_by(bus, check)
    spec = {**SPEC, "environment": {"name": "tictactoe"}, "train": {"steps": 1}}
    for mate, expected in (("second", 201), ("third", 422)):
        status, body = await http.submit({**spec, "algorithm": {"team": {"all": ["first", mate]}}})
        assert status == expected, body
    assert set(mistakes(body)) == {"algorithm.team.all"}


async def test_checking_what_a_spec_refers_to_has_a_time_limit(http: Http, bus: Bus, ctx: Context) -> None:
    async def never(_: EnvCheck) -> EnvCheckReply:
        await asyncio.Event().wait()
        raise AssertionError

    await checked_by(bus, never)
    ctx.settings = ctx.settings.model_copy(update={"submission_check_timeout_s": 1.0})
    status, body = await http.submit({**SPEC, "environment": {"name": "copy_digits"}})
    assert status == 503 and "environment 'copy_digits', files and checkpoints" in body["detail"], body
    assert (await http("GET", "/v1/jobs"))[1]["jobs"] == []


async def test_settings_that_evaluations_lay_over_the_environment_s_are_checked_too(http: Http, bus: Bus) -> None:
    async def check(request: EnvCheck) -> EnvCheckReply:
        problem = {"field": "environment.config.digits", "value": 99, "problem": "too many"}
        return EnvCheckReply(errors=[problem] if (request.config or {}).get("digits") == 99 else [])

    await checked_by(bus, check)
    environment = {"name": "copy_digits", "config": {"digits": 3}}
    status, body = await http.submit({**SPEC, "environment": environment, "validation": {"every": 5}})
    assert status == 201
    wrong = {"every": 5, "config": {"digits": 99}}
    status, body = await http.submit({**SPEC, "environment": environment, "validation": wrong})
    assert status == 422 and set(mistakes(body)) == {"validation.config.digits"}


async def test_job_is_accepted_and_says_so_when_no_env_worker_can_check_it(http: Http) -> None:
    job = await http.job()
    events = (await http("GET", f"/v1/jobs/{job}/events?format=json"))[1]["events"]
    assert [e["event"] for e in events[:2]] == ["queued", "environment_unchecked"]


PPO = {"name": "ppo", "group_size": 2, "groups_per_batch": 2}
NAMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "model.base": lambda base: {"model": {"base": base}},
    "reward_models.0.base": lambda base: {"train": {"steps": 1}, "reward_models": [{"base": base}]},
    "value_model.base": lambda base: {"train": {"steps": 1}, "algorithm": PPO, "value_model": {"base": base}},
}
"""What names a model in a spec."""


def config(kind: object) -> dict[str, str]:
    return {"config.json": orjson.dumps({"model_type": "x", "architectures": kind}).decode()}


JUDGE = config(["XForSequenceClassification"])
TEMPLATE = {"chat_template.jinja": "x"}


@pytest.mark.parametrize(
    ("named", "files", "problem"),
    [
        ("model.base", None, "does not exist"),
        ("model.base", {}, "no config.json"),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": "{}"}, "no chat template"),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": '{"chat_template": "x"}'}, ""),
        ("model.base", {"config.json": "{}", "tokenizer_config.json": "{}", **TEMPLATE}, ""),
        ("reward_models.0.base", None, "does not exist"),
        ("reward_models.0.base", config(["LlamaForCausalLM"]), "no sequence classifier: its config.json says Ll"),
        ("reward_models.0.base", config(7), ""),
        ("reward_models.0.base", {"config.json": '{"architectures": 7}'}, "names no model_type"),
        ("reward_models.0.base", {**JUDGE, "tokenizer_config.json": "{}"}, "no chat template"),
        ("reward_models.0.base", {**JUDGE, **TEMPLATE}, ""),
        ("value_model.base", {}, "no config.json"),
        ("value_model.base", JUDGE, "no token classifier: its config.json says XFor"),
        ("value_model.base", config(["Qwen3ForTokenClassification"]), ""),
    ],
)
async def test_local_models_are_looked_at(
    http: Http, store: Store, tmp_path: Path, named: str, files: dict[str, str] | None, problem: str
) -> None:
    place = tmp_path / "model"
    if files is not None:
        place.mkdir()
        (place / "model.safetensors").write_bytes(safetensors())
        for name, text in files.items():
            (place / name).write_text(text)
    status, body = await http.submit({**SPEC, **NAMED[named](str(place))})
    if problem:
        field = "model.chat_template" if (named, problem) == ("model.base", "no chat template") else named
        assert status == 422 and problem in mistakes(body)[field]
    else:
        assert status == 201
        stored: Any = (await store.job(body["id"])).spec
        for part in named.split("."):
            stored = stored[int(part) if part.isdigit() else part]
        assert stored == str(place)


async def test_local_teacher_checks(http: Http, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taught = {**SPEC, "algorithm": {"name": "distill"}, "train": {"steps": 1}, "teacher": {"base": "./models/teacher"}}
    for changes in ({}, {"train": {"steps": 0}}):  # also beside other mistakes
        status, body = await http.submit({**taught, **changes})
        assert status == 422 and "does not exist" in mistakes(body)["teacher.base"]
    (tmp_path / "models" / "teacher").mkdir(parents=True)
    (tmp_path / "models" / "teacher" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "models" / "teacher" / "model.safetensors").write_bytes(safetensors())
    status, body = await http.submit(taught)
    assert status == 201
    assert (await store.job(body["id"])).spec["teacher"]["base"] == str(tmp_path / "models" / "teacher")


@pytest.mark.parametrize("base", ["~nobody-here/x", "/tmp/a\0b", "/" + "x" * 5000, "../..", "."])
async def test_odd_model_paths_are_refused_not_crashed_on(http: Http, base: str) -> None:
    status, body = await http.submit({**SPEC, "model": {"base": base}})
    assert status == 422 and "model.base" in mistakes(body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"name": "a", "name": "b"}', "twice"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b',"99999":1}', "twice"),
        (b'{"train": {"lr": NaN}}', "JSON"),
        (b'{"train": {"lr": 1e999}}', "JSON"),
        (b'{"name": "\\ud800"}', "JSON"),
        (b"[" * 40 + b"]" * 40, "deep"),
        (b"[" * 100_000 + b"]" * 100_000, "JSON"),
        (b"[" + b"0," * 200_000 + b"0]", "values"),
        (b"1" * 10_000, "JSON"),
        (b"[]", "must be a table"),
        (b'"text"', "must be a table"),
        (b"null", "must be a table"),
    ],
)
async def test_bodies_that_are_no_spec_are_422(http: Http, body: bytes, problem: str) -> None:
    status, answer = await http("POST", "/v1/jobs", data=body)
    assert status == 422 and problem in str(answer)


async def test_numbers_that_cannot_be_stored_are_refused(http: Http) -> None:
    huge = orjson.dumps({**SPEC, "train": {**SPEC["train"], "seed": 1.5e300}})
    assert (await http("POST", "/v1/jobs", data=huge))[0] == 422


async def test_body_over_the_limit_is_413(http: Http) -> None:
    status, body = await http("POST", "/v1/jobs", data=io.BytesIO(b" " * (1 << 20) + b"{}"))
    assert status == 413 and body["status"] == 413


async def test_same_key_and_spec_make_one_job_and_another_spec_is_a_conflict(http: Http) -> None:
    first, second = await http.submit(key="mine-1"), await http.submit(key="mine-1")
    assert first[0] == second[0] == 201 and first[1]["id"] == second[1]["id"]
    status, body = await http.submit({**SPEC, "name": "other"}, key="mine-1")
    assert status == 409 and first[1]["id"] in body["detail"]
    together = await asyncio.gather(*(http.submit(key="mine-2") for _ in range(8)))
    assert len({job["id"] for _, job in together}) == 1
    assert (await http.submit(key=""))[0] == 422
    assert (await http.submit(key="x" * 300))[0] == 422


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
    streams = ["TICKETS", "EXAMS", "SCORES", "GROUPS", "METRICS", "LOGS", "TIMELINES"]
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
