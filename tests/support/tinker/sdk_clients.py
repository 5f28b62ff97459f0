"""Clients with the SDK of Tinker, each a process of its own: their runs, its command line, and services that are killed
meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from opentinker.shared.spec import parse_spec
from opentinker.shared.state.tinker.store import TinkerStore
from tests.conftest import until
from tests.support.api import OPERATOR
from tests.support.cluster import Cluster
from tests.support.tinker import environments


async def serve(
    cluster: Cluster, base: Path, *, name: str = "tinker", context_length: int = 128, **tinker: Any
) -> str:  # fmt: skip
    """Return the id of the running Tinker server; the first call starts it."""
    for found in await cluster.client.jobs():
        if found["kind"] == "tinker" and found["state"] == "running":
            return str(found["id"])
    rollout = {"context_length": context_length}
    spec = {"name": name, "kind": "tinker", "model": {"base": str(base)}, "rollout": rollout, "tinker": tinker}
    job = await cluster.submit(parse_spec(spec))
    await cluster.runs(job)
    return job


async def called(url: str, *argv: str, of: Path | None = None, timeout_s: float = 400.0) -> str:
    """Return what a command of an environment prints; it succeeds. `of`: its working directory."""
    environ = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": f"tml-{OPERATOR}", "TINKER_TELEMETRY": "0"}
    environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONPATH", None)
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=of
    )
    assert done.returncode == 0, f"{argv}: {done.stdout[-1000:]} {done.stderr[-4000:]}"
    return done.stdout


async def run(url: str, version: str, base: Path | str, *options: str) -> dict[str, Any]:
    """Return what `client_run.py` prints."""
    python = await asyncio.to_thread(environments.python_with, version)
    printed = await called(url, str(python), str(environments.CLIENT_RUN), str(base), *options)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


async def run_with_kills(cluster: Cluster, job: str, base: Path, *options: str) -> dict[str, Any]:
    """Return the same of a run in which trainer, scheduler and rollout worker are killed once it has begun."""
    store = TinkerStore(cluster.store.redis)
    before = set(await store.models_of(job))
    running = asyncio.create_task(run(cluster.client.url, environments.VERSIONS[-1], base, *options))

    async def began() -> bool:
        begun = set(await store.models_of(job)) - before
        return any([await store.answered(f"{model}#3") is not None for model in begun])

    await until(began)
    for name in ("trainer-0", "scheduler", "rollout_worker-0"):
        cluster.kill(name)
    return await running
