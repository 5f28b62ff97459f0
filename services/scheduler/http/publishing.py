"""Handlers of names for checkpoints within a tenant, and of taking away what jobs left.

A published checkpoint stays, regardless of its job's rules, until it is unpublished. Checkpoints in use (an unfinished
job starts from one, or serves it) are not deleted either.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, field_validator

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.archiver import Archiver, delete_history, used_by
from opentinker.services.scheduler.artifacts.store import StoreUnavailable
from opentinker.services.scheduler.http.artifacts import step_of
from opentinker.services.scheduler.http.auth import may_see, principal_of, tenant_of
from opentinker.services.scheduler.http.errors import json_response, parsed, read_json
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.shared.spec.start import PUBLISHED, SAVED
from opentinker.shared.state.artifacts import Publication, checkpoint_path
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict, NotFound, SpecError


class NewPublication(BaseModel):
    """The body of POST /v1/published."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(max_length=63, pattern="^[a-z0-9][a-z0-9._-]*$")]
    """For [start], inference jobs and downloads: none of another checkpoint of the tenant, and no job's id."""
    checkpoint: Annotated[str, Field(pattern=f"^{SAVED.pattern}$")]
    """`JOB@STEP` or `JOB@latest`."""

    @field_validator("name")
    @classmethod
    def _no_job(cls, name: str) -> str:
        if not PUBLISHED.fullmatch(name):
            raise ValueError("looks like the id of a job")
        return name


class PublishingApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.store, self.artifacts = jobs, jobs.store, jobs.artifacts
        self.index = jobs.artifacts.index
        self.keeping = Archiver(jobs.ctx)

    # --- names ---------------------------------------------------------------------------------------------------

    async def publish(self, request: web.Request) -> web.Response:
        asked = parsed(NewPublication, await read_json(request))
        id, _, step = asked.checkpoint.partition("@")
        found = await self.store.jobs([id])
        if not found or not may_see(request, found[0].tenant):
            raise _wrong("checkpoint", asked.checkpoint, f"there is no job {id} of yours; `opentinker jobs` lists them")
        job = found[0]
        try:
            held = checkpoint_dir.choose(await self.artifacts.checkpoints(job), int(step) if step.isdigit() else None)
        except NotFound as error:
            raise _wrong("checkpoint", asked.checkpoint, f"job {id} has {error}") from None
        kept = await self.keeping.keep(job, held)
        made = await self.index.publish(job.tenant, asked.name, id, kept, principal_of(request).key)
        detail = {"name": made.name, "step": made.step, "by": made.key}
        await self.store.update(id, event="checkpoint_published", detail=detail)
        return json_response(_shown(made), 201, {"Location": f"/v1/published/{made.name}"})

    async def list(self, request: web.Request) -> web.Response:
        found = await self.index.published(tenant_of(request))
        return json_response({"published": [_shown(one) for one in found.values()]})

    async def get(self, request: web.Request) -> web.Response:
        return json_response(_shown(await self.index.publication(tenant_of(request), request.match_info["name"])))

    async def unpublish(self, request: web.Request) -> web.Response:
        """Unpublish a checkpoint. Its job's rules apply again and may remove it."""
        gone = await self.index.unpublish(tenant_of(request), request.match_info["name"])
        detail = {"name": gone.name, "step": gone.step, "by": principal_of(request).key}
        await self.store.update(gone.job, event="checkpoint_unpublished", detail=detail)
        await self.index.open(gone.job)
        return json_response(_shown(gone))

    # --- what goes -----------------------------------------------------------------------------------------------

    async def delete_checkpoint(self, request: web.Request) -> web.Response:
        job = await self.jobs.found(request)
        held = checkpoint_dir.choose(await self.artifacts.checkpoints(job), step_of(request))
        step = held.manifest.step
        if held.here and not job.state.final:
            raise Conflict(f"job {job.id} is {job.state}, and its trainer may resume from step {step}")
        await self._refuse_needed(job, {step})
        await self.index.remove(job.tenant, job.id, [checkpoint_path(step)])
        if held.here:
            await self.artifacts.workshop.delete(held.prefix)
        detail = {"steps": [step], "by": principal_of(request).key}
        await self.store.update(job.id, event="checkpoints_removed", detail=detail)
        return json_response({"job": job.id, "steps": [step], "bytes": held.size})

    async def delete_all(self, request: web.Request) -> web.Response:
        """The job's record, the changes of its state and its usage stay."""
        job = await self.jobs.found(request)
        if not job.state.final:
            raise Conflict(f"job {job.id} is {job.state}: what it leaves can be deleted when it is over")
        steps = {held.manifest.step for held in await self.artifacts.checkpoints(job)}
        await self._refuse_needed(job, steps)
        size = sum(entry["bytes"] for entry in await self.artifacts.listed(job))
        await self.index.remove(job.tenant, job.id, list(await self.index.of(job.id)))
        try:
            await self.artifacts.workshop.delete(job.id)
        except StoreUnavailable as error:
            raise Conflict(f"files of job {job.id} could not be removed ({error}); delete it again") from error
        await self.index.over(job.id)
        await delete_history(self.jobs.bus, self.store, job.id)
        detail = {"bytes": size, "by": principal_of(request).key}
        await self.store.update(job.id, event="artifacts_removed", detail=detail, deleted=time.time())
        return json_response({"job": job.id, "steps": sorted(steps), "bytes": size})

    async def _refuse_needed(self, job: JobRecord, steps: Collection[int]) -> None:
        """Raises Conflict."""
        if job.state.final and job.id in {*await self.index.opened(), *await self.store.ending_jobs()}:
            raise Conflict(f"what job {job.id} left is still being put away; try again in a few seconds")
        for one in (await self.index.published(job.tenant)).values():
            if one.job == job.id and one.step in steps:
                raise Conflict(f"{job.id}@{one.step} is published: `opentinker unpublish {one.name}` first")
        for other in await self.store.active_jobs():
            if used_by([other]).get(job.id, set()) & set(steps):
                raise Conflict(f"job {other.id}, which is {other.state}, begins with a checkpoint of job {job.id}")


def _shown(one: Publication) -> dict[str, Any]:
    return {**msgspec.to_builtins(one), "checkpoint": f"{one.job}@{one.step}"}


def _wrong(field: str, value: str, problem: str) -> SpecError:
    return SpecError([{"field": field, "value": value, "problem": problem}])
