"""`submit`, `sweep` and `sweeps` with sweeps, against a scheduler; and the client's calls for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from opentinker import AsyncClient, Client
from opentinker.client import ApiConflict, ApiError, ApiNotFound
from opentinker.services.scheduler import service
from opentinker.services.scheduler.sweeps.controller import SweepController
from tests.conftest import until
from tests.integration.client.test_job_commands import on, run
from tests.support.api import SPEC
from tests.support.scheduling import built_with

__all__ = ["on"]

SKILL = "rollout.toy.skill"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    built_with(monkeypatch, service, SweepController, poll_s=0.05, step_s=0.05)
    path = tmp_path / "sweep.json"
    path.write_bytes(orjson.dumps({**SPEC, "kind": "sweep", "sweep": {"parameters": {SKILL: [0.1, 0.2]}}}))
    return path


async def test_a_sweep_is_submitted_shown_cancelled_deleted(sweep: Path, on: list[str], client: AsyncClient) -> None:
    none = "no sweeps yet: submit a file with a [sweep] table: `opentinker submit FILE`\n"
    assert (await run("sweeps", *on)).stdout == none
    done = await run("submit", sweep, "--set", "sweep.max_running=1", "--json", *on)
    made = orjson.loads(done.stdout)
    id = made["id"]
    assert (made["state"], made["planned"]) == ("running", 2)
    await until(lambda: client.jobs(tags=[id]), len)
    shown = await run("sweep", id, *on)
    assert "grid, maximize reward/mean" in shown.stdout and "0.1" in shown.stdout, shown.stdout + shown.stderr
    assert "0 of 2 trials (1 running)" in (await run("sweeps", *on)).stdout
    done = await run("label", id, "--project", "maths", "--tag", "base", "--notes", "lr 1e-4", *on)
    assert done.stdout == f"{id}  {made['name']}  project maths  base\n"
    found = await run("sweeps", "--project", "maths", "--tag", "base", "--search", "1E-4", "--sort", "-name", *on)
    assert id in found.stdout and "maths" in found.stdout
    assert (await run("sweeps", "--state", "failed", *on)).stdout == "no such sweep\n"
    assert "must be one of running" in (await run("sweeps", "--state", "queued", *on)).stderr
    assert (await run("sweeps", "--group", "tag", *on)).stdout.split("\n")[:2] == [
        "tag   sweeps  states", "base  1       1 running",
    ]  # fmt: skip
    counted = await run("sweeps", "--group", "project", "--state", "running", "--json", *on)
    assert orjson.loads(counted.stdout) == [{"name": "maths", "sweeps": 1, "states": {"running": 1}}]
    assert (await run("sweeps", "--group", "kind", "--name", "other", *on)).stdout == "no such sweep\n"
    for other in (("--watch",), ("--sort", "name")):
        assert (await run("sweeps", "--group", "tag", *other, *on)).returncode == 2
    refused = await run("sweep", id, "--delete", *on)
    assert refused.returncode == 1 and "cancel it first" in refused.stderr
    await run("submit", sweep, "--set", "name=later", *on)
    cut = await run("sweeps", "-n", 1, *on)
    assert (cut.stderr, len(cut.stdout.splitlines())) == ("the first 1 of 2 sweeps; -n for more\n", 2)
    assert (await run("sweeps", "-n", 2, *on)).stderr == ""
    assert (await run("sweep", id, "--cancel", *on)).stdout.split() == [id, "cancelled"]
    before = await client.sweep({**SPEC, "name": "latest", "sweep": {"parameters": {SKILL: [0.1]}}})
    await client.cancel_sweep(before["id"])
    order = [one["name"] for one in orjson.loads((await run("sweeps", "--json", *on)).stdout)["sweeps"]]
    assert order == ["later", "latest", made["name"]], "the running first"
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
    assert done.returncode == 1 and "sweep.toml is a sweep of many jobs" in done.stderr


async def test_a_jobs_file_becomes_a_sweep_by_its_changes(tmp_path: Path, on: list[str]) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(orjson.dumps(SPEC))
    done = await run("submit", path, "--set", f"sweep.parameters.{SKILL}=[0.1, 0.2]", "--json", *on)
    made = orjson.loads(done.stdout)
    assert made["id"].startswith("s-") and made["planned"] == 2, done.stderr


async def test_the_client_submits_a_sweep_as_it_does_a_job(client: AsyncClient, url: str, sweep: Path) -> None:
    made = await client.submit(sweep)
    assert [one["id"] for one in await client.sweeps()] == [made["id"]]

    def start() -> None:
        with Client(url) as blocking:
            blocking.start(sweep)

    with pytest.raises(ApiError, match=r"client\.start_sweep\(spec\) submits it"):
        await asyncio.to_thread(start)
    assert len(await client.sweeps()) == 1, "a refused start submits nothing"


async def test_the_client_submits_a_table_beside_a_spec_and_waits(client: AsyncClient, sweep: Path) -> None:
    made = await client.sweep(SPEC, {"parameters": {SKILL: [0.5]}, "max_hours": 1e-5})
    over = await client.wait_sweep(made["id"], timeout_s=60)
    assert over["reason"].startswith("its budget is spent") and over["planned"] == 1
    assert [one["id"] for one in await client.sweeps()] == [made["id"]]
    with pytest.raises(ApiConflict, match="nothing to cancel"):
        await client.cancel_sweep(made["id"])
    with pytest.raises(ApiNotFound, match="you have no sweep"):
        await client.sweep_state("s-0000000000")
    running = await client.sweep(sweep)
    with pytest.raises(TimeoutError):
        await client.wait_sweep(running["id"], timeout_s=0)
