"""Checkpoints in the artifact index, and eval jobs that played them, without a trainer or workers."""

from __future__ import annotations

from typing import Any

import orjson

from opentinker.shared.spec import parse_spec
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex, TrainingEvaluation, checkpoint_path
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, WeightVersion
from opentinker.shared.types.manifest import FileEntry, Manifest
from tests.support.scheduling import new_job

BASE = "some/model"
LORA = {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj"]}


async def kept(
    store: Store, job: str, step: int, created: float, *, tenant: str = "default", lora: bool = False,
    exact: float | None = None,
) -> str:  # fmt: skip
    """Put a checkpoint into the index, evaluated by its job a second later if `exact` is given; return JOB@STEP."""
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    files = {weights: FileEntry(bytes=100 + step, sha256=""), "trainer/state.json": FileEntry(bytes=7, sha256="")}
    version = WeightVersion(1, step)
    manifest = Manifest(job=job, epoch=1, step=step, version=version, files=files, created=created)
    evaluation = None if exact is None else TrainingEvaluation(finished=created + 1.0, values={"val/exact": exact})
    entry = ArtifactEntry(
        path=checkpoint_path(step), bytes=107 + step, created=created, manifest=manifest, evaluation=evaluation
    )
    assert await ArtifactIndex(store.redis).add(tenant, job, entry) == "ok"
    return f"{job}@{step}"


async def trained(store: Store, *, start: str = "", **changes: Any) -> str:
    """A job that trains; its model is BASE."""
    origin = {"start": {"from": start}} if start else {}
    return await new_job(store, **{"model": {"base": BASE}, "train": {"steps": 3}, **origin, **changes})


async def evaluated(store: Store, checkpoint: str, exact: float, split: str = "", /, **values: float) -> str:
    """An eval job that played a checkpoint. `split`: of the environment's config."""
    environment = {"name": "bandit", "config": {"split": split} if split else {}}
    spec: dict[str, Any] = {"kind": "eval", "name": "look", "model": {"base": BASE}, "environment": environment}
    spec |= {"evaluation": {"episodes": 2}, "rollout": {"engine": "toy"}, "start": {"from": checkpoint}}
    id = f"j-ev{checkpoint[2:5]}{int(exact * 1e5):05d}"
    await store.create_job(id=id, spec=parse_spec(spec).model_dump(mode="json", by_alias=True), tenant="default")
    for state in (JobState.STARTING, JobState.RUNNING):
        await store.transition(id, state)
    found = {"val/exact": exact, "val/exact/low": exact - 0.1, "val/exact/high": exact + 0.1, **values}
    await store.transition(id, JobState.SUCCEEDED, result=orjson.dumps({"values": found}).decode())
    return id
