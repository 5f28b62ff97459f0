"""Handlers of names for checkpoints within a tenant, and of taking away what jobs left.

A published checkpoint stays, regardless of its job's rules, until it is unpublished. Checkpoints in use (an unfinished
job starts from one, serves it or plays against it) are not deleted either.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from aiohttp import web
from pydantic import Field, field_validator

from opentinker.services.scheduler.artifacts import checkpoint_dir
from opentinker.services.scheduler.artifacts.archiver import Archiver
from opentinker.services.scheduler.artifacts.artifacts_api import step_of
from opentinker.services.scheduler.artifacts.history import delete_history
from opentinker.services.scheduler.artifacts.retention import steps_of, used_by
from opentinker.services.scheduler.artifacts.store import StoreUnavailable
from opentinker.services.scheduler.http.auth import may_see, principal_of, tenant_of
from opentinker.services.scheduler.http.errors import Body, json_response, parsed, read_json
from opentinker.services.scheduler.http.jobs import POLICY, JobsApi
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.jobs.check_start_checkpoint import lacks_policy
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec.start import PUBLISHED, SAVED
from opentinker.shared.state.artifacts import Publication, checkpoint_path
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import JobRecord, split_part
from opentinker.shared.types.errors import Conflict, NotFound, SpecError


class NewPublication(Body):
    """The body of POST /v1/published."""

    name: Annotated[str, Field(max_length=63, pattern="^[a-z0-9][a-z0-9._-]*$")]
    """For [start], inference jobs and downloads: none of another checkpoint of the tenant, and no job's id."""
    checkpoint: Annotated[str, Field(pattern=f"^{SAVED.pattern}$")]
    """`JOB@STEP` or `JOB@latest` (`JOB~POLICY@STEP` of a job with several policies)."""

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
        self.archiver = Archiver(jobs.ctx)

    # --- names ---------------------------------------------------------------------------------------------------

    @Route(
        "POST", "/v1/published", Action.CHECKPOINTS_WRITE, status=201, body=NewPublication, answer=api_types.Publication
    )
    async def publish(self, request: web.Request) -> web.Response:
        """Publish a checkpoint under a name; it is retained while published."""
        asked = parsed(NewPublication, await read_json(request))
        id, _, step = asked.checkpoint.partition("@")
        found = await self.store.jobs([id])
        if not found or not may_see(request, found[0].tenant):
            raise SpecError.of("checkpoint", asked.checkpoint, f"you have no job {id}; `opentinker jobs` lists yours")
        job = found[0]
        if why := lacks_policy(job):
            raise SpecError.of("checkpoint", asked.checkpoint, why)
        try:
            held = checkpoint_dir.choose(await self.artifacts.checkpoints(job), int(step) if step.isdigit() else None)
        except NotFound as error:
            raise SpecError.of("checkpoint", asked.checkpoint, f"job {id} has {error}") from None
        kept = await self.archiver.archive(job, held)
        made = await self.index.publish(job.tenant, asked.name, id, kept, principal_of(request).name)
        detail = {"name": made.name, "step": made.step, "by": made.key}
        await self.store.update(id, event="checkpoint_published", detail=detail)
        return json_response(_shown(made), 201, {"Location": f"/v1/published/{made.name}"})

    @Route("GET", "/v1/published", Action.CHECKPOINTS_READ, answer=api_types.Publications)
    async def list(self, request: web.Request) -> web.Response:
        """List published checkpoints by name."""
        found = await self.index.published(tenant_of(request))
        return json_response({"published": [_shown(one) for one in found.values()]})

    @Route("GET", "/v1/published/{name}", Action.CHECKPOINTS_READ, answer=api_types.Publication)
    async def get(self, request: web.Request) -> web.Response:
        """Get a published checkpoint."""
        return json_response(_shown(await self.index.publication(tenant_of(request), request.match_info["name"])))

    @Route("DELETE", "/v1/published/{name}", Action.CHECKPOINTS_WRITE, answer=api_types.Publication)
    async def unpublish(self, request: web.Request) -> web.Response:
        """Unpublish a checkpoint.

        Its job's rules apply again and may remove it."""
        gone = await self.index.unpublish(tenant_of(request), request.match_info["name"])
        detail = {"name": gone.name, "step": gone.step, "by": principal_of(request).name}
        await self.store.update(gone.job, event="checkpoint_unpublished", detail=detail)
        await self.index.open(gone.job)
        return json_response(_shown(gone))

    # --- what goes -----------------------------------------------------------------------------------------------

    @Route(
        "DELETE",
        "/v1/jobs/{id}/checkpoints/{step}",
        Action.CHECKPOINTS_WRITE,
        parameters=(POLICY,),
        answer=api_types.DeletedArtifacts,
    )
    async def delete_checkpoint(self, request: web.Request) -> web.Response:
        """Delete a checkpoint that is neither published nor in use."""
        job = self.jobs.part(request, await self.jobs.found(request))
        asked = step_of(request)
        try:
            held = checkpoint_dir.choose(await self.artifacts.checkpoints(job), asked)
        except NotFound:
            if asked is None or not job.state.final:
                raise
            await self._refuse_needed(job, {asked})
            left = await self.artifacts.workshop.left_of(f"{job.id}/{checkpoint_path(asked)}")
            if left is None:
                raise
            await self._delete_files(f"{job.id}/{checkpoint_path(asked)}", f"step {asked} of job {job.id}")
            return await self._deleted(request, job, asked, left)
        step = held.manifest.step
        if held.here and not job.state.final:
            raise Conflict(f"job {job.id} is {job.state}, and its trainer may resume from step {step}")
        await self._refuse_needed(job, {step})
        if job.state.final:
            prefix = held.prefix if held.here else f"{job.id}/{checkpoint_path(step)}"
            await self._delete_files(prefix, f"step {step} of job {job.id}")
        await self._remove_from_index(job, {step})
        return await self._deleted(request, job, step, held.size)

    async def _deleted(self, request: web.Request, job: JobRecord, step: int, size: int) -> web.Response:
        detail = {"steps": [step], "by": principal_of(request).name}
        await self.store.update(job.id, event="checkpoints_removed", detail=detail)
        return json_response({"job": job.id, "steps": [step], "bytes": size})

    @Route("DELETE", "/v1/jobs/{id}/artifacts", Action.CHECKPOINTS_WRITE, answer=api_types.DeletedArtifacts)
    async def delete_all(self, request: web.Request) -> web.Response:
        """Delete all artifacts of a finished job.

        The job's record, the changes of its state and its usage stay."""
        job = await self.jobs.found(request)
        steps, size = await self.remove_all(job, principal_of(request).name)
        return json_response({"job": job.id, "steps": sorted(steps), "bytes": size})

    async def refuse_kept(self, job: JobRecord) -> None:
        """Raises Conflict if the job has not ended, or one of its checkpoints is published or in use."""
        if not job.state.final:
            raise Conflict(f"job {job.id} is {job.state}; its artifacts can be deleted when it has ended")
        for part in await self.store.jobs(job.artifact_ids):
            await self._refuse_needed(part, {held.manifest.step for held in await self.artifacts.checkpoints(part)})

    async def remove_all(self, job: JobRecord, by: str) -> tuple[set[int], int]:
        """Delete all artifacts of a finished job. Return the steps of its checkpoints, and bytes. Raises Conflict."""
        await self.refuse_kept(job)
        parts = await self.store.jobs(job.artifact_ids)
        steps: set[int] = set()
        size = 0
        for part in parts:
            steps |= {held.manifest.step for held in await self.artifacts.checkpoints(part)}
            size += sum(entry["bytes"] for entry in await self.artifacts.listed(part))
        for part in parts:
            await self._delete_files(part.id, f"the artifacts of job {job.id}")
            await self._remove_from_index(part, None)
            await self.index.over(part.id)
            await delete_history(self.jobs.bus, self.store, part.id)
        detail = {"bytes": size, "by": by}
        await self.store.update(job.id, event="artifacts_removed", detail=detail, deleted=time.time())
        return steps, size

    async def _delete_files(self, prefix: str, what: str) -> None:
        """Delete what the job's directory has. Raises Conflict if some of it is left, which another call removes."""
        try:
            await self.artifacts.workshop.delete(prefix)
        except StoreUnavailable as error:
            raise Conflict(f"files of {prefix} could not be removed ({error}); delete {what} again") from error

    async def _remove_from_index(self, job: JobRecord, steps: Collection[int] | None) -> None:
        """Remove the checkpoints of these steps, or everything. Raises Conflict: a checkpoint has been published, or
        something archived, since it was looked at."""
        paths = list(await self.index.of(job.id)) if steps is None else [checkpoint_path(step) for step in steps]
        await self.index.remove(job.tenant, job.id, paths)
        for one in (await self.index.published(job.tenant)).values():
            if one.job == job.id and (steps is None or one.step in steps):
                others = "; all other artifacts of it are deleted" if steps is None else ""
                raise Conflict(
                    f"{job.id}@{one.step} was published as {one.name!r} just now: `opentinker unpublish {one.name}` "
                    f"first, then delete it again{others}"
                )
        left = (await self.index.of(job.id)).keys()
        if remaining := sorted(left if steps is None else left & set(paths)):
            raise Conflict(f"{remaining[0]} of job {job.id} was archived just now; delete it again")

    async def _refuse_needed(self, job: JobRecord, steps: Collection[int]) -> None:
        """Raises Conflict."""
        archiving = split_part(job.id)[0] in await self.store.ending_jobs() or job.id in await self.index.opened()
        if job.state.final and archiving:
            raise Conflict(f"artifacts of job {job.id} are still being archived; retry in a few seconds")
        for one in (await self.index.published(job.tenant)).values():
            if one.job == job.id and one.step in steps:
                raise Conflict(f"{job.id}@{one.step} is published: `opentinker unpublish {one.name}` first")
        for other in await self.store.active_jobs():
            if used_by([other]).get(job.id, set()) & set(steps):
                raise Conflict(f"job {other.id} ({other.state}) uses a checkpoint of job {job.id}")
        for sweep, uses in (await SweepStore(self.store.redis).active_uses()).items():
            if steps_of(uses).get(job.id, set()) & set(steps):
                raise Conflict(f"sweep {sweep} (running) uses a checkpoint of job {job.id}")


def _shown(one: Publication) -> dict[str, Any]:
    return {**msgspec.to_builtins(one), "checkpoint": f"{one.job}@{one.step}"}
