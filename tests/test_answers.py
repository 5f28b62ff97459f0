"""What the client returns is what its types say: answers of a scheduler are held against shared/answers.py."""

from __future__ import annotations

import asyncio
from typing import Any, get_args
from unittest.mock import MagicMock

import aiohttp
import msgspec
import numpy as np
import orjson
import pytest

from opentinker.client import AsyncClient, answers
from opentinker.services.rollout_worker.examiner import views_of
from opentinker.services.trainer.told import Told
from opentinker.shared.evaluations import transcript_of
from opentinker.shared.service import Context
from opentinker.shared.spec import EvaluationSpec
from opentinker.shared.store import Store
from opentinker.shared.telemetry import MetricSource
from opentinker.shared.types import Ending, Gpu, JobState, Message, WeightVersion
from opentinker.shared.usage import Usage
from opentinker.shared.validation import ExamResult
from tests.api import SPEC, bearing, write_checkpoint
from tests.conftest import until
from tests.factories import group_of, make_trajectory
from tests.row_samples import row_spec
from tests.scheduling import Workers
from tests.test_told import talk

INFERENCE = {"name": "chat", "kind": "inference", "model": {"base": "some/model"}}
V = WeightVersion(1, 4)


def fits(answer: Any, kind: Any) -> None:
    """What the type names is there as it says, and there is nothing that it does not name."""
    assert msgspec.convert(answer, kind) == answer


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

        async def leased() -> bool:
            return len((await client.job(job))["workers"]) == 2

        await until(leased)
        await MetricSource(ctx.bus, job, "trainer").emit(1, {"reward/mean": 0.5})
        await until(lambda: _points(client, job))
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
    await store.transition(over, JobState.SUCCEEDED, result=orjson.dumps({"version": "1.4", "step": 4}).decode())
    fits(await client.job(over), answers.Job)
    await store.create_job(
        id="j-rows000000", spec=row_spec("m", "rows.jsonl").model_dump(mode="json"), tenant="default"
    )
    fits(await client.cancel("j-rows000000"), answers.JobSummary)
    fits(await known(client.url, "/v1/jobs?limit=2"), answers.Jobs)
    events = await client.event_log(job)
    assert {"queued", "paused", "failed"} <= {event["event"] for event in events}
    for event in [*events, *[event async for event in client.events(job)]]:
        msgspec.convert(event, answers.Event)  # what else belongs to it has no end


async def _points(client: AsyncClient, job: str) -> bool:
    return bool(await client.metrics(job)) and bool((await client.job(job))["metrics"])


async def test_what_jobs_leave_and_cost_is_what_its_types_say(client: AsyncClient, ctx: Context, store: Store) -> None:
    job = (await client.submit(SPEC))["id"]
    home = ctx.settings.data_dir / "jobs" / job
    write_checkpoint(ctx, job, 4, {"model.safetensors": b"w", "trainer/state.json": b"{}"})
    fits(await client.checkpoints(job), list[answers.Checkpoint])
    await client.publish(f"{job}@4", "best")
    fits(await client.job(job), answers.Job)

    fits(await client.rollouts(job), answers.Rollouts)
    fits(await client.transcripts(job), answers.Transcripts)
    views = [
        make_trajectory(index=i, transcript=talk("a", "b"), pieces=["x"] * 6, metrics={"exact": 1.0}, scores={"r": 0.5})
        for i in range(2)
    ]
    told = Told(home, 4, MagicMock())
    await told.step(V, 5.0, [group_of(views)], {}, [np.zeros(3), np.zeros(3)])
    await told.step(WeightVersion(1, 5), 6.0, [group_of(views[:1])], {})
    for step in (4, 5):
        found = await client.rollouts(job, step)
        fits(found, answers.Rollouts)
        assert found["rollouts"][0]["views"][0]["tokens"]
    (home / "transcripts").mkdir()
    exam = ExamResult(job=job, version=V, index=1, worker="w", ending=Ending.ENV_DONE, seats={"a": 1.0, "b": 0.0})
    exam = msgspec.structs.replace(exam, metrics={"exact": 1.0}, messages=[Message(role="user", content="2+2=")])
    exam = msgspec.structs.replace(exam, views=views_of(views))
    lines = [transcript_of(exam, EvaluationSpec(samples=samples, temperature=1.0)) for samples in (1, 2)]
    written = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    await asyncio.to_thread((home / "transcripts" / "step-000004.jsonl").write_bytes, written)
    seen = await client.transcripts(job)
    fits(seen, answers.Transcripts)
    assert seen["transcripts"][0]["views"][0]["tokens"]["text"] == ["x"] * 6

    await Usage(store.redis).count(job, "a", {"cpu_s": 1.5})
    for by in ("job", "day", "key"):
        used = await client.usage(by)
        fits(used, answers.Usage)
        assert used["usage"]


async def test_keys_are_what_their_types_say(client: AsyncClient) -> None:
    made = await client.create_key("member", name="n", expires_in_s=60.0)
    fits(made, answers.MadeKey)
    fits(await client.rotate_key(made["id"]), answers.MadeKey)
    fits(await client.revoke_key(made["id"]), answers.Key)
    fits(await client.keys(), list[answers.Key])
    fits(await client.whoami(), answers.WhoAmI)


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
    assert {"id", "state", "ledger"} <= set(schemas["Job"]["required"]) and "result" not in schemas["Job"]["required"]
    assert schemas["Job"]["properties"]["kind"]["description"] == "rl, sft, dpo, inference or eval."
    assert schemas["Ledger"]["properties"]["balanced"]["description"]
