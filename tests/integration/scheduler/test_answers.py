"""Answers of a scheduler match the types in shared/api_types."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import aiohttp
import msgspec
import numpy as np
import orjson
import pytest

from opentinker.client import ApiConflict, AsyncClient, answers
from opentinker.envs.base import Environment
from opentinker.serve.ws_client import AsyncServing
from opentinker.services.rollout_worker.eval_runner import views_of
from opentinker.services.trainer.batch.distributions import distributions, ratio_counts
from opentinker.services.trainer.rollout_log import RolloutLog
from opentinker.shared.evaluation.records import transcript_of
from opentinker.shared.messaging.subjects import LOG, TIMELINE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import MetricSource
from opentinker.shared.spec import EvaluationSpec
from opentinker.shared.state.store import Store
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.core import Ending, JobState, Message, WeightVersion
from opentinker.shared.types.evaluation import EvalResult
from opentinker.shared.types.telemetry import LogLine, Segment, TimelinePart
from opentinker.shared.types.workers import Gpu
from tests.conftest import until
from tests.integration.trainer.test_rollout_log import talk
from tests.samples.row_samples import row_spec
from tests.samples.upload_samples import package
from tests.support.api import SPEC, bearing, fits, write_checkpoint
from tests.support.factories import group_of, make_group, make_trajectory
from tests.support.scheduling import Workers, scheduler

INFERENCE = {"name": "chat", "kind": "inference", "model": {"base": "some/model"}}
V = WeightVersion(1, 4)
OTHERS = ("/v1/jobs/{id}/v1/", "/api/v1/")
"""In the paths of routes whose answers OpenAI, Anthropic and the Tinker SDK have defined."""


async def known(url: str, path: str, method: str = "GET") -> Any:
    """An answer as it comes over HTTP."""
    async with aiohttp.ClientSession(headers=bearing()) as session, session.request(method, url + path) as response:
        assert response.status == 200
        return await response.json()


async def test_jobs_and_workers_are_what_their_types_say(client: AsyncClient, ctx: Context, store: Store) -> None:
    workers = Workers(store)
    gpu = Gpu(index=0, uuid="GPU-1", model="some", memory=1 << 30, numa=0, links=[1])
    await workers.start("trainer-0", "rollout-0", "env-0", gpus=[gpu])
    try:
        made = await client.submit(SPEC)
        fits(made, answers.JobSummary)
        job = made["id"]
        await until(lambda: client.job(job), lambda found: len(found["workers"]) == 2)
        await MetricSource(ctx.bus, job, "trainer").emit(1, {"reward/mean": 0.5})
        await until(lambda: client.metrics(job))
        await until(lambda: client.job(job), lambda found: found["metrics"])
        fits(await client.job(job), answers.Job)
        fits(await known(client.url, f"/v1/jobs/{job}/metrics"), answers.Metrics)
        found = await known(client.url, "/v1/workers")
        fits(found, answers.Workers)
        assert {worker["id"] for worker in found["workers"] if worker["lease"]} == {"trainer-0", "rollout-0"}
        assert found["workers"][0]["gpus"]
        fits(await client.pause(job), answers.JobSummary)
        fits(await client.resume(job), answers.JobSummary)
        await store.transition(job, JobState.FAILED, reason="of the test")
    finally:
        await workers.stop()
    fits(await client.wait(job), answers.Job)
    served = await client.submit(INFERENCE)
    fits(served, answers.JobSummary)
    fits(await client.complete(served["id"]), answers.JobSummary)
    over = (await client.submit(SPEC))["id"]
    result = {"version": "1.4", "step": 4, "values": {"val/reward/mean": 0.5}}
    await store.transition(over, JobState.SUCCEEDED, result=orjson.dumps(result).decode())
    fits(await client.job(over), answers.Job)
    await store.create_job(
        id="j-rows000000", spec=row_spec("m", "rows.jsonl").model_dump(mode="json"), tenant="default"
    )
    fits(await client.cancel("j-rows000000"), answers.JobSummary)
    fits(await known(client.url, "/v1/jobs?limit=2"), answers.Jobs)
    events = await client.event_log(job)
    assert {"queued", "paused", "failed"} <= {event["event"] for event in events}
    for event in [*events, *[event async for event in client.events(job)]]:
        fits(event, answers.Event)


async def _evaluated(store: Store, job: str, step: int) -> None:
    """Make eval jobs of a checkpoint, of another job's, and one that says nothing of where it started."""
    plain = {"kind": "eval", "model": {"base": "m"}, "environment": {"name": "bandit"}, "name": "look", "resources": {}}
    plain["evaluation"] = {"episodes": 2, "samples": 1}
    for number, start in enumerate(({"from": f"{job}@{step}"}, {"from": f"j-0000000000@{step}"}, None)):
        id = await store.create_job(id=f"j-evaluated{number}", spec={**plain, "start": start}, tenant="default")
        for state in (JobState.STARTING, JobState.RUNNING):
            await store.transition(id, state)
        result = {"version": f"1.{step}", "step": step, "values": {"val/exact": 0.5}}
        await store.transition(id, JobState.SUCCEEDED, result=orjson.dumps(result).decode())


