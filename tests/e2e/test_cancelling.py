"""Jobs cancelled while real workers load their models: files that never end hold the loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.types.core import JobState
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import until
from tests.samples.row_samples import chat_model, copies, row_spec, write_rows
from tests.support.cluster import ROOT, Cluster, shared_fixture, toy_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


cluster = shared_fixture(Cluster, trainers=0, rollout_workers=0, env_workers=0, worker_ttl_s=60, forked=False)
"""Libraries are imported while a lease is held and block the interpreter, which must not count as silence here.
`endless` works by a module that Python imports when it starts: forks have started before."""


async def seen(cluster: Cluster, name: str) -> WorkerInfo | None:
    return next((worker for worker in await cluster.store.workers() if worker.id == name), None)


async def is_free_again(cluster: Cluster, name: str, before: WorkerInfo) -> None:
    """In the same process, which has begun anew: nobody has seen it end."""
    await until(
        lambda: seen(cluster, name),
        lambda worker: worker is not None and worker.status == "idle" and worker.incarnation != before.incarnation,
    )
    assert cluster.processes[name].pid == before.pid and cluster.processes[name].exits == []
    assert "process_restarts" in cluster.logs(name)


async def cancelled(cluster: Cluster, job: str) -> None:
    """With nothing held, and not for a fault of its workers."""
    await cluster.client.cancel(job)
    await until(cluster.store.leases, lambda found: job not in {lease.job for lease in found})
    record = await cluster.store.job(job)
    assert (record.state, record.restarts, record.rollout_losses) == (JobState.CANCELLED, 0, 0)


def endless(system: Cluster, event: str, path: Path, **more: str) -> Path:
    """Workers that are added from now on wait for ever at this place. Gives a file that is there when one does."""
    mark = path.parent.with_suffix(".reached")
    system.env |= {"PYTHONPATH": str(ROOT / "tests" / "support" / "endless"), "ENDLESS_MARK": str(mark), **more}
    system.env |= {"ENDLESS_EVENT": event, "ENDLESS_PATH": str(path)}
    return mark


async def test_trainer_that_is_loading_is_free_again(system: Cluster, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", copies(4))
    (model / "generation_config.json").write_text("{}")
    job = await system.submit(row_spec(model, rows))
    reached = endless(system, "open", model / "generation_config.json")
    name = system.add("trainer")
    await until(reached.exists)
    before = await seen(system, name)
    assert before is not None and before.status == "loading"
    await cancelled(system, job)
    await is_free_again(system, name, before)


@pytest.mark.nightly
async def test_starting_vllm_is_freed_and_serves_the_next_job(system: Cluster, tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    parts: dict[str, Any] = {"name": "chat", "kind": "inference"}
    job = (await system.client.submit({**parts, "model": {"base": str(model)}}))["id"]
    reached = endless(system, "glob.glob", model, ENDLESS_CHILD="1")
    name = system.add("rollout_worker")
    await until(reached.exists)
    assert system.children(name)
    before = await seen(system, name)
    assert before is not None and before.status == "loading"
    await cancelled(system, job)
    await is_free_again(system, name, before)
    assert system.children(name) == [], "its engine is gone"
    toy = {"model": {"base": str(toy_model(tmp_path / "toy"))}, "rollout": {"engine": "toy"}}
    served = (await system.client.submit({**parts, **toy}))["id"]
    await until(lambda: system.store.job(served), lambda found: found.state == JobState.RUNNING)
