"""LoRA jobs that share a trainer process and its base model: who is placed there, a kill, and the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from opentinker.services.trainer import checkpoint
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.manifest import ADAPTER
from tests.conftest import until
from tests.samples.row_samples import chat_model, copies, row_spec, write_rows
from tests.support.cluster import Cluster, shared_fixture
from tests.support.factories import make_spec

LORA = {"rank": 8, "alpha": 16.0}
STEPS = 40
"""Of the reinforcement-learning job."""
SHARED = {"trainer": "shared"}
SETTINGS: dict[str, Any] = {"bank_jobs": 3, "bank_tokens": 1024, "heartbeat_s": 0.5, "worker_ttl_s": 3}
pytestmark = pytest.mark.asyncio(loop_scope="module")


cluster = shared_fixture(Cluster, **SETTINGS)


def rows_of(base: Path, rows: Path, seed: int, **train: Any) -> JobSpec:
    """Of a job that learns to copy; the seed decides the adapter and the order of rows."""
    train = {"steps": 160, "lr": 1e-3, "checkpoint_every": 20, "seed": seed, **train}
    return row_spec(base, rows, model={"lora": LORA}, train=train, resources=SHARED)


def played(base: Path, **changes: Any) -> JobSpec:
    """Of a reinforcement-learning job with episodes of 0.1 s."""
    train = {"learner": "torch", "steps": STEPS, "lr": 1e-3, "checkpoint_every": 3}
    rollout = {"engine": "toy", "max_tokens": 8, "toy": {"seconds_per_token": 0.02}}
    return make_spec(model={"base": str(base), "lora": LORA}, train=train, rollout=rollout, resources=SHARED, **changes)


def weights(cluster: Cluster, job: str) -> dict[str, Tensor]:
    directory, manifest = checkpoint.list_checkpoints(cluster.data / "jobs" / job / "checkpoints")[-1]
    assert manifest.step > 0
    found: dict[str, Tensor] = load_file(directory / ADAPTER)
    return found


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    one, other = (torch.cat([some[name].double().flatten() for name in sorted(expected)]) for some in (found, expected))
    return float((one - other).norm() / other.norm())


async def test_jobs_of_one_base_train_in_one_process_and_survive_its_kill(system: Cluster, tmp_path: Path) -> None:
    """The weights are those of the same jobs one at a time without a kill."""
    base, rows = chat_model(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl", copies(64))
    alone = {seed: weights(system, await system.run(rows_of(base, rows, seed))) for seed in (1, 2)}
    reinforced = await system.submit(played(base))
    await until(lambda: system.step(reinforced), lambda step: step >= 2)
    supervised = {seed: await system.submit(rows_of(base, rows, seed)) for seed in (1, 2)}
    jobs = [*supervised.values(), reinforced]

    async def steps() -> list[int]:
        return [await system.step(job) for job in jobs]

    await until(steps, lambda found: min(found) >= 2)
    workers = [worker for worker in await system.store.workers() if worker.job in jobs and worker.bank]
    assert len(workers) == 3 and len({worker.pid for worker in workers}) == 1
    system.kill("trainer-0")
    for job in jobs:
        assert (await system.succeeds(job))["restarts"] == 1
    for seed, job in supervised.items():
        assert gap(weights(system, job), alone[seed]) < 1e-2
        assert gap(weights(system, job), alone[3 - seed]) > 0.1
    ledger = (await system.client.job(reinforced))["ledger"]
    assert ledger["trained"] == STEPS * 2 and ledger["pending"] == 0


async def test_a_job_of_another_base_waits_and_says_for_what(system: Cluster, tmp_path: Path) -> None:
    first, second = (chat_model(tmp_path / name, hidden_size=size) for name, size in (("a", 32), ("b", 64)))
    rows = write_rows(tmp_path / "rows.jsonl", copies(64))
    running = await system.submit(rows_of(first, rows, 1, steps=100_000))
    await system.runs(running)
    waiting = await system.submit(rows_of(second, rows, 1, steps=10))

    async def told() -> str:
        return str((await system.client.job(waiting))["waiting_for"])

    assert f"for jobs that share {second} in float32" in await until(told, lambda text: "share" in text)
    await system.client.cancel(running)
    await system.succeeds(waiting)


async def test_a_job_with_a_trainer_of_its_own_takes_none_that_is_shared(system: Cluster, tmp_path: Path) -> None:
    base, rows = chat_model(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl", copies(8))
    own = await system.submit(row_spec(base, rows, model={"lora": LORA}, resources={"trainer": "own"}))

    async def told() -> str:
        return str((await system.client.job(own))["waiting_for"])

    assert "trainer (none is running)" in await until(told)
    system.env["OPENTINKER_BANK_JOBS"] = "0"
    system.add("trainer")
    await system.succeeds(own)
