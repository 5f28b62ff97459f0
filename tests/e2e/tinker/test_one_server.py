"""One server of the Tinker API as real services with their own users of NATS and Redis: train, save, sample, a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from loadtest.support.tinker_client import TinkerClient, cross_entropy
from opentinker.shared.spec import parse_spec
from tests.samples.row_samples import chat_model
from tests.support.api import OPERATOR
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow
ROWS = [np.array([3, 4, 5, 6, 7, 8], np.int32), np.array([9, 10, 11], np.int32)]


async def steps(client: TinkerClient, count: int) -> list[float]:
    """Train on the rows and return the mean loss of each step."""
    losses = []
    for _ in range(count):
        found = await client.step(cross_entropy(ROWS), lr=1e-2)
        losses.append(-np.mean([value for one in found["loss_fn_outputs"] for value in one["logprobs"]["data"]]))
    return losses


async def sample(client: TinkerClient, path: str) -> Any:
    made = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
    sampler = (await client.call("create_sampling_session", made))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    params = {"max_tokens": 4, "temperature": 1.0}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": params, "num_samples": 2}
    return await client.result(await client.call("asample", asked))


async def saved(client: TinkerClient, name: str) -> str:
    asked = {"model_id": client.model, "seq_id": client.number(), "path": name}
    return str((await client.result(await client.call("save_weights_for_sampler", asked)))["path"])


async def test_a_client_trains_saves_and_samples_and_a_kill_costs_no_step(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "model")
    rollout = {"engine": "toy", "context_length": 64}
    spec = {"name": "tinker", "kind": "tinker", "model": {"base": str(base)}, "rollout": rollout}
    async with Cluster(tmp_path / "cluster", bank_jobs=2, bank_tokens=1024) as cluster, aiohttp.ClientSession() as http:
        await cluster.runs(await cluster.submit(parse_spec(spec)))
        clients = [TinkerClient(http, f"http://127.0.0.1:{cluster.http_port}", OPERATOR) for _ in range(2)]
        for client in clients:
            await client.create(str(base), rank=4)
        first, second = await asyncio.gather(*[steps(client, 6) for client in clients])
        assert first[-1] < 0.9 * first[0]
        assert second == pytest.approx(first, rel=1e-3)
        cluster.kill("trainer-0")
        assert (await steps(clients[0], 1))[0] < first[-1]
        path = await saved(clients[0], "named")
        assert path == f"tinker://{clients[0].model}/sampler_weights/named"
        found = await sample(clients[0], path)
        assert [1 <= len(one["tokens"]) <= 4 for one in found["sequences"]] == [True, True]
