"""Handler of GET /v1/jobs/{id}/models: the models of a Tinker server's clients, and what their commands wait for.

Consumes the records of clients and trainer in Redis, and the trainer's heartbeat; asks no worker.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import JOB_ID, JobsApi
from opentinker.services.scheduler.http.route_decorator import Integer, Route
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec.tinker import KIND, TinkerSpec
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.model_catalog import ListedModel, ModelCatalog, ModelDetails
from opentinker.shared.types.core import JobRecord, JobState, Pool
from opentinker.shared.types.errors import Conflict, NotFound
from opentinker.shared.types.tinker import TinkerCheckpoint

OFFSET = Integer("offset", "Models that are skipped, the last used ones.", high=10**9)
LIMIT = Integer("limit", "Models per response.", default=100, low=1, high=1000)


class ModelsApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.store = jobs, jobs.store
        self._models = ModelCatalog(jobs.store.redis)

    @Route("GET", "/v1/jobs/{id}/models", Action.JOBS_READ, parameters=(OFFSET, LIMIT), answer=api_types.ServedModels)
    async def models(self, request: web.Request) -> web.Response:
        """List your models on a Tinker server: progress, checkpoints, and what their commands wait for.

        Tenants to which the server is open may ask too, and get their own models. Of other tenants' models the
        server's tenant gets numbers alone."""
        job, tenant = await self._server(request), tenant_of(request)
        offset, limit = OFFSET.read(request), LIMIT.read(request)
        listed = await self._models.of(job.id)
        alive = await self._models.alive({one.session for one in listed})
        own = [one for one in listed if one.model.tenant == tenant]
        page, queue = own[offset : offset + limit], await queue_of(self.store, job)
        details = await self._models.details(page)
        shown = [
            {**_shown(one, known), "alive": one.session in alive, "waiting_for": _waits_for(job, queue, one)}
            for one, known in zip(page, details, strict=True)
        ]
        others = [one for one in listed if one.model.tenant != tenant] if job.tenant == tenant else None
        return json_response(
            {
                "base": job.spec["model"]["base"],
                "queue": queue,
                "models": shown,
                "total": len(own),
                "others": None if others is None else _counted(others, alive),
            }
        )

    async def _server(self, request: web.Request) -> JobRecord:
        """Return the job that the path names. Raises NotFound, for one that is not open to the tenant too, Conflict if
        it is of another kind."""
        try:
            job = await self.jobs.found(request)
        except NotFound:
            if (found := await self._open_to(request)) is None:
                raise
            return found
        if job.kind != KIND:
            problem = f"is of kind {job.kind}, and has no models of clients: jobs of kind {KIND} have"
            raise Conflict(f"job {job.id} {problem}; look at its checkpoints instead")
        return job

    async def _open_to(self, request: web.Request) -> JobRecord | None:
        """Return another tenant's Tinker server whose clients the tenant's may be; None: the path names no such job."""
        id, tenant = request.match_info["id"], tenant_of(request)
        for job in await self.store.jobs([id] if JOB_ID.fullmatch(id) else []):
            if job.kind == KIND and TinkerSpec.model_validate(job.spec["tinker"]).allows(job.tenant, tenant):
                return job
        return None


async def queue_of(store: Store, job: JobRecord) -> str:
    """Return how the job's trainer describes its queue; empty without a trainer, or before its first report."""
    if not job.state.held:
        return ""
    workers = [one for one in await store.workers() if one.job == job.id and one.pool is Pool.TRAINER]
    return next((str(one.detail["queue"]) for one in workers if "queue" in one.detail), "")


def _waits_for(job: JobRecord, queue: str, one: ListedModel) -> str:
    if not one.waiting:
        return ""
    if job.state.final:
        return f"nothing: the server has ended ({job.state})"
    if job.state is not JobState.RUNNING:
        return f"the server, which is {job.state}" + (f" and waits for {job.waiting_for}" if job.waiting_for else "")
    if not one.has_next:
        return f"request {one.next} of the client, which has not come"
    return "the trainer" + (f": {queue}" if queue else "")


def _counted(models: list[ListedModel], alive: set[str]) -> dict[str, int]:
    return {
        "models": len(models),
        "alive": sum(one.session in alive for one in models),
        "waiting": sum(one.waiting for one in models),
    }


def _shown(one: ListedModel, details: ModelDetails) -> dict[str, Any]:
    model, progress, now = one.model, details.progress, time.time()
    return {
        "id": model.id,
        "session": one.session,
        "base": model.base,
        "rank": model.lora.rank,
        "start": model.start,
        "created": model.created,
        "used": one.used,
        "metadata": model.metadata,
        "passes": progress.passes,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "loss": progress.loss,
        "curve": progress.curve,
        "queue_s": progress.queue_s,
        "waiting": one.waiting,
        "checkpoints": [_saved(saved) for saved in details.checkpoints if not saved.expires or saved.expires > now],
    }


def _saved(checkpoint: TinkerCheckpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "kind": checkpoint.kind,
        "name": checkpoint.name,
        "step": checkpoint.step,
        "created": checkpoint.created,
        "bytes": checkpoint.size,
        "expires": checkpoint.expires or None,
        "public": checkpoint.public,
    }
