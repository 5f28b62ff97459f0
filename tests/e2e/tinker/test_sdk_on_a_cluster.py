"""The SDK of Tinker, unmodified, in several versions, against a whole cluster: torch trains, vLLM samples."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, shared_fixture
from tests.support.tinker import environments
from tests.support.tinker.sdk_clients import called, run, run_with_kills, serve

EXAMPLES = Path(__file__).parents[3] / "examples" / "tinker"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the three minutes in docs/tinker.md."""
    from examples.models.make_tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", norm_scale=3.0)


cluster = shared_fixture(Cluster, heavy=True, bank_jobs=2, bank_tokens=1024)


@pytest.mark.parametrize("version", environments.VERSIONS)
async def test_a_client_trains_saves_and_samples(cluster: Cluster, tiny: Path, version: str) -> None:
    await serve(cluster, tiny)
    found = await run(cluster.client.url, version, tiny)
    assert found["version"] == version and found["bases"] == [str(tiny)] and found["info"] == str(tiny)
    first, *_, last = found["losses"]
    assert last < first and found["forward"] < last and found["lengths"] == [5, 3]
    assert "data[0]" in found["refused"] and "5 tokens" in found["refused"]
    assert math.isfinite(found["importance"]) and found["importance"] < 0
    assert found["samples"] == found["sampled_logprobs"]
    assert all(1 <= count <= 4 for count in found["samples"] + found["elsewhere"]) and len(found["elsewhere"]) == 2
    blank, *others = found["prompt_logprobs"]
    assert blank is None and all(value < 0 for value in others) and len(others) == 2
    assert {"weights/first", "sampler_weights/named"} <= set(found["checkpoints"])


async def test_the_command_line_lists_publishes_downloads_and_deletes(
    cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    await serve(cluster, tiny)
    version = environments.VERSIONS[-1]
    found = await run(cluster.client.url, version, tiny)
    command = str((await asyncio.to_thread(environments.python_with, version)).with_name("tinker"))

    async def told(*argv: str) -> Any:
        return json.loads(await called(cluster.client.url, command, "-f", "json", *argv, of=tmp_path))

    model, named = found["saved"].split("/")[2], found["named"]
    assert str(tiny) in str(await told("model", "list"))
    assert model in str(await told("run", "list")) and model in str(await told("run", "info", model))
    assert named in str(await told("checkpoint", "list", "--run-id", model))
    assert "sampler" in str(await told("checkpoint", "info", named))
    await called(cluster.client.url, command, "checkpoint", "publish", named)
    assert "True" in str(await told("checkpoint", "info", named))
    await called(cluster.client.url, command, "checkpoint", "unpublish", named)
    await called(cluster.client.url, command, "checkpoint", "set-ttl", named, "--ttl", "7200")
    second = found["second"]
    await called(cluster.client.url, command, "checkpoint", "download", second, "--output", str(tmp_path / "out"))
    files = {path.name: path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    assert json.loads(files["adapter_config.json"].read_text())["r"] == 4
    await called(cluster.client.url, command, "checkpoint", "delete", "--yes", second)
    assert second not in str(await told("checkpoint", "list", "--run-id", model))


async def test_kills_cost_a_client_time_and_nothing_else(cluster: Cluster, tiny: Path) -> None:
    """The losses are those of a run without a kill; only who samples draws again."""
    job = await serve(cluster, tiny)
    expected = await run(cluster.client.url, environments.VERSIONS[-1], tiny)
    found = await run_with_kills(cluster, job, tiny)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["again"] == pytest.approx(expected["again"], rel=1e-4)
    assert found["prompt_logprobs"][1:] == pytest.approx(expected["prompt_logprobs"][1:], rel=1e-3)


@pytest.mark.parametrize(("example", "steps"), [("supervised", 60), ("reinforcement", 30)])
async def test_the_examples_learn(cluster: Cluster, tiny: Path, example: str, steps: int) -> None:
    await serve(cluster, tiny)
    python = await asyncio.to_thread(environments.python_with, environments.VERSIONS[-1])
    printed = await called(cluster.client.url, str(python), str(EXAMPLES / f"{example}.py"), "--steps", str(steps))
    shown = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]
    if example == "supervised":
        assert shown[-1] < 0.5 * shown[0]
    else:
        assert sum(shown[-5:]) > 2 * sum(shown[:5]) and "/weights/copies-digits" in printed
