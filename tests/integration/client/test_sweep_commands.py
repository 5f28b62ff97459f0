"""`submit`, `sweep` and `sweeps` of the command line, and the client's calls, against a scheduler."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest
import structlog

from opentinker.client import ApiConflict, ApiNotFound, AsyncClient
from opentinker.services.scheduler.sweeps import controller
from tests.conftest import until
from tests.integration.client.test_job_commands import run
from tests.support.api import OPERATOR, SPEC

SKILL = "rollout.toy.skill"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(controller, "POLL_S", 0.05)
    monkeypatch.setattr(controller, "STEP_S", 0.05)
    path = tmp_path / "sweep.json"
    path.write_bytes(orjson.dumps({**SPEC, "sweep": {"parameters": {SKILL: [0.1, 0.2]}}}))
    return path


@pytest.fixture
def on(client: AsyncClient, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    monkeypatch.setenv("OPENTINKER_API_KEY", OPERATOR)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))  # the scheduler is in this process
    request.addfinalizer(structlog.reset_defaults)
    return ["--url", client.url]


async def test_a_sweep_is_submitted_shown_cancelled_and_deleted(file: Path, on: list[str], client: AsyncClient) -> None:
    done = await run("submit", file, "--set", "sweep.max_running=1", "--json", *on)
    made = orjson.loads(done.stdout)
    id = made["id"]
    assert (made["state"], made["planned"]) == ("running", 2)
    await until(lambda: client.jobs(tags=[id]), len)
    shown = await run("sweep", id, *on)
    assert "grid, maximize reward/mean" in shown.stdout and "0.1" in shown.stdout, shown.stdout + shown.stderr
    assert "0 of 2 trials (1 running)" in (await run("sweeps", *on)).stdout
    refused = await run("sweep", id, "--delete", *on)
    assert refused.returncode == 1 and "cancel it first" in refused.stderr
    assert (await run("sweep", id, "--cancel", *on)).stdout.split() == [id, "cancelled"]
    assert (await run("sweep", id, "--watch", *on)).returncode == 4

    async def deleted() -> str:
        return (await run("sweep", id, "--delete", *on)).stdout

    assert f"deleted {id} and the artifacts of 1 job" in await until(deleted)
    missing = await run("sweep", id, *on)
    assert missing.returncode == 1 and "opentinker sweeps lists yours" in missing.stderr


async def test_mistakes_of_a_file_have_lines(tmp_path: Path, on: list[str]) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        'name = "x"\nmodel = { base = "m" }\nenvironment = { name = "bandit" }\ntrain = { steps = 2 }\n'
        "[sweep.parameters]\ntrain.lr = { low = 2, high = 1 }\n"
    )
    for command in (("submit", path, *on), ("validate", path, "--quick")):
        done = await run(*command)
        assert done.returncode == 2
        assert (
            "sweep.parameters.train.lr.high = 1: must be above low=2" in done.stderr and "(sweep.toml:6)" in done.stderr
        )
    done = await run("run", path)
    assert done.returncode == 2 and "sweep" in done.stderr


async def test_the_client_submits_a_table_beside_a_spec_and_waits(client: AsyncClient, file: Path) -> None:
    made = await client.sweep(SPEC, {"parameters": {SKILL: [0.5]}, "max_hours": 1e-5})
    over = await client.wait_sweep(made["id"], timeout_s=60)
    assert over["reason"].startswith("its budget is spent") and over["planned"] == 1
    assert [one["id"] for one in await client.sweeps()] == [made["id"]]
    with pytest.raises(ApiConflict, match="nothing to cancel"):
        await client.cancel_sweep(made["id"])
    with pytest.raises(ApiNotFound, match="you have no sweep"):
        await client.sweep_state("s-0000000000")
    running = await client.sweep(file)
    with pytest.raises(TimeoutError):
        await client.wait_sweep(running["id"], timeout_s=0)
