"""Rules about artifacts, in a directory: what stays, names that replace job ids, deletions that fail or race."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson
import pytest

from opentinker import ApiError, AsyncClient
from opentinker.sdk.client import ApiConflict
from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactIndex
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.integration.scheduler.artifacts.kept_artifacts import (
    begun,
    expired,
    finished,
    keeping,
    kept_steps,
    listed_steps,
    no_removal,
    put_away,
    spec_with,
)
from tests.support.api import SPEC, Http, bearing, new_key_of, write_checkpoint

# --- rules ----------------------------------------------------------------------------------------------------------


async def test_rules_keep_the_newest_and_the_best(quick: None, client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx, keep_last=1, keep_best=1, best_metric="reward/mean")
    home = ctx.settings.data_dir / "jobs" / job
    for step, reward in ((10, 0.2), (20, 0.9), (30, 0.5), (40, 0.1)):
        home.mkdir(parents=True, exist_ok=True)
        with (home / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps({"epoch": 1, "step": step, "reward/mean": reward}) + b"\n")
        write_checkpoint(ctx, job, step, {"model.safetensors": str(step).encode()})
        await keeping(ctx, job, step)
    await finished(ctx, job)
    assert await kept_steps(ctx, job) == [20, 40] == await listed_steps(client, job)
    shown = (await client.job(job))["artifacts"]
    assert shown["rule"] == "the newest 1 and the 1 with the highest reward/mean" and shown["expires"] is None
    removed = [event["steps"] for event in await client.event_log(job) if event["event"] == "checkpoints_removed"]
    assert sorted(step for steps in removed for step in steps) == [10, 30]


async def test_what_a_job_begins_with_stays_until_that_is_over(quick: None, client: AsyncClient, ctx: Context) -> None:
    job = await begun(client, ctx, expire_days=1e-9)
    write_checkpoint(ctx, job, 10, {"trainer/state.json": b"{}"})
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [10])
    user = (await client.submit(spec_with(), from_checkpoint=f"{job}@10"))["id"]
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await put_away(ctx, job)
    await until(lambda: expired(client, job))
    assert await kept_steps(ctx, job) == [10]
    with pytest.raises(ApiConflict, match=user):
        await client.delete_artifacts(job, 10)
    await client.cancel(user)
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [])


@pytest.mark.parametrize("earlier", [False, True], ids=["", "stored by an earlier release"])
async def test_what_a_sweep_will_begin_with_stays_until_that_is_over(
    quick: None, client: AsyncClient, ctx: Context, earlier: bool
) -> None:
    first, later = [await begun(client, ctx, expire_days=1e-9) for _ in range(2)]
    for job in (first, later):
        write_checkpoint(ctx, job, 10, {"trainer/state.json": b"{}"})
        await until(partial(kept_steps, ctx, job), lambda steps: steps == [10])
    spec = {name: part for name, part in spec_with().items() if name != "start"}
    table = {"parameters": {"start.from": [f"{first}@latest", f"{later}@latest"]}, "max_running": 1}
    sweep = (await client.submit({**spec, "sweep": table}))["id"]
    if earlier:
        await ctx.store.redis.hdel(f"sweep:{sweep}", "uses")
    await ctx.store.transition(later, JobState.SUCCEEDED, epoch=1)
    await put_away(ctx, later)
    await until(lambda: expired(client, later))
    assert await kept_steps(ctx, later) == [10], "the job that begins with it is still to come"
    with pytest.raises(ApiConflict, match=f"sweep {sweep} "):
        await client.delete_artifacts(later, 10)
    await client.cancel_sweep(sweep)
    await until(lambda: kept_steps(ctx, later), lambda steps: steps == [])


@pytest.mark.parametrize("earlier", [False, True], ids=["", "stored by an earlier release"])
@pytest.mark.parametrize("tenant", ["default", "blue"])
async def test_a_text_that_looks_like_a_checkpoint_keeps_none(
    quick: None, client: AsyncClient, http: Http, ctx: Context, tenant: str, earlier: bool
) -> None:
    job = await begun(client, ctx, keep_all=True)
    write_checkpoint(ctx, job, 10, {"trainer/state.json": b"{}"})
    await finished(ctx, job)
    table = {"parameters": {"environment.config": [{"n": 1, "is": f"{job}@10"}, {"n": 2}]}, "max_running": 1}
    spec = {**SPEC, "notes": f"{job}@10", "tags": [f"{job}@10"], "sweep": table}
    key = await new_key_of(ctx.store, tenant)
    status, sweep = await http("POST", "/v1/sweeps", json=spec, headers=bearing(key))
    assert status == 201, sweep
    if earlier:
        await ctx.store.redis.hdel(f"sweep:{sweep['id']}", "uses")
    assert (await client.delete_artifacts(job, 10))["steps"] == [10]


# --- names ----------------------------------------------------------------------------------------------------------


async def test_published_name_replaces_a_job_id(quick: None, client: AsyncClient, ctx: Context, tmp_path: Path) -> None:
    job, other = await begun(client, ctx, keep_last=1), await begun(client, ctx)
    for step in (10, 20):
        write_checkpoint(ctx, job, step, {"trainer/state.json": str(step).encode()})
    write_checkpoint(ctx, other, 10, {"trainer/state.json": b"{}"})
    made = await client.publish(f"{job}@10", "gomoku.v1")
    assert made == await client.publish(f"{job}@10", "gomoku.v1"), "the same again changes nothing"
    with pytest.raises(ApiConflict, match=f"{job}@10"):
        await client.publish(f"{other}@latest", "gomoku.v1")
    for checkpoint, name in ((f"{job}@15", "x"), ("j-0000000000@1", "x"), (job, "x"), (f"{job}@10", job)):
        with pytest.raises(ApiError) as caught:
            await client.publish(checkpoint, name)
        assert caught.value.status == 422
    assert [one["checkpoint"] for one in await client.published()] == [f"{job}@10"]
    user = await client.submit(spec_with(), from_checkpoint="gomoku.v1")
    assert (await client.job(user["id"]))["spec"]["start"]["from"] == f"{job}@10"
    target = await client.download("gomoku.v1", tmp_path / "model", everything=True)
    assert (target / "trainer" / "state.json").read_bytes() == b"10"
    with pytest.raises(ApiError, match="nothing-such"):
        await client.submit(spec_with(), from_checkpoint="nothing-such")
    await client.cancel(user["id"])
    await finished(ctx, job)
    assert await listed_steps(client, job) == [10, 20]
    with pytest.raises(ApiConflict, match=r"opentinker unpublish gomoku\.v1"):
        await client.delete_artifacts(job)
    await client.unpublish("gomoku.v1")
    await until(lambda: kept_steps(ctx, job), lambda steps: steps == [20])
    with pytest.raises(ApiError, match="no checkpoint is published"):
        await client.download("gomoku.v1", tmp_path / "again")


@pytest.mark.parametrize("archived", [True, False])
async def test_deletion_of_a_checkpoint_that_failed_is_finished_by_the_next(
    quick: None, client: AsyncClient, ctx: Context, archived: bool
) -> None:
    job = await begun(client, ctx, keep_all=True)
    write_checkpoint(ctx, job, 10, {"model.safetensors": b"weights"})
    await finished(ctx, job)
    if not archived:
        index = ArtifactCatalog(ctx).index
        await index.remove("default", job, ["checkpoints/step-000010"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", no_removal)
        for _ in range(2):
            with pytest.raises(ApiConflict, match=f"could not be removed .* delete step 10 of job {job} again"):
                await client.delete_artifacts(job, 10)
    place = ctx.settings.data_dir / "jobs" / job / "checkpoints"
    assert any(place.iterdir())
    deleted = await client.delete_artifacts(job, 10)
    assert deleted["steps"] == [10] and (deleted["bytes"] == 7) == archived
    assert [event["event"] for event in await ctx.store.events(job)].count("checkpoints_removed") == 1
    with pytest.raises(ApiError, match="no checkpoint of step 10"):
        await client.delete_artifacts(job, 10)
    assert not place.exists()
    assert await listed_steps(client, job) == []


@pytest.mark.parametrize("step", [10, None])
async def test_checkpoint_that_is_published_during_a_deletion_stays(
    quick: None, client: AsyncClient, ctx: Context, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    job = await begun(client, ctx, keep_all=True, expire_days=1.0)
    write_checkpoint(ctx, job, 10, {"model.safetensors": b"weights"})
    await finished(ctx, job)
    remove, index = ArtifactIndex.remove, ArtifactCatalog(ctx).index

    async def just_before(self: ArtifactIndex, tenant: str, of: str, paths: Sequence[str], **options: int) -> list[str]:
        kept = (await index.of(job))["checkpoints/step-000010"]
        await index.publish("default", "gomoku.v1", job, kept, "key")
        return await remove(self, tenant, of, paths, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactIndex, "remove", just_before)
        with pytest.raises(ApiConflict, match="opentinker unpublish"):
            await client.delete_artifacts(job, step)
    assert await listed_steps(client, job) == [10] and await index.expires(job) is not None
    assert (await client.job(job))["deleted"] is None
    await client.unpublish("gomoku.v1")
    await put_away(ctx, job)
    await client.delete_artifacts(job, step)
    assert await listed_steps(client, job) == []
