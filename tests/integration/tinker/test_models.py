"""Models of a Tinker server over HTTP, in the client and the command line: whose they are, and what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import orjson
import pytest
from typer.testing import CliRunner

from opentinker.cli import app
from opentinker.client import ApiConflict, ApiError, ApiNotFound, AsyncClient, answers
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.core import JobState
from opentinker.shared.types.tinker import ModelProgress
from tests.conftest import until
from tests.support.api import OPERATOR, fits, new_key_of
from tests.support.client_models import JOB, model_of, saved, send, server
from tests.support.scheduling import Workers, new_job

QUEUE = "slots 3/8, 2 waiting for tokens"


@asynccontextmanager
async def another(client: AsyncClient, key: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(client.url, api_key=key) as other:
        yield other


async def test_models_have_progress_checkpoints_and_whether_their_client_is_there(
    client: AsyncClient, store: Store
) -> None:
    await server(store)
    tinker = TinkerStore(store.redis)
    before, newest = await model_of(store, "default", "s-a"), await model_of(store, "default", "s-b")
    await store.redis.hset(f"tinker:model:{before.id}", "used", "1000")
    await store.redis.delete("tinker:beat:s-a")
    progress = ModelProgress(passes=5, steps=4, tokens=900, queue_s=0.25, loss=1.5, curve=[3.0, 2.0, 1.5])
    await tinker.set_progress(newest.id, progress)
    for one in (saved(newest, "a"), saved(newest, "b", created=2.0, public=True), saved(newest, "gone", expires=2.0)):
        await tinker.add_checkpoint(one)
    found = await client.job_models(JOB)
    fits(found, answers.ServedModels)
    assert (found["base"], found["total"], found["queue"]) == ("some/model", 2, "")
    first, second = found["models"]
    assert (first["id"], first["session"], first["rank"], first["alive"]) == (newest.id, "s-b", 16, True)
    learned = msgspec.to_builtins(progress)
    assert {name: value for name, value in first.items() if name in learned} == learned
    assert first["metadata"] == {"recipe": "digits"}
    assert [one["path"] for one in first["checkpoints"]] == [f"tinker://{newest.id}/weights/{name}" for name in "ba"]
    assert [(one["bytes"], one["expires"], one["public"]) for one in first["checkpoints"]] == [
        (5, None, True),
        (5, None, False),
    ]
    assert (second["id"], second["used"], second["alive"]) == (before.id, 1000.0, False)
    assert (second["loss"], second["curve"], second["steps"], second["checkpoints"]) == (None, [], 0, [])
    assert [one["id"] for one in (await client.job_models(JOB, offset=1))["models"]] == [before.id]
    assert len((await client.job_models(JOB, limit=1))["models"]) == 1


async def test_a_tenant_sees_its_own_models_and_the_servers_tenant_numbers_of_the_others(
    client: AsyncClient, store: Store
) -> None:
    await server(store, open_to=["blue"])
    own, foreign = await model_of(store, "default", "s-own"), await model_of(store, "blue", "s-blue")
    await send(store, foreign, 0, 1)
    await store.redis.delete("tinker:beat:s-blue")
    found = await client.job_models(JOB)
    assert [one["id"] for one in found["models"]] == [own.id] and "s-blue" not in orjson.dumps(found).decode()
    assert found["others"] == {"models": 1, "alive": 0, "waiting": 2}
    async with another(client, await new_key_of(store, "blue")) as blue:
        seen = await blue.job_models(JOB)
        fits(seen, answers.ServedModels)
        assert [one["id"] for one in seen["models"]] == [foreign.id] and seen["others"] is None
        with pytest.raises(ApiNotFound):
            await blue.job(JOB)
    async with another(client, await new_key_of(store, "red")) as red:
        with pytest.raises(ApiNotFound, match="you have no job"):
            await red.job_models(JOB)


async def test_a_share_link_shows_no_models_of_a_server_that_is_open_to_its_tenant(
    client: AsyncClient, store: Store
) -> None:
    await server(store, tenant="red", open_to=["*"])
    await model_of(store, "default", "s-own")
    shared = await new_job(store)
    key = (await client.share(shared)).partition("/share/")[2].partition("/")[0]
    async with another(client, key) as visitor:
        assert (await visitor.job(shared))["id"] == shared
        with pytest.raises(ApiError, match="link shows"):
            await visitor.job_models(JOB)


async def test_jobs_of_other_kinds_have_no_models(client: AsyncClient, store: Store) -> None:
    job = await new_job(store)
    with pytest.raises(ApiConflict, match=r"of kind rl, and has no models of clients.*look at its checkpoints"):
        await client.job_models(job)
    with pytest.raises(ApiNotFound, match="you have no job"):
        await client.job_models("j-0000000000")


async def test_commands_wait_for_the_server_the_client_or_the_trainer(client: AsyncClient, store: Store) -> None:
    await server(store)
    whole, gap = await model_of(store, "default", "s-whole"), await model_of(store, "default", "s-gap")
    done = await model_of(store, "default", "s-done")
    await send(store, whole, 0, 1)
    await send(store, gap, 1, 2)

    async def waits() -> dict[str, tuple[int, str]]:
        found = (await client.job_models(JOB))["models"]
        return {one["id"]: (one["waiting"], one["waiting_for"]) for one in found}

    seen = await until(waits, lambda found: "trainer" in found[whole.id][1])
    assert seen[done.id] == (0, "")
    assert seen[whole.id][0] == 2 and seen[whole.id][1].startswith("the server, which is queued and waits for")
    workers = Workers(store)
    await workers.start("trainer-0", "rollout-0")
    trainer = workers["trainer-0"]
    trainer.info = msgspec.structs.replace(trainer.info, bank="trainer", detail={"queue": QUEUE})
    try:
        await until(lambda: workers.holds("trainer-0"))
        await store.transition(JOB, JobState.RUNNING)
        seen = await until(waits, lambda found: "slots" in found[whole.id][1])
        assert seen[whole.id] == (2, f"the trainer: {QUEUE}")
        assert seen[gap.id] == (2, "request 0 of the client, which has not come")
        assert (await client.job_models(JOB))["queue"] == QUEUE
        await client.cancel(JOB)
        assert (await waits())[whole.id] == (2, "nothing: the server has ended (cancelled)")
    finally:
        await workers.stop()


async def test_the_command_line_lists_models_and_checkpoints(client: AsyncClient, store: Store) -> None:
    await server(store, open_to=["blue"])

    def called(*options: str) -> str:
        result = CliRunner().invoke(
            app, ["models", JOB, "--url", client.url, *options], env={"OPENTINKER_API_KEY": OPERATOR}
        )
        assert result.exit_code == 0, result.output
        return result.output

    assert "docs/tinker.md" in await asyncio.to_thread(called)
    model, tinker = await model_of(store, "default", "s-own"), TinkerStore(store.redis)
    await model_of(store, "blue", "s-blue")
    await tinker.set_progress(model.id, ModelProgress(passes=3, steps=2, tokens=1200, loss=0.5, curve=[2.0, 1.0, 0.5]))
    await tinker.add_checkpoint(saved(model, "final"))
    text = await asyncio.to_thread(called)
    assert "models 1 to 1 of 1 on some/model; other tenants: 1 model, 1 with a client" in text
    assert f"{model.id}  16    2      0.5   █▃▁" in text and "1,200" in text and "alive" in text
    assert f"tinker://{model.id}/weights/final" in text and "never" in text
    assert orjson.loads(await asyncio.to_thread(called, "--json")) == await client.job_models(JOB)
