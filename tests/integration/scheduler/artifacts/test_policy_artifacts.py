"""A job with several policies leaves artifacts under its own id and under those of its policies."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from opentinker import ApiError, AsyncClient
from opentinker.sdk.client import ApiConflict
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.artifacts.retention import Rule
from opentinker.services.scheduler.jobs.check_start_checkpoint import SourceCheckpoint, mistakes_in
from opentinker.services.scheduler.jobs.cleanup import JobCleaner
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.artifacts import ArtifactEntry, ArtifactIndex
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.core import JobState, part_id
from opentinker.shared.types.manifest import read_manifest
from tests.conftest import until
from tests.support.api import write_checkpoint
from tests.support.factories import make_spec
from tests.support.scheduling import archive, new_job

FILES = {"model.safetensors": b"weights", "trainer/state.json": b"{}"}
PATH = "checkpoints/step-000010"
GAME: dict[str, Any] = {
    "environment": {"name": "signalling"},
    "algorithm": {"group_size": 4, "groups_per_batch": 2},
    "train": {"learner": "simulated", "steps": 3, "keep_checkpoints": 2},
    "seats": {"speaker": "speaker", "listener": "listener"},
    "policies": {
        "speaker": {},
        "listener": {
            "model": {"base": "other"},
            "algorithm": {"groups_per_batch": 1},
            "train": {"steps": 6, "keep_checkpoints": 5},
        },
    },
}


async def begun(ctx: Context, **changes: Any) -> str:
    """A job with two policies that has had a trainer."""
    return await new_job(ctx.store, state=JobState.STARTING, **{**GAME, **changes})


async def test_checkpoints_of_a_running_job_s_policies_outlive_the_trainer_s(ctx: Context) -> None:
    job = await begun(ctx, artifacts={"keep_all": True})
    speaker, archiver = part_id(job, "speaker"), Archiver(ctx)
    for step in (10, 20):
        directory = write_checkpoint(ctx, speaker, step, FILES)
        await archive(archiver)
        shutil.rmtree(directory)
    assert (await archiver.index.of(speaker)).keys() == {PATH, "checkpoints/step-000020"}
    assert not await archiver.index.of(part_id(job, "listener"))


async def test_policies_are_not_closed_before_their_trainer_has_let_go(ctx: Context) -> None:
    job = await begun(ctx)
    archiver, parts = Archiver(ctx, linger_s=-60.0), {job, part_id(job, "speaker"), part_id(job, "listener")}
    await archiver.scan()
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await archive(archiver)
    assert parts <= set(await archiver.index.opened()), "the trainer may still write its last checkpoints"
    await ctx.store.ended(job)
    await archive(archiver)
    assert not parts & set(await archiver.index.opened())


async def test_a_policy_s_record_has_its_own_settings(ctx: Context) -> None:
    job = await begun(ctx)
    speaker, listener = await ctx.store.jobs([part_id(job, "speaker"), part_id(job, "listener")])
    assert [one.id for one in (speaker, listener)] == [f"{job}~speaker", f"{job}~listener"]
    assert [one.spec["model"]["base"] for one in (speaker, listener)] == ["model", "other"]
    assert [one.spec["algorithm"]["groups_per_batch"] for one in (speaker, listener)] == [2, 1]
    rule = Rule.of(listener.spec)
    assert (rule.last, rule.steps, Rule.of(speaker.spec).last) == (5, 6, 2)
    whole = await ctx.store.job(job)
    assert whole.part("listener") == listener and whole.part("") == whole
    assert listener.policies == whole.policies == ["speaker", "listener"]


async def test_an_adapter_of_a_policy_is_compared_with_that_policy_s_base(ctx: Context) -> None:
    job = await begun(ctx)
    (listener,) = await ctx.store.jobs([part_id(job, "listener")])
    directory = write_checkpoint(ctx, listener.id, 10, {"adapter_model.safetensors": b"", "adapter_config.json": b"{}"})
    chosen = SourceCheckpoint(listener, directory, read_manifest(directory))
    lora = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"]}
    spec = make_spec(model={"base": "model", "lora": lora}, train={"steps": 3})
    (mistake,) = mistakes_in(chosen, spec, "model")
    assert mistake["problem"] == "it is an adapter of other, and model.base is model"


async def test_history_stays_until_nothing_of_any_policy_is_left(ctx: Context) -> None:
    job = await begun(ctx, artifacts={"keep_all": True, "expire_days": 1e-9})
    speaker, listener, archiver = part_id(job, "speaker"), part_id(job, "listener"), Archiver(ctx, linger_s=-60.0)
    index = archiver.index
    for part in (speaker, listener):
        write_checkpoint(ctx, part, 10, FILES)
    await archive(archiver)
    held = (await index.of(speaker))[PATH]
    await index.publish("default", "best", speaker, held, "key")
    await ctx.store.update(job, event="left")
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await ctx.store.ended(job)
    for _ in range(2):
        await archive(archiver)
    assert (await index.of(speaker)).keys() == {PATH} and not await index.of(listener) and not await index.of(job)
    assert not (await ctx.store.job(job)).deleted
    kinds = [event["event"] for event in await ctx.store.events(job)]
    assert kinds.count("artifacts_expired") == 1 and "left" in kinds, "its events are still there"
    await index.unpublish("default", "best")
    await archive(archiver)
    assert (await ctx.store.job(job)).deleted and not await index.of(speaker)
    assert not {job, speaker, listener} & set(await index.expired(4e9))
    assert [event["event"] for event in await ctx.store.events(job)].count("artifacts_expired") == 1, "the last alone"


async def test_an_ending_job_without_a_record_is_not_kept_for_ever(ctx: Context) -> None:
    await ctx.store.redis.sadd("jobs:ending", "j-gone000000")
    await JobCleaner(ctx, UNFENCED).clean()
    assert await ctx.store.ending_jobs() == []


async def test_stored_bytes_of_a_job_are_those_of_its_policies_too(ctx: Context, client: AsyncClient) -> None:
    job = await begun(ctx)
    home = ctx.settings.data_dir / "jobs"
    for part, text in ((job, b"1"), (part_id(job, "speaker"), b"123"), (part_id(job, "listener"), b"12345")):
        (home / part).mkdir(parents=True)
        (home / part / "metrics.jsonl").write_bytes(text)
    (row,) = (await client.usage(job=job))["usage"]
    assert row["bytes_stored"] == 9
    ended = await begun(ctx)
    await ctx.store.transition(ended, JobState.CANCELLED)
    for part, size in ((ended, 10), (part_id(ended, "speaker"), 20), (part_id(ended, "listener"), 40)):
        await ArtifactIndex(ctx.store.redis).add("default", part, ArtifactEntry(path="f", bytes=size, created=0.0))
    (row,) = (await client.usage(job=ended))["usage"]
    assert row["bytes_stored"] == 70


async def test_checkpoints_of_a_policy_are_not_deleted_while_its_job_is_ending(
    ctx: Context, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def clean(_: JobCleaner) -> None:
        """Its workers have not let go."""

    monkeypatch.setattr(JobCleaner, "clean", clean)
    job = await begun(ctx)
    write_checkpoint(ctx, part_id(job, "speaker"), 10, FILES)
    await ctx.store.transition(job, JobState.CANCELLED)
    index = ArtifactIndex(ctx.store.redis)
    await until(lambda: ctx.store.ending_jobs(), lambda ending: job in ending)
    await index.close(part_id(job, "speaker"), None)
    with pytest.raises(ApiConflict, match="still being archived"):
        await client.delete_artifacts(part_id(job, "speaker"), 10)


async def test_deleting_everything_of_one_policy_is_refused_and_deletes_nothing(
    quick: None, client: AsyncClient, ctx: Context
) -> None:
    job = await begun(ctx)
    for policy in ("speaker", "listener"):
        write_checkpoint(ctx, part_id(job, policy), 10, FILES)
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    with pytest.raises(ApiError, match="policy") as wrong:
        await client.delete_artifacts(part_id(job, "speaker"))
    assert wrong.value.status == 422
    for policy in ("speaker", "listener"):
        assert [held["step"] for held in await client.checkpoints(part_id(job, policy))] == [10]


async def test_a_checkpoint_named_without_its_policy_is_refused_with_how_to_name_it(
    client: AsyncClient, ctx: Context
) -> None:
    job = await begun(ctx)
    write_checkpoint(ctx, part_id(job, "speaker"), 10, FILES)
    how = f"has several policies: take a checkpoint of one, {job}~speaker@latest"
    with pytest.raises(ApiError) as wrong:
        await client.publish(f"{job}@latest", "best")
    assert how in wrong.value.mistakes[0]["problem"]
    seats = {"listener": {"frozen": f"{job}@10"}}
    for spec in (
        make_spec(environment={"name": "signalling"}, seats=seats),
        make_spec(start={"from": f"{job}@latest"}),
    ):
        with pytest.raises(ApiError) as wrong:
            await client.submit(spec.model_dump(mode="json"))
        assert any(how in mistake["problem"] for mistake in wrong.value.mistakes)
    assert (await client.publish(f"{job}~speaker@latest", "best"))["checkpoint"] == f"{job}~speaker@10"
