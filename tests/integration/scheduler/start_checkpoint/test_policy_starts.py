"""Policies of a job that start from checkpoints of earlier jobs: what is refused, and what is kept for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentinker import AsyncClient
from opentinker.services.scheduler.artifacts.registry import lineage_of
from opentinker.services.scheduler.artifacts.retention import used_by
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.sweeps.uses import uses_of
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import part_id
from opentinker.shared.types.manifest import read_manifest, start_of
from tests.integration.scheduler.start_checkpoint.checkpoint_files import LORA, adapter_files, full_files, spec_of
from tests.support.api import refused, write_checkpoint

SEATS = {"speaker": "speaker", "listener": "listener"}
MODELS: dict[str, dict[str, Any]] = {"speaker": {}, "listener": {"model": {"lora": LORA}}}


def game(base: Path, **starts: dict[str, Any]) -> dict[str, Any]:
    """The speaker has full weights, the listener an adapter."""
    policies = {name: {**own, "start": starts.get(name)} for name, own in MODELS.items()}
    return spec_of(base, environment={"name": "signalling"}, policies=policies, seats=SEATS)


async def trained(client: AsyncClient, ctx: Context, base: Path, tmp_path: Path) -> str:
    """Return a job whose policies have checkpoints of different steps."""
    job = str((await client.submit(game(base)))["id"])
    write_checkpoint(ctx, part_id(job, "speaker"), 10, full_files(tmp_path))
    write_checkpoint(ctx, part_id(job, "listener"), 20, adapter_files(tmp_path))
    return job


async def test_each_policy_starts_from_a_checkpoint_that_is_kept_for_it(
    client: AsyncClient, ctx: Context, base: Path, tmp_path: Path
) -> None:
    first = await trained(client, ctx, base, tmp_path)
    speaker, listener = (part_id(first, name) for name in SEATS)
    job = (await client.submit(game(base, speaker={"from": f"{speaker}@latest", "optimizer": True})))["id"]
    spec = (await client.job(job))["spec"]
    assert spec["start"] is None and spec["policies"]["listener"]["start"] is None
    assert spec["policies"]["speaker"]["start"] == {"from": f"{speaker}@10", "optimizer": True}
    kept = start_of(ctx.settings.data_dir, job, "speaker")
    assert read_manifest(kept).step == 10 and (kept / "trainer" / "optimizer.safetensors").read_bytes() == b"moments"
    assert used_by([await ctx.store.job(job)]) == {speaker: {10}}, "it is not deleted"

    record = await ctx.store.job(job)
    assert lineage_of(record.part("speaker"), {}) == [str(base), f"{speaker}@10"]
    assert lineage_of(record.part("listener"), {}) == [str(base)]

    both = game(base, speaker={"from": f"{speaker}@10"}, listener={"from": f"{listener}@latest"})
    again = (await client.submit(both))["id"]
    assert [read_manifest(start_of(ctx.settings.data_dir, again, name)).step for name in SEATS] == [10, 20]


async def test_all_jobs_of_a_sweep_start_from_the_checkpoints_that_it_found(
    client: AsyncClient, ctx: Context, base: Path, tmp_path: Path
) -> None:
    first = await trained(client, ctx, base, tmp_path)
    latest = {name: {"from": f"{part_id(first, name)}@latest"} for name in SEATS}

    pinned = [f"{first}~speaker@10", f"{first}~listener@20"]

    async def starts(**parameters: list[Any]) -> list[str]:
        table = {"parameters": parameters, "metric": "speaker/reward/mean"}
        sweep = await SweepStore(ctx.store.redis).sweep(
            (await client.sweep({**game(base, **latest), "sweep": table}))["id"]
        )
        assert sweep.uses == uses_of(sweep.table, sweep.base) == sorted(pinned)
        return [sweep.base["policies"][name]["start"]["from"] for name in SEATS]

    assert await starts(**{"train.lr": [1e-5, 1e-4]}) == pinned
    varied = latest["speaker"]["from"]
    assert await starts(**{"policies.speaker.start.from": [varied]}) == [varied, pinned[1]]


async def test_what_does_not_fit_a_policy_is_refused_by_its_name(
    client: AsyncClient, ctx: Context, base: Path, tmp_path: Path
) -> None:
    first = await trained(client, ctx, base, tmp_path)
    crossed = game(base, speaker={"from": f"{first}~listener@20"}, listener={"from": f"{first}~speaker@10"})
    found = await refused(client, crossed)
    assert found.keys() == {"policies.speaker.start.from", "policies.listener.start.from"}
    assert "holds an adapter, and this job trains full weights" in found["policies.speaker.start.from"]
    assert "holds full weights, and this job trains an adapter" in found["policies.listener.start.from"]

    missing = game(base, speaker={"from": f"{first}@latest"}, listener={"from": f"{first}~listener@5"}) | {"name": ""}
    found = await refused(client, missing)
    assert found.keys() == {"name", "policies.speaker.start.from", "policies.listener.start.from"}
    assert f"take a checkpoint of one, {first}~speaker@latest" in found["policies.speaker.start.from"]
    assert "there are: 20" in found["policies.listener.start.from"]
