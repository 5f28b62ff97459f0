"""A base model, a job of it with a checkpoint, and the spec of one that starts from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker import AsyncClient
from opentinker.shared.runtime.service import Context
from tests.integration.scheduler.start_checkpoint.checkpoint_files import full_files, spec_of
from tests.support.api import write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    files = full_files(directory)
    (directory / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    (directory / "model.safetensors").write_bytes(files["model.safetensors"])
    (directory / "made.safetensors").unlink()
    return directory


@pytest.fixture
async def first(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> str:
    """A job with a checkpoint of step 10."""
    job = str((await client.submit(spec_of(base)))["id"])
    write_checkpoint(ctx, job, 10, full_files(tmp_path))
    return job


@pytest.fixture
def again(base: Path, first: str) -> dict[str, Any]:
    """The spec of a job that starts from it."""
    return spec_of(base) | {"start": {"from": f"{first}@10"}}


@pytest.fixture
def homes(ctx: Context) -> Path:
    return ctx.settings.data_dir / "jobs"
