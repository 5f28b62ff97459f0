"""Handlers that submit: a document becomes a job or, if it describes a sweep, a sweep."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import principal_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import JobsApi, job_summary
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.services.scheduler.http.spec_body import read_spec
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.services.scheduler.sweeps.submission import submit_sweep
from opentinker.services.scheduler.sweeps.sweeps_api import SweepsApi, sweep_summary
from opentinker.shared import api_types
from opentinker.shared.runtime.tracing import incoming
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec.sweeps.children import SubmittedSpec, SweepSpec
from opentinker.shared.state.idempotency import other_body
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.sweeps import is_sweep

KEY = Parameter(
    "Idempotency-Key",
    "Up to 200 characters; requests with the same key and spec create one job or sweep, for 24 h.",
    "header",
)


class SubmissionApi:
    def __init__(self, jobs: JobsApi, sweeps: SweepsApi) -> None:
        self.ctx, self.store, self.sweeps = jobs.ctx, jobs.store, sweeps.store
        self._job_rows, self._sweep_rows = jobs.all_rows, sweeps.all_rows

    @Route(
        "POST",
        "/v1/jobs",
        Action.JOBS_WRITE,
        status=201,
        parameters=(KEY,),
        body=SubmittedSpec,
        answer=api_types.JobSummary,
        or_answer=api_types.SweepSummary,
    )
    async def submit(self, request: web.Request) -> web.Response:
        """Submit a job, or a sweep.

        A spec with `kind = "sweep"` or a table [sweep] is a sweep: the answer is that of POST /v1/sweeps."""
        key = idempotency_key(request)
        body = await read_spec(request)
        return await (self._sweep if is_sweep(body) else self._job)(request, body, key)

    @Route(
        "POST",
        "/v1/sweeps",
        Action.JOBS_WRITE,
        status=201,
        parameters=(KEY,),
        body=SweepSpec,
        answer=api_types.SweepSummary,
    )
    async def sweep(self, request: web.Request) -> web.Response:
        """Submit a sweep: a job spec with a table [sweep].

        Its jobs are ordinary jobs, with the sweep's id among their tags."""
        key = idempotency_key(request)
        return await self._sweep(request, await read_spec(request), key)

    async def _job(self, request: web.Request, body: Any, key: str) -> web.Response:
        asked, trace = principal_of(request), incoming(request.headers)
        if key and (made := await self.sweeps.made_by(asked.tenant, key)) is not None:
            raise other_body(f"sweep {made}")  # also checked where it is stored
        with self.ctx.tracer.span("submit", trace):
            id, repeated = await submit(self.ctx, body, asked.tenant, key, key=asked.name, trace=trace)
        self._job_rows.forget(asked.tenant)
        record = await self.store.job(id)
        summary = job_summary(record)
        if record.state == JobState.QUEUED and not record.waiting_for:  # placement says so with its next look
            cluster = Cluster(await self.store.workers(), [])
            summary["waiting_for"] = cluster.lacks(record)
        return _created(f"/v1/jobs/{id}", summary, repeated=repeated)

    async def _sweep(self, request: web.Request, body: Any, key: str) -> web.Response:
        asked, trace = principal_of(request), incoming(request.headers)
        if key and (made := await self.store.job_of_key(asked.tenant, key)) is not None:
            raise other_body(f"job {made}")
        id, repeated = await submit_sweep(self.ctx, body, asked.tenant, key, key=asked.name, trace=trace)
        self._sweep_rows.forget(asked.tenant)
        return _created(f"/v1/sweeps/{id}", sweep_summary(await self.sweeps.sweep(id)), repeated=repeated)


def _created(location: str, summary: dict[str, Any], *, repeated: bool) -> web.Response:
    headers = {"Location": location} | ({"Idempotency-Replayed": "true"} if repeated else {})
    return json_response(summary, 201, headers)


def idempotency_key(request: web.Request) -> str:
    """Return the request's Idempotency-Key; empty without one. Raises SpecError."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,200}", key):
        raise SpecError.of("Idempotency-Key", key[:200], "must be 1 to 200 printable characters")
    return key or ""
