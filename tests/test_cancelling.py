"""Jobs cancelled while real workers load their models: files that never end hold the loads."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from opentinker.shared.types import JobState, WorkerInfo
from tests.cluster import Cluster, toy_model
from tests.conftest import until
from tests.row_samples import chat_model, copies, row_spec, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("cancelling")
    # Libraries are imported while a lease is held, and hold the interpreter: that is not to count as silence here.
    async with Cluster(directory, trainers=0, rollout_workers=0, env_workers=0, worker_ttl_s=60) as cluster:
        yield cluster


async def seen(cluster: Cluster, name: str) -> WorkerInfo | None:
    return next((worker for worker in await cluster.store.workers() if worker.id == name), None)


async def is_free_again(cluster: Cluster, name: str, before: WorkerInfo) -> None:
    """In the same process, which has begun anew: nobody has seen it end."""

    async def idle() -> bool:
        worker = await seen(cluster, name)
        return worker is not None and worker.status == "idle" and worker.incarnation != before.incarnation

    await until(idle)
    assert cluster.processes[name].pid == before.pid and cluster.processes[name].exits == []
    assert "begins_anew" in cluster.logs(name)


async def cancelled(cluster: Cluster, job: str) -> None:
    """With nothing held, and not for a fault of its workers."""
    await cluster.client.cancel(job)

    async def free() -> bool:
        return job not in {lease.job for lease in await cluster.store.leases()}

    await until(free)
    record = await cluster.store.job(job)
    assert (record.state, record.restarts, record.rollout_losses) == (JobState.CANCELLED, 0, 0)


def endless(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@contextlib.contextmanager
def writing() -> Iterator[list[int]]:
    """For what `is_read` opens."""
    writers: list[int] = []
    yield writers
    for writer in writers:
        os.close(writer)


def is_read(path: Path, writers: list[int]) -> bool:
    """Somebody has begun to read the file, and waits from now on for what does not come."""
    try:
        writers.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # nobody yet
        return False
    return True


async def test_trainer_that_is_loading_is_free_again(system: Cluster, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", copies(4))
    job = await system.submit(row_spec(model, rows))
    endless(model / "config.json")
    name = system.add("trainer")
    with writing() as writers:
        await until(lambda: is_read(model / "config.json", writers))
        before = await seen(system, name)
        assert before is not None and before.status == "loading"
        await cancelled(system, job)
        await is_free_again(system, name, before)


async def test_vllm_that_is_starting_is_free_again_and_serves_the_next_job(
    system: Cluster, small: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small, model)
    parts: dict[str, Any] = {"name": "chat", "kind": "inference"}
    job = (await system.client.submit({**parts, "model": {"base": str(model)}}))["id"]
    endless(model / "model.safetensors")
    name = system.add("rollout_worker")
    await until(lambda: system.children(name))
    before = await seen(system, name)
    assert before is not None and before.status == "loading"
    await cancelled(system, job)
    await is_free_again(system, name, before)
    assert system.children(name) == [], "its engine is gone"
    toy = {"model": {"base": str(toy_model(tmp_path / "toy"))}, "rollout": {"engine": "toy"}}
    served = (await system.client.submit({**parts, **toy}))["id"]

    async def serves() -> bool:
        return (await system.store.job(served)).state == JobState.RUNNING

    await until(serves)
