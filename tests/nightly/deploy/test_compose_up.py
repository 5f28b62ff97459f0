"""docker-compose.yml on an engine: `make compose-test` builds the images, starts everything, and takes it away again.

While one job trains, env workers and a rollout worker are added, and one of each and the scheduler are killed; its
checkpoint is served; an adapter, an uploaded environment and a model that sees are trained; then artifacts move into
an object store. Without an engine all of it is skipped.
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from opentinker.client import AsyncClient
from opentinker.sdk.inference import text_of
from opentinker.shared.api_types import Job
from tests.conftest import free_port, until
from tests.support.cluster import ROOT
from tests.support.deploy.compose import Project, lacking
from tests.support.lineage import faults
from tests.support.object_store import ACCESS, SECRET, make_bucket, s3_server

IMAGES = ("light", "cpu", "servers")
LIGHT_BYTES = 300_000_000
EXAMPLES = ROOT / "examples"
PARITY = EXAMPLES / "environments" / "parity"
MODELS = "/srv/opentinker/runs/models"
DATA = "/var/lib/opentinker/data"
ASKED = bool(os.environ.get("OPENTINKER_COMPOSE_TEST"))
ENOUGH = 100_000
"""Steps: the job is cancelled when everything has been done to it."""
ON = 2
"""Steps that it makes after each of these, before it counts as survived."""
LONG_S = 900.0
"""For steps of a job on a machine that builds images besides."""


@asynccontextmanager
async def everything(project: Project) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await project.compose("--profile", "tiny-model", "down", "--volumes", "--remove-orphans", "--timeout", "5")


def tell(words: str) -> None:
    os.write(1, f"compose: {words}\n".encode())


@pytest.mark.skipif(not ASKED, reason="make compose-test runs it")
@pytest.mark.timeout(5400)
async def test_jobs_train_while_containers_come_and_go(tmp_path: Path) -> None:
    if reason := lacking():
        pytest.skip(f"nothing can be composed here: {reason}")
    port = free_port()
    project = Project({"OPENTINKER_PORT": str(port), "OPENTINKER_STREAMS_PORT": str(free_port())})
    async with everything(project):
        await _up(project)
        key = (await project.compose("exec", "-T", "scheduler", "cat", "/run/opentinker/operator-key")).strip()
        async with AsyncClient(f"http://127.0.0.1:{port}", api_key=key, wait_s=60) as client:
            job = await _trains_while_all_are_harmed(project, client, tmp_path)
            await _is_served(client, job)
            await _is_upgraded(project, client, tmp_path)
            await _trains_an_adapter(client)
            await _shares_ranks(project, client)
            await _trains_in_sandboxes(client)
            await _sees(client)
            await _keep_to_their_data(project, job)
            await _keeps_objects(project, client, tmp_path)
    left = await project.docker(
        "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={project.name}"
    )
    assert left == ""


async def _up(project: Project) -> None:
    await project.compose("--profile", "tiny-model", "build")
    sizes = {kind: await project.bytes_of(f"opentinker/{kind}") for kind in IMAGES}
    tell(", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in sizes.items()))
    assert sizes["light"] < LIGHT_BYTES
    await project.compose("run", "--rm", "tiny-model")
    seeing = ("-m", "examples.models.make_seeing", "runs/models/seeing")
    await project.compose("run", "--rm", "--entrypoint", "python", "tiny-model", *seeing)
    load, began = os.getloadavg()[0], time.time()
    with project.healthy_first() as first:
        await project.compose("up", "--detach", "--wait")
        took = time.time() - began
    tell(f"healthy {took:.1f} s after `up`, on {os.cpu_count()} cores with a load of {load:.1f} before")
    tell(", ".join(f"{name} {at - began:.1f} s" for name, at in sorted(first.items(), key=lambda one: one[1])))


async def _trains_while_all_are_harmed(project: Project, client: AsyncClient, tmp_path: Path) -> str:
    """The job's id."""
    spec = tomllib.loads((EXAMPLES / "copy_digits.toml").read_text())
    spec["model"]["base"] = f"{MODELS}/tiny"
    spec["train"] |= {"steps": ENOUGH, "checkpoint_every": 10, "target": {}}
    spec["resources"] = {"rollout_workers": 2}
    began = time.monotonic()
    job: str = (await client.submit(spec))["id"]

    async def runs() -> Job:
        record = await client.job(job)
        assert record["state"] in ("queued", "starting", "running"), f"it is over: {record['state']} {record['reason']}"
        return record

    async def step() -> int:
        return int((await runs())["step"])

    async def goes_on(after: str) -> None:
        seen = await step()

        async def further() -> bool:
            return await step() >= seen + ON

        await until(further, timeout_s=LONG_S)
        tell(f"{after}; at step {seen}, and trained on to step {await step()}")

    async def has_workers(rollout: int, env: int) -> bool:
        mine = [worker for worker in (await runs())["workers"] if worker["pool"] == "rollout"]
        return len(mine) >= rollout and [w["pool"] for w in await client.workers()].count("env") >= env

    await goes_on("one worker of each kind")
    await project.compose("up", "--detach", "--no-recreate", "--scale", "env-worker=8", "--scale", "rollout-worker=2")
    await until(lambda: has_workers(2, 8), timeout_s=LONG_S)
    await goes_on("8 env workers and 2 rollout workers")
    tell(f"memory: {await project.memory()}")

    await project.docker("kill", (await project.containers("env-worker"))[0])  # a machine that is gone
    await goes_on("an env worker was killed, and stays away")

    for service in ("rollout-worker", "scheduler"):
        killed = (await project.containers(service))[0]
        await project.kill_process(killed)
        await goes_on(f"{service} was killed")

        async def again(container: str = killed) -> bool:
            state = await project.inspect(container)
            return bool(state["RestartCount"] and state["State"]["Health"]["Status"] == "healthy")

        await until(again, timeout_s=LONG_S)
        await until(lambda: has_workers(2, 7), timeout_s=LONG_S)
        await goes_on(f"{service} is back")

    async def has_checkpoint() -> bool:
        return bool(await client.checkpoints(job))

    async def all_is_kept() -> bool:
        record = await client.job(job)
        return not record["workers"] and (await client.checkpoints(job))[-1]["step"] == record["step"]

    await until(has_checkpoint, timeout_s=LONG_S)
    await client.pause(job)
    await until(all_is_kept, timeout_s=LONG_S)
    await client.cancel(job)
    record = await client.wait(job, LONG_S)
    assert record["state"] == "cancelled", record["reason"]
    tell(f"{record['step']} steps in {time.monotonic() - began:.0f} s")
    await _is_right(client, job, spec, tmp_path)
    return job


