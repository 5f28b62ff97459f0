"""Whole jobs on environments that run elsewhere: served by their user from the command line, and behind URLs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from aiohttp import web

from opentinker.shared.security.egress import LOOPBACK
from opentinker.shared.spec import JobSpec
from tests.conftest import until
from tests.support.cluster import PYTHONPATH, Toys, shared_fixture, toy_cluster
from tests.support.factories import make_spec
from tests.support.http_server import http_server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
DIGITS = "opentinker.envs.builtin.copy_digits:CopyDigits"


toys = shared_fixture(toy_cluster, env_egress_allow=",".join(LOOPBACK))


def spec_of(model: Path, environment: str, steps: int = 5) -> JobSpec:
    return make_spec(
        model={"base": str(model)},
        environment={"name": environment, "config": {"digits": 2}},
        algorithm={"group_size": 2, "groups_per_batch": 2, "max_staleness": 2},
        train={"learner": "simulated", "steps": steps, "simulated_step_s": 0.05, "checkpoint_every": 10},
    )


def command(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "opentinker.cli", "env", "serve", *arguments], env=environ, stdout=file, stderr=file
        )


async def ended(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None)
    return process.returncode


async def test_serve_with_a_job_plays_it_to_its_end(toys: Toys, tmp_path: Path) -> None:
    cluster, model = toys
    job, log = tmp_path / "job.json", tmp_path / "serve.log"
    job.write_text(spec_of(model, "served:whatever").model_dump_json())
    process = command(DIGITS, "--name", "digits", "--job", str(job), "--url", cluster.client.url, log=log)
    assert await ended(process) == 0, log.read_text()
    whole = await cluster.succeeds((await cluster.client.jobs())[0]["id"])
    assert whole["spec"]["environment"]["name"] == "served:digits" and whole["ledger"]["failed"] == {}


@pytest.mark.nightly
async def test_a_job_survives_kills_of_scheduler_and_server(toys: Toys, tmp_path: Path) -> None:
    cluster, model = toys
    serve = [DIGITS, "--name", "killed", "--concurrency", "4", "--url", cluster.client.url]
    processes = [command(*serve, log=tmp_path / f"{n}.log") for n in range(2)]
    try:

        async def serving() -> set[str]:
            return {w.incarnation for w in await cluster.store.workers() if w.detail.get("served") == "served:killed"}

        await until(serving, lambda found: len(found) == 2)
        job = await cluster.submit(spec_of(model, "served:killed", steps=20))
        await cluster.reaches(job, 3)
        cluster.kill("scheduler")
        await cluster.reaches(job, 7)
        processes[0].kill()
        processes[0].wait()
        await cluster.reaches(job, 11)
        before = await serving()  # the killed one may still be among them
        processes[0] = command(*serve, log=tmp_path / "again.log")
        await cluster.succeeds(job)
        assert (await cluster.ledger(job)).balanced
        await until(serving, lambda now: len(now) == 2 and bool(now - before))
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
    assert [await ended(process) for process in processes] == [0, 0]


async def test_jobs_play_environments_behind_urls(toys: Toys, tmp_path: Path) -> None:
    cluster, model = toys
    log = tmp_path / "listen.log"
    process = command(DIGITS, "--listen", "127.0.0.1:0", log=log)
    try:
        async with environment_server() as http:
            await until(lambda: "ws://" in log.read_text())
            found = re.search(r"ws://[\d.]+:\d+", log.read_text())
            assert found is not None
            for url in (found[0], http):
                spec = spec_of(model, url).model_dump(mode="json")
                spec["environment"]["config"] = {"config": {"digits": 2}}
                await cluster.succeeds((await cluster.client.submit(spec))["id"])
    finally:
        process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0


def environment_server() -> AbstractAsyncContextManager[str]:
    """Copies digits, as the published wire has it."""

    async def reset(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["digits"] == 2
        return web.json_response({"observation": f"{body['seed'] % 100:02d}=", "system_prompt": None})

    async def step(request: web.Request) -> web.Response:
        reward = float(any(map(str.isdigit, (await request.json())["action"])))
        return web.json_response({"observation": "", "reward": reward, "done": True, "info": {"exact": reward}})

    return http_server(web.post("/reset", reset), web.post("/step", step))
