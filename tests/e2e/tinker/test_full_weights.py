"""Clients that train all weights, with the unmodified SDK: torch trains, vLLM samples, and kills cost time alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from opentinker.shared.spec import parse_spec
from tests.conftest import until
from tests.support.cluster import Cluster, shared_fixture
from tests.support.tinker import environments
from tests.support.tinker.sdk_clients import called, run, run_with_kills, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
NEWEST = environments.VERSIONS[-1]

cluster = shared_fixture(Cluster, heavy=True, bank_jobs=2, bank_tokens=1024)


@pytest.mark.parametrize("version", [NEWEST, environments.VERSIONS[0]])
async def test_a_client_trains_saves_samples_and_downloads(
    cluster: Cluster, tiny: Path, tmp_path: Path, version: str
) -> None:
    await serve(cluster, tiny, full_weights=True)
    found = await run(cluster.client.url, version, tiny, "0")
    first, *_, last = found["losses"]
    assert last < first and found["forward"] < last and found["lengths"] == [5, 3]
    assert "data[0]" in found["refused"] and math.isfinite(found["importance"])
    assert found["samples"] == found["sampled_logprobs"] and all(1 <= count <= 4 for count in found["samples"])
    blank, *others = found["prompt_logprobs"]
    assert blank is None and all(value < 0 for value in others) and len(others) == 2
    assert {"weights/first", "sampler_weights/named"} <= set(found["checkpoints"])
    if version == NEWEST:
        command, url = str(environments.python_with(version).with_name("tinker")), cluster.client.url
        model = found["saved"].split("/")[2]
        assert json.loads(await called(url, command, "-f", "json", "run", "info", model))["is_lora"] is False
        await called(url, command, "checkpoint", "download", found["second"], "--output", str(tmp_path / "out"))
        files = {path.name: path for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert load_file(files["model.safetensors"]).keys() == load_file(tiny / "model.safetensors").keys()


async def test_kills_cost_a_client_time_and_nothing_else(cluster: Cluster, tiny: Path) -> None:
    job = await serve(cluster, tiny, full_weights=True)
    expected = await run(cluster.client.url, NEWEST, tiny, "0")
    found = await run_with_kills(cluster, job, tiny, "0")
    assert found["losses"] == expected["losses"]
    assert found["again"] == expected["again"]
    assert found["prompt_logprobs"][1:] == pytest.approx(expected["prompt_logprobs"][1:], rel=1e-4)


async def test_a_server_for_adapters_of_the_base_waits_for_another_trainer(cluster: Cluster, tiny: Path) -> None:
    """The one that trains all weights has no adapters beside them."""
    await serve(cluster, tiny, full_weights=True)
    spec = {"name": "adapters", "kind": "tinker", "model": {"base": str(tiny)}, "rollout": {"engine": "toy"}}
    other = await cluster.submit(parse_spec(spec))
    record = await until(lambda: _waiting(cluster, other))
    assert "in float32" in record
    await cluster.client.cancel(other)


async def _waiting(cluster: Cluster, job: str) -> str:
    record = await cluster.store.job(job)
    return record.waiting_for if record.state == "queued" else ""
