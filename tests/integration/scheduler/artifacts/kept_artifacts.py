"""Jobs with checkpoints, and the artifacts that are kept of them."""

from __future__ import annotations

from typing import Any

from opentinker import AsyncClient
from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.core import JobState
from tests.conftest import until
from tests.support.factories import make_spec


def spec_with(**artifacts: Any) -> dict[str, Any]:
    train = {"learner": "simulated", "steps": 100, "checkpoint_every": 10, "keep_checkpoints": 2}
    return make_spec(model__base="some/model", train=train, artifacts=artifacts).model_dump(mode="json")


async def begun(client: AsyncClient, ctx: Context, **artifacts: Any) -> str:
    """A job that has had a trainer."""
    job = str((await client.submit(spec_with(**artifacts)))["id"])
    await ctx.store.transition(job, JobState.STARTING, epoch=1)
    return job


async def kept_steps(ctx: Context, job: str) -> list[int]:
    kept = await ArtifactCatalog(ctx).index.of(job)
    return sorted(entry.manifest.step for entry in kept.values() if entry.manifest is not None)


async def keeping(ctx: Context, job: str, step: int) -> None:
    await until(lambda: kept_steps(ctx, job), lambda steps: step in steps)


async def listed_steps(client: AsyncClient, job: str) -> list[int]:
    return [c["step"] for c in await client.checkpoints(job)]


async def finished(ctx: Context, job: str) -> None:
    """Over, and put away."""
    await ctx.store.transition(job, JobState.SUCCEEDED, epoch=1)
    await put_away(ctx, job)


async def put_away(ctx: Context, job: str) -> None:
    index = ArtifactCatalog(ctx).index

    async def away() -> bool:
        return job not in {*await ctx.store.ending_jobs(), *await index.opened(), *await index.removing()}

    await until(away)


async def expired(client: AsyncClient, job: str) -> bool:
    return any(event["event"] == "artifacts_expired" for event in await client.event_log(job))


def no_removal(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")