async def _is_right(client: AsyncClient, job: str, spec: dict[str, Any], tmp_path: Path) -> None:
    """Each step was made once, by one trainer, of whole batches, and no group twice; a checkpoint can be had."""
    (file,) = await client.download_artifacts(job, tmp_path, ["metrics.jsonl"])
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert {line["epoch"] for line in lines} == {lines[0]["epoch"]}, "nobody has disturbed the trainer"
    batch, staleness = spec["algorithm"]["groups_per_batch"], spec["algorithm"]["max_staleness"]
    began = {lines[0]["epoch"]: 0}
    assert faults(lines, began, steps=len(lines), groups_per_batch=batch, max_staleness=staleness) == []
    record = await client.job(job)
    assert record["step"] == len(lines) and record["ledger"]["balanced"], record["ledger"]
    newest = (await client.checkpoints(job))[-1]["step"]
    assert newest == record["step"], "what was trained is kept"
    model = await client.download(job, tmp_path / "model", newest)
    assert (model / "model.safetensors").stat().st_size > 1_000_000


async def _is_served(client: AsyncClient, job: str) -> None:
    """Its newest checkpoint: weights or an adapter, which rollout workers read where they cannot write."""
    spec = {
        "name": "served",
        "kind": "inference",
        "model": {"base": f"{MODELS}/tiny", "chat_template": "plain"},
        "start": {"from": f"{job}@latest"},
        "rollout": {"context_length": 128},
    }
    served = (await client.submit(spec))["id"]

    async def answers() -> bool:
        record = await client.job(served)
        assert record["state"] in ("queued", "starting", "running"), record["reason"]
        return bool(record["state"] == "running")

    await until(answers, timeout_s=LONG_S)
    asked = client.chat(served, [{"role": "user", "content": "123"}], max_tokens=6)
    chunks = [chunk async for chunk in asked]
    assert {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]} & {"stop", "length"}
    answer = "".join(map(text_of, chunks))
    await client.complete(served)
    record = await client.wait(served, LONG_S)
    assert record["state"] == "succeeded", record["reason"]
    tell(f"a checkpoint of {job} answered {answer!r}")