async def test_what_jobs_leave_and_cost_is_what_its_types_say(client: AsyncClient, ctx: Context, store: Store) -> None:
    job = (await client.submit(SPEC))["id"]
    home = ctx.settings.data_dir / "jobs" / job
    write_checkpoint(ctx, job, 4, {"model.safetensors": b"w", "trainer/state.json": b"{}"})
    fits(await client.checkpoints(job), list[answers.Checkpoint])
    await _evaluated(store, job, 4)
    (evaluation,) = await client.evaluations(job)
    fits(evaluation, answers.Evaluation)
    assert (evaluation["step"], evaluation["values"]["val/exact"]) == (4, 0.5)
    fits(await client.publish(f"{job}@4", "best"), answers.Publication)
    fits(await client.published(), list[answers.Publication])
    fits(await client.job(job), answers.Job)
    fits(await client.artifacts(job), list[answers.Artifact])
    fits(await client.unpublish("best"), answers.Publication)

    fits(await client.rollouts(job), answers.Rollouts)
    fits(await client.transcripts(job), answers.Transcripts)
    views = [
        make_trajectory(index=i, transcript=talk("a", "b"), pieces=["x"] * 6, metrics={"exact": 1.0}, scores={"r": 0.5})
        for i in range(2)
    ]
    told = RolloutLog(home, 4, MagicMock())
    await told.step(V, 5.0, [group_of(views)], {}, [np.zeros(3), np.zeros(3)])
    await told.step(WeightVersion(1, 5), 6.0, [group_of(views[:1])], {})
    for step in (4, 5):
        found = await client.rollouts(job, step)
        fits(found, answers.Rollouts)
        assert found["rollouts"][0]["views"][0]["tokens"]
    (home / "transcripts").mkdir()
    exam = EvalResult(job=job, version=V, index=1, worker="w", ending=Ending.ENV_DONE, seats={"a": 1.0, "b": 0.0})
    exam = msgspec.structs.replace(exam, metrics={"exact": 1.0}, messages=[Message(role="user", content="2+2=")])
    exam = msgspec.structs.replace(exam, views=views_of(views))
    lines = [transcript_of(exam, EvaluationSpec(samples=samples, temperature=1.0)) for samples in (1, 2)]
    written = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    await asyncio.to_thread((home / "transcripts" / "step-000004.jsonl").write_bytes, written)
    seen = await client.transcripts(job)
    fits(seen, answers.Transcripts)
    assert seen["transcripts"][0]["views"][0]["tokens"]["text"] == ["x"] * 6

    await UsageStore(store.redis).count(job, "a", {"cpu_s": 1.5})
    for by in ("job", "day", "key"):
        used = await client.usage(by)
        fits(used, answers.Usage)
        assert used["usage"]
    fits(await client.cancel(job), answers.JobSummary)
    gone: list[answers.DeletedArtifacts] = []

    async def put_away() -> bool:
        """A job that has just ended is still being put away."""
        with contextlib.suppress(ApiConflict):
            gone.append(await client.delete_artifacts(job))
        return bool(gone)

    await until(put_away)
    fits(gone, list[answers.DeletedArtifacts])
    assert gone[0]["steps"] == [4]


