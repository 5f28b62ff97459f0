"""Jobs that say nothing about their trainer: which of them share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from opentinker.services.scheduler.http import validate
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.spec.engines import base_of
from opentinker.shared.types.core import Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.samples.row_samples import chat_model, copies, row_spec, write_rows

LORA = {"lora": {"rank": 4}}


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    base, rows = chat_model(tmp_path / "m"), write_rows(tmp_path / "rows.jsonl", copies(4))
    return row_spec(base, rows, model=LORA).model_dump(mode="json")


async def starts(ctx: Context, base: str = "", job: str | None = None) -> WorkerInfo:
    """A shared trainer with one place; with `base` and `job` it is taken."""
    info = worker_info("trainer-0.0", Pool.TRAINER)
    detail = {"base": base} if base else {}
    info = msgspec.structs.replace(info, bank="trainer-0", detail=detail, job=job)
    await ctx.store.beat(info, 60)
    return info


async def trainer_of(ctx: Context, data: dict[str, Any]) -> str:
    id, _ = await submit(ctx, data, "default")
    return str((await ctx.store.job(id)).spec["resources"]["trainer"])


async def test_without_a_shared_trainer_a_job_has_its_own(ctx: Context, spec: dict[str, Any]) -> None:
    assert await trainer_of(ctx, spec) == "own"


async def test_an_adapter_shares_a_trainer_that_trains_nothing(ctx: Context, spec: dict[str, Any]) -> None:
    await starts(ctx)
    assert await trainer_of(ctx, spec) == "shared"
    assert await trainer_of(ctx, {**spec, "resources": {"trainer": "own"}}) == "own"
    assert await trainer_of(ctx, {**spec, "model": {**spec["model"], "lora": None}}) == "own"
    assert await trainer_of(ctx, {**spec, "model": {**spec["model"], "lora": {"rank": 4, "dropout": 0.1}}}) == "own"
    found = await validate.report_on(ctx, spec, "default", "all")
    (check,) = (one for one in found["checks"] if one["what"].startswith("trainer"))
    assert "share" in check["what"]


async def test_it_shares_one_with_a_free_place_on_its_base(ctx: Context, spec: dict[str, Any]) -> None:
    await starts(ctx, base="another in float32", job="j-0000000000")
    assert await trainer_of(ctx, spec) == "own"
    second = msgspec.structs.replace(worker_info("trainer-0.1", Pool.TRAINER), bank="trainer-0")
    await ctx.store.beat(second, 60)
    assert await trainer_of(ctx, spec) == "own"
    await starts(ctx, base=base_of(spec), job="j-0000000000")
    assert await trainer_of(ctx, spec) == "shared"


async def test_policies_share_one_with_as_many_free_places(ctx: Context, spec: dict[str, Any], tmp_path: Path) -> None:
    base = {"base": spec["model"]["base"]}
    game = {
        "name": "game",
        "model": {**base, **LORA},
        "environment": {"name": "signalling"},
        "algorithm": {"group_size": 2},
        "train": {"steps": 1},
        "policies": {"a": {}, "b": {}},
        "seats": {"speaker": "a", "listener": "b"},
    }
    await starts(ctx)
    assert await trainer_of(ctx, game) == "own"
    elsewhere = msgspec.structs.replace(worker_info("trainer-1.0", Pool.TRAINER), bank="trainer-1")
    await ctx.store.beat(elsewhere, 60)
    assert await trainer_of(ctx, game) == "own", "one place in each of two processes"
    second = msgspec.structs.replace(worker_info("trainer-0.1", Pool.TRAINER), bank="trainer-0")
    await ctx.store.beat(second, 60)
    assert await trainer_of(ctx, game) == "shared"
    found = await validate.report_on(ctx, game, "default", "all")
    (check,) = (one for one in found["checks"] if one["what"].startswith("trainer"))
    assert "2 places of one process" in check["what"] and check["found"] == "2 wanted, 2 running, 2 free"
    other = chat_model(tmp_path / "other")
    assert await trainer_of(ctx, {**game, "policies": {"a": {}, "b": {"model": {"base": str(other)}}}}) == "own"
