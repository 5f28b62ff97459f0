"""The SDK of Tinker, unmodified, in several versions, against a whole cluster: torch trains, vLLM samples."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.spec import parse_spec
from opentinker.shared.state.tinker.store import TinkerStore
from tests.conftest import until
from tests.support.api import OPERATOR
from tests.support.cluster import Cluster, shared_fixture
from tests.support.tinker import environments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

cluster = shared_fixture(Cluster, heavy=True, bank_jobs=2, bank_tokens=1024)


async def serve(cluster: Cluster, base: Path) -> str:
    """The id of the running server of this base."""
    for found in await cluster.client.jobs():
        if found["kind"] == "tinker" and found["state"] == "running":
            return str(found["id"])
    rollout = {"context_length": 128}
    spec = {"name": "tinker", "kind": "tinker", "model": {"base": str(base)}, "rollout": rollout}
    job = await cluster.submit(parse_spec(spec))
    await cluster.runs(job)
    return job


async def called(cluster: Cluster, *argv: str, of: Path | None = None) -> str:
    """Return what a command of an environment prints; it succeeds."""
    url = f"http://127.0.0.1:{cluster.http_port}"
    environ = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": f"tml-{OPERATOR}", "TINKER_TELEMETRY": "0"}
    environ.pop("PYTHONPATH", None)
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=400, check=False, cwd=of
    )
    assert done.returncode == 0, f"{argv}: {done.stdout[-1000:]} {done.stderr[-4000:]}"
    return done.stdout


async def run(cluster: Cluster, version: str, base: Path, *options: str) -> dict[str, Any]:
    """Return what `client_run.py` prints."""
    python = await asyncio.to_thread(environments.python_with, version)
    printed = await called(cluster, str(python), str(environments.CLIENT_RUN), str(base), *options)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


async def run_with_kills(cluster: Cluster, job: str, version: str, base: Path, *options: str) -> dict[str, Any]:
    """Like `run`, and kill every service that it needs once the trainer has answered a few of its commands."""
    running = asyncio.create_task(run(cluster, version, base, *options))
    store = TinkerStore(cluster.store.redis)
    before = set(await store.models_of(job))

    async def began() -> bool:
        begun = set(await store.models_of(job)) - before
        return any([await store.answered(f"{model}#3") is not None for model in begun])

    await until(began)
    for name in ("trainer-0", "scheduler", "rollout_worker-0"):
        cluster.kill(name)
    return await running


@pytest.mark.parametrize("version", environments.VERSIONS)
async def test_a_client_trains_saves_and_samples(cluster: Cluster, tiny: Path, version: str) -> None:
    await serve(cluster, tiny)
    found = await run(cluster, version, tiny)
    assert found["version"] == version and found["bases"] == [str(tiny)] and found["info"] == str(tiny)
    first, *_, last = found["losses"]
    assert last < first and found["forward"] < last and found["lengths"] == [5, 3]
    assert "data[0]" in found["refused"] and "5 tokens" in found["refused"]
    assert math.isfinite(found["importance"]) and found["importance"] < 0
    assert found["samples"] == found["sampled_logprobs"] and all(1 <= count <= 4 for count in found["samples"])
    blank, *others = found["prompt_logprobs"]
    assert blank is None and all(value < 0 for value in others) and len(others) == 2
    assert {"weights/first", "sampler_weights/named"} <= set(found["checkpoints"])


async def test_the_command_line_lists_publishes_downloads_and_deletes(
    cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    await serve(cluster, tiny)
    version = environments.VERSIONS[-1]
    found = await run(cluster, version, tiny)
    command = str((await asyncio.to_thread(environments.python_with, version)).with_name("tinker"))

    async def told(*argv: str) -> Any:
        return json.loads(await called(cluster, command, "-f", "json", *argv, of=tmp_path))

    model, named = found["saved"].split("/")[2], found["named"]
    assert str(tiny) in str(await told("model", "list"))
    assert model in str(await told("run", "list")) and model in str(await told("run", "info", model))
    assert named in str(await told("checkpoint", "list", "--run-id", model))
    assert "sampler" in str(await told("checkpoint", "info", named))
    await called(cluster, command, "checkpoint", "publish", named)
    assert "True" in str(await told("checkpoint", "info", named))
    await called(cluster, command, "checkpoint", "unpublish", named)
    await called(cluster, command, "checkpoint", "set-ttl", named, "--ttl", "7200")
    second = found["second"]
    await called(cluster, command, "checkpoint", "download", second, "--output", str(tmp_path / "out"))
    files = {path.name: path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    assert json.loads(files["adapter_config.json"].read_text())["r"] == 4
    await called(cluster, command, "checkpoint", "delete", "--yes", second)
    assert second not in str(await told("checkpoint", "list", "--run-id", model))


async def test_kills_cost_a_client_time_and_nothing_else(cluster: Cluster, tiny: Path) -> None:
    """The losses are those of a run without a kill; only who samples draws again."""
    job = await serve(cluster, tiny)
    expected = await run(cluster, environments.VERSIONS[-1], tiny)
    found = await run_with_kills(cluster, job, environments.VERSIONS[-1], tiny)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["again"] == pytest.approx(expected["again"], rel=1e-4)
    assert found["prompt_logprobs"][1:] == pytest.approx(expected["prompt_logprobs"][1:], rel=1e-3)