async def test_what_a_job_says_is_what_its_types_say(client: AsyncClient, ctx: Context, store: Store) -> None:
    job = (await client.submit(SPEC))["id"]
    about = {"group": 3, "reason": "env_error", "error": "no such digit"}
    await store.update(job, event="group_failed", failure=True, detail=about)
    await store.update(
        job, event="exam_failed", failure=True, detail={"episode": 1, "reason": "env_error", "error": ""}
    )
    failures = await client.failures(job)
    fits(failures, answers.Failures)
    assert [failure["event"] for failure in failures["failures"]] == ["exam_failed", "group_failed"]

    line = LogLine(job=job, service="trainer", worker="trainer-0", level="info", time=1.0, event="x", fields={"a": [1]})
    await ctx.bus.emit(LOG, line, job=job, level="info")
    segments = [Segment(lane="training", kind="step", start=1.0, end=2.0)]
    part = TimelinePart(job=job, worker="trainer-0", incarnation="i", seq=0, segments=segments)
    await ctx.bus.emit(TIMELINE, part, job=job, worker="trainer-0")
    await until(lambda: client.log_lines(job))
    await until(lambda: client.timeline(job))
    page = await known(client.url, f"/v1/jobs/{job}/logs?format=json")
    fits(page, answers.LogLines)
    assert "x" in {one["event"] for one in page["lines"]}
    fits(await anext(client.logs(job)), answers.LogLine)
    fits(await known(client.url, f"/v1/jobs/{job}/timeline"), answers.Timeline)
    fits(await client.why(job, last_s=5), answers.Diagnosis)

    batch = [make_group()]
    told = RolloutLog(ctx.settings.data_dir / "jobs" / job, 1, MagicMock())
    await told.step(V, 5.0, batch, distributions(batch, V, ratio_counts(np.ones(3))))
    await told.step(WeightVersion(1, 5), 6.0, batch, distributions(batch, V, {}))
    found = await client.distributions(job, limit=2)
    fits(found, list[answers.Distribution])
    assert ["ratio" in one for one in found] == [True, False]
    listed = await known(client.url, f"/v1/jobs/{job}/artifacts")
    fits(listed, answers.Artifacts)
    assert listed["artifacts"][0]["kind"] == "metrics"


async def test_what_a_page_hears_with_is_what_its_type_says(ctx: Context) -> None:
    settings = ctx.settings.model_copy(update={"nats_websocket_url": "ws://0.0.0.0:4223"})
    async with scheduler(Context(**{**vars(ctx), "settings": settings})) as url, AsyncClient(url) as client:
        given = await client.stream_credentials((await client.submit(SPEC))["id"])
    fits(given, answers.StreamCredentials)
    assert given["subjects"] and given["subjects"].keys() == given["history"].keys()