async def _is_upgraded(project: Project, client: AsyncClient, tmp_path: Path) -> None:
    """Every container is replaced while a job trains: no step is repeated, and no worker is missing afterwards."""
    before = {service: len(await project.containers(service)) for service in ("env-worker", "rollout-worker")}
    images = [await project.docker("image", "inspect", "-f", "{{.Id}}", f"opentinker/{kind}") for kind in IMAGES]
    spec = tomllib.loads((EXAMPLES / "copy_digits.toml").read_text())
    spec["model"]["base"] = f"{MODELS}/tiny"
    spec["train"] |= {"steps": ENOUGH, "checkpoint_every": 1000, "target": {}}
    job = (await client.submit(spec))["id"]

    async def trained(steps: int) -> bool:
        return (await client.job(job))["step"] >= steps

    await until(lambda: trained(20), timeout_s=LONG_S)
    await project.compose("--profile", "tiny-model", "build")
    built = [await project.docker("image", "inspect", "-f", "{{.Id}}", f"opentinker/{kind}") for kind in IMAGES]
    assert built == images, "a build without a change changes no image"
    await project.upgrade("--force-recreate")
    assert {service: len(await project.containers(service)) for service in before} == before
    resumed = (await client.job(job))["step"]
    await until(lambda: trained(resumed + ON), timeout_s=LONG_S)
    await client.cancel(job)
    await client.wait(job, LONG_S)
    (file,) = await client.download_artifacts(job, tmp_path / "upgraded", ["metrics.jsonl"])
    steps = [orjson.loads(line)["step"] for line in file.read_bytes().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "a step was repeated"
    tell(f"all containers were replaced at step {resumed}, and no step was repeated")


async def _succeeds(client: AsyncClient, spec: dict[str, Any], model: str, steps: int = 3) -> str:
    spec["model"]["base"] = f"{MODELS}/{model}"
    spec["train"] |= {"steps": steps, "checkpoint_every": steps, "warmup_steps": 0, "target": {}}
    record = await client.wait((await client.submit(spec))["id"], LONG_S)
    assert (record["state"], record["step"]) == ("succeeded", steps), record["reason"]
    return str(record["id"])


async def _trains_an_adapter(client: AsyncClient) -> None:
    spec = tomllib.loads((EXAMPLES / "copy_digits.toml").read_text())
    spec["model"]["lora"] = {"rank": 4}
    job = await _succeeds(client, spec, "tiny")
    tell("an adapter was trained")
    await _is_served(client, job)


async def _shares_ranks(project: Project, client: AsyncClient) -> None:
    """Two trainers with room for one rank train a job together, and one of them is killed."""
    project.told({"OPENTINKER_MAX_RANKS": "1", "OPENTINKER_TRAINERS": "2"})
    await project.compose("up", "--detach", "--wait", "--no-deps", "trainer")
    spec = tomllib.loads((EXAMPLES / "copy_digits.toml").read_text())
    spec["model"]["base"] = f"{MODELS}/tiny"
    spec["train"] |= {"steps": ENOUGH, "checkpoint_every": 5, "warmup_steps": 0, "target": {}, "parallel": "zero2"}
    spec["resources"] = {"trainer_ranks": 2, "min_trainer_ranks": 1}
    job = (await client.submit(spec))["id"]

    async def trained(steps: int) -> bool:
        record = await client.job(job)
        assert record["state"] in ("queued", "starting", "running"), record["reason"]
        return record["step"] >= steps

    async def on_one() -> bool:
        return len([w for w in (await client.job(job))["workers"] if w["pool"] == "trainer"]) == 1

    await until(lambda: trained(6), timeout_s=LONG_S)
    members = [worker for worker in (await client.job(job))["workers"] if worker["pool"] == "trainer"]
    assert len(members) == 2 and len({worker["host"] for worker in members}) == 2
    await project.docker("kill", members[1]["host"])  # the host name of a container is its id; it stays away
    await until(on_one, timeout_s=LONG_S)
    step = (await client.job(job))["step"]
    await until(lambda: trained(step + ON), timeout_s=LONG_S)
    await client.cancel(job)
    await client.wait(job, LONG_S)
    tell(f"two trainers shared the ranks of a job; one was killed, and the other one continued from step {step}")
    project.told({"OPENTINKER_MAX_RANKS": "0", "OPENTINKER_TRAINERS": "1"})
    await project.compose("up", "--detach", "--wait", "--no-deps", "trainer")


async def _trains_in_sandboxes(client: AsyncClient) -> None:
    pushed = await client.push_environment(PARITY)
    assert pushed["checked"]
    await _succeeds(client, tomllib.loads((PARITY / "job.toml").read_text()), "tiny")
    tell("an upload was trained on in sandboxes")


async def _sees(client: AsyncClient) -> None:
    await _succeeds(client, tomllib.loads((EXAMPLES / "colours.toml").read_text()), "seeing")
    tell("a model that sees was trained")


async def _keep_to_their_data(project: Project, job: str) -> None:
    """Each service sees, and writes, what it needs: from inside, where a service that was broken into would try."""
    jobs = f"{DATA}/jobs"
    assert "No such file" in await project.refuses("env-worker", "ls", jobs)
    for place in ("environments", "environments/packages"):
        assert "Read-only" in await project.refuses("env-worker", "touch", f"{DATA}/{place}/x")
    for service in ("rollout-worker", "reference-forward"):
        assert "Read-only" in await project.refuses(service, "touch", f"{jobs}/{job}/x")
    for place in ("artifacts", "staged", "fetched"):
        assert "Permission denied" in await project.refuses("trainer", "ls", f"{DATA}/{place}")
    seen = await project.compose("exec", "-T", "trainer", "find", f"{DATA}/audit", f"{DATA}/environments", "-type", "f")
    assert seen == ""
    there = await project.compose("exec", "-T", "scheduler", "find", DATA, "-type", "f")
    assert all(f"{DATA}/{place}/" in there for place in ("artifacts", "audit", "environments", "jobs"))


async def _keeps_objects(project: Project, client: AsyncClient, tmp_path: Path) -> None:
    """Another scheduler takes the place of the one before, and keeps in an object store what a job leaves."""
    host = await project.host()
    with s3_server(host) as url:
        await make_bucket(url, "artifacts")
        secret = tmp_path / "s3-credentials"
        secret.write_text(f"{ACCESS}\n{SECRET}\n")
        secret.chmod(0o444)
        told = {"URL": "s3://artifacts/some/where", "S3_ENDPOINT": url, "S3_CREDENTIALS": str(secret)}
        project.lay("deploy/compose.s3.yml", {f"OPENTINKER_ARTIFACTS_{name}": value for name, value in told.items()})
        await project.compose("up", "--detach", "--wait", "--no-deps", "scheduler")
        job = await _succeeds(client, tomllib.loads((EXAMPLES / "copy_digits.toml").read_text()), "tiny", steps=2)

        async def is_kept() -> bool:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/artifacts?list-type=2") as answer:
                text = await answer.text()
            return (
                bool(re.search(rf"{job}/checkpoints/step-000002[^/]*/model.safetensors<", text))
                and f"{job}/logs.jsonl" in text
            )

        await until(is_kept, timeout_s=LONG_S)
        model = await client.download(job, tmp_path / "from-s3")
        assert (model / "model.safetensors").stat().st_size > 1_000_000
        tell("a job's checkpoint and logs are in an object store")