async def test_environments_are_what_their_types_say(client: AsyncClient, tmp_path: Path) -> None:
    pushed = await client.push_environment(package(tmp_path / "package"))
    fits(pushed, answers.PushedEnvironment)
    fits(await client.environments(), list[answers.EnvironmentSummary])
    fits(await client.environment("small"), answers.Environment)
    assert await client.delete_environment("small") == [1]
    report: Any = {
        "environment": "harbor:mine", "verdict": "ready for training", "errors": [], "advice": ["slow"],
        "facts": {"start": "70 ms"}, "transcript": "", "columns": ["task"], "rows": [["a"], ["b"]],
    }  # fmt: skip
    saved = await client.save_check(report)
    fits(saved, answers.EnvironmentCheckSummary)
    assert await client.environment_checks() == [saved]
    found = await client.environment_check(saved["id"])
    fits(found, answers.EnvironmentCheck)
    assert found["report"] == report
    assert await client.delete_environment_check(saved["id"]) == saved and await client.environment_checks() == []
    async with AsyncServing(Environment, name="count", url=client.url, on_wait=lambda _: None, drain_s=0.0):
        served = await _served(client)
        fits(served, answers.ServedEnvironments)
        assert served["served"][0]["processes"] == 1


async def _served(client: AsyncClient) -> Any:
    """When it has been heard of."""
    await until(lambda: known(client.url, "/v1/served"), lambda found: found["served"])
    return await known(client.url, "/v1/served")


async def test_a_spec_that_is_looked_at_is_answered_as_its_type_says(client: AsyncClient) -> None:
    good, bad = await client.validate(SPEC), await client.validate({**SPEC, "name": ""})
    fits(good, answers.Validation)
    fits(bad, answers.Validation)
    assert good["checks"] and bad["mistakes"][0]["field"] == "name"


async def test_keys_are_what_their_types_say(client: AsyncClient) -> None:
    made = await client.create_key("member", name="n", expires_in_s=60.0)
    fits(made, answers.MadeKey)
    fits(await client.rotate_key(made["id"]), answers.MadeKey)
    fits(await client.revoke_key(made["id"]), answers.Key)
    fits(await client.keys(), list[answers.Key])
    fits(await client.whoami(), answers.WhoAmI)
    assert await client.tenants()
    fits(await client.tenants(), list[answers.Tenant])


def test_states_are_those_of_jobs() -> None:
    assert get_args(answers.State) == tuple(JobState)


@pytest.mark.parametrize("wrong", [{"bytes": 1}, {"bytes": "1", "sha256": ""}, {"bytes": 1, "sha256": "", "more": 1}])
def test_an_answer_that_is_not_what_its_type_says_is_noticed(wrong: Any) -> None:
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        fits(wrong, answers.CheckpointFile)


async def test_the_openapi_document_tells_the_fields_of_answers(client: AsyncClient) -> None:
    document = await known(client.url, "/openapi.json")
    schemas = document["components"]["schemas"]
    answer = document["paths"]["/v1/jobs/{id}"]["get"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"]["$ref"] == "#/components/schemas/Job"
    refusal = document["paths"]["/v1/jobs"]["post"]["responses"]["403"]
    assert refusal["description"] == "The key lacks the scope jobs:write"
    assert "`gsm8k split=test; greedy; 512 tokens`" in schemas["Evaluation"]["properties"]["setting"]["description"]
    assert {"id", "state", "ledger"} <= set(schemas["Job"]["required"]) and "result" not in schemas["Job"]["required"]
    assert schemas["Job"]["properties"]["kind"]["description"] == "rl, sft, dpo, eval, inference or tinker."
    assert schemas["Ledger"]["properties"]["balanced"]["description"]
    assert schemas["PushedEnvironment"]["properties"]["class"]["description"] == "`module:Class`."
    answers_of_ours = [name for name in schemas if hasattr(answers, name)]
    assert len(answers_of_ours) > 40
    assert [name for name in answers_of_ours if not schemas[name].get("description")] == []


async def test_every_answer_in_json_has_a_type(client: AsyncClient) -> None:
    document = await known(client.url, "/openapi.json")
    told = {
        f"{method} {path}": answer["content"]["application/json"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for status, answer in operation["responses"].items()
        if status.startswith("2") and "application/json" in answer["content"]
    }
    untold = {what for what, answer in told.items() if not answer and not any(part in what for part in OTHERS)}
    assert len(told) > 40 and untold == {"get /openapi.json", "get /v1/schema/job.json"}
