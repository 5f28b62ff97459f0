"""Handlers of /v1/jobs, and of what is done with a job. Only `found` loads a job, for the routes of other files below
/v1/jobs/{id} too, if the requester may see it."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import Any

import msgspec
import nats.errors
import orjson
import structlog
from aiohttp import web

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.artifacts.retention import Rule
from opentinker.services.scheduler.http.auth import may_see, tenant_of
from opentinker.services.scheduler.http.errors import json_response, parsed, read_json
from opentinker.services.scheduler.http.list_parameters import GROUP_BY, parameters_of
from opentinker.services.scheduler.http.route_decorator import Integer, Parameter, Route
from opentinker.services.scheduler.jobs.list_pages import id_of, page_of, unknown_cursor
from opentinker.services.scheduler.jobs.list_query import JOBS, ListQuery, groups_of
from opentinker.services.scheduler.jobs.outages import outage_text
from opentinker.shared import api_types
from opentinker.shared.evaluation.categories import categories_of
from opentinker.shared.evaluation.pool_results import member_results
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import METRIC, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.spec.labels import LabelChanges
from opentinker.shared.state.admission import admission_of
from opentinker.shared.state.circuits import Circuits, circuit_key
from opentinker.shared.state.list_rows import ListRow, ListRows
from opentinker.shared.types.core import ENDLESS, JobRecord, JobState
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.telemetry import MetricPoint

log = structlog.get_logger()

JOB_ID = re.compile(r"j-[a-z0-9]{10}")
FRESH_S = 0.5
"""So old may the last metrics of a job and rows of lists be."""
PAUSABLE = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
HIDDEN = ("spec", "version", "restart_step", "resumed_step", "rollout_losses", "lost_at", "retry_at", "result")
"""Fields of a record that no summary has."""

BEFORE_JOB = Parameter("before", "Only jobs listed after this one: the cursor of the previous response.")
LIMIT_JOBS = Integer("limit", "Jobs per response.", default=100, low=1, high=1000)
SORT_JOBS, FILTERS = parameters_of(JOBS)
POLICY = Parameter("policy", "One of the job's policies; needed where it has several.")


class JobsApi:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.store, self.bus = ctx, ctx.store, ctx.bus
        self.artifacts = ArtifactCatalog(ctx)
        self.rows = ListRows(ctx.store.redis)
        self._points = SingleFlight[dict[str, Any]](FRESH_S)
        """Every page that shows a job asks for them every two seconds."""
        self.all_rows = SingleFlight[list[ListRow]](FRESH_S)
        """Pages with a filter or an order ask for them."""

    async def found(self, request: web.Request, id: str | None = None) -> JobRecord:
        """Return the job that the path names, or `id`. Raises NotFound; a job of another tenant looks like one that
        does not exist."""
        id = request.match_info["id"] if id is None else id
        for job in await self.store.jobs([id] if JOB_ID.fullmatch(id) else []):
            if may_see(request, job.tenant):
                return job
        raise NotFound(f"you have no job {id[:100]!r}")

    async def undeleted(self, request: web.Request) -> JobRecord:
        """Return a job whose history and artifacts exist. Raises NotFound, HTTPGone."""
        job = await self.found(request)
        if job.deleted:
            raise web.HTTPGone(text=f"the artifacts of job {job.id} were deleted; its record and usage remain")
        return job

    @staticmethod
    def part(request: web.Request, job: JobRecord) -> JobRecord:
        """Return the job, or of one with several policies the part that the request names. Raises SpecError."""
        policy = request.query.get("policy", "")
        if policy in (job.policies or ("",)):
            return job.part(policy)
        names = ", ".join(job.policies)
        named = f"must be one of {names}" if job.policies else "job has one policy, without a name"
        if not policy:
            named = f"is needed: the job has several policies, {names}"
        raise SpecError.of("policy", policy[:100] or None, named)

    async def _rows(self, tenant: str) -> list[ListRow]:
        """Return the tenant's jobs, newest first."""
        return await self.all_rows.get(tenant, partial(self.rows.of, tenant))

    @Route(
        "GET",
        "/v1/jobs",
        Action.JOBS_READ,
        parameters=(BEFORE_JOB, LIMIT_JOBS, SORT_JOBS, *FILTERS),
        answer=api_types.Jobs,
    )
    async def list(self, request: web.Request) -> web.Response:
        """List your jobs.

        `cursor` is the `before` of the next call."""
        limit, before = LIMIT_JOBS.read(request), request.query.get("before", "")
        tenant, wanted = tenant_of(request), ListQuery.of(request.query)
        if wanted.plain:
            try:
                found = await self.store.jobs_of(tenant, limit + 1, id_of(before))
            except NotFound:
                raise unknown_cursor(before, JOBS) from None
            shown, more = found[:limit], len(found) > limit
            cursor = shown[-1].id if shown else before
        else:
            page = await asyncio.to_thread(page_of, await self._rows(tenant), wanted, before, limit, JOBS)
            shown, cursor, more = await self.store.jobs(page.ids), page.cursor, page.more
        return json_response({"jobs": [job_summary(job) for job in shown], "cursor": cursor, "more": more})

    @Route("GET", "/v1/jobs/groups", Action.JOBS_READ, parameters=(GROUP_BY, *FILTERS), answer=api_types.JobGroups)
    async def groups(self, request: web.Request) -> web.Response:
        """Count your jobs by project, tag, state or another property."""
        wanted = ListQuery.of(request.query)
        rows = await asyncio.to_thread(wanted.chosen, await self._rows(tenant_of(request)))
        return json_response({"groups": groups_of(rows, GROUP_BY.read(request), JOBS)})

    @Route("GET", "/v1/jobs/{id}", Action.JOBS_READ, answer=api_types.Job)
    async def get(self, request: web.Request) -> web.Response:
        """Get a job: state, ledger, workers, latest metrics."""
        job = await self.found(request)
        ledgers = {name: await self._ledger(job, name) for name in job.policies or ("",)}
        workers = [
            {"id": w.id, "pool": w.pool, "status": w.status, "host": w.host, "pid": w.pid, "detail": w.detail}
            for w in await self.store.workers()
            if w.job == job.id
        ]
        return json_response(
            {
                **job_summary(job),
                **await self.outage(job),
                "spec": job.spec,
                "ledger": next(iter(ledgers.values())),
                **(
                    {"policies": {name: {"ledger": ledger} for name, ledger in ledgers.items()}} if job.policies else {}
                ),
                **({"pools": await self._opponents(job)} if job.spec.get("pools") else {}),
                "workers": workers,
                "metrics": await self.newest_points(job),
                **({"result": _result(job.result)} if job.result else {}),
                "artifacts": await self._kept(job),
            }
        )

    async def outage(self, job: JobRecord) -> dict[str, str]:
        """Say that the job waits for its environment, if that is down."""
        if job.waiting_for or not job.state.held or job.kind != "rl":
            return {}
        circuit = await Circuits(self.store.redis).find(circuit_key(job.tenant, job.spec["environment"]))
        if not circuit.is_open:
            return {}
        again_s = max(0.0, circuit.retry_at - time.time())
        text = f"its environment: {outage_text(circuit, job.spec)}; tried again in {again_s:.0f} s; {circuit.error}"
        return {"waiting_for": text}

    async def _ledger(self, job: JobRecord, policy: str) -> dict[str, Any]:
        ledger = await admission_of(self.store.redis, job, policy).ledger()
        return {**msgspec.to_builtins(ledger), "version": str(ledger.version), "balanced": ledger.balanced}

    async def _opponents(self, job: JobRecord) -> dict[str, Any]:
        """Return the members of the job's opponent pools, with their results."""
        records = await admission_of(self.store.redis, job).pools()
        policies = {name: pool.get("policy") or "" for name, pool in job.spec["pools"].items()}
        members = {name: await asyncio.to_thread(member_results, records[name]) for name in policies if name in records}
        return {name: {"policy": policies[name], "members": members[name]} for name in members}

    async def _kept(self, job: JobRecord) -> dict[str, Any]:
        index = self.artifacts.index
        parts = job.artifact_ids
        names = [name for name, one in (await index.published(job.tenant)).items() if one.job in parts]
        return {
            "rule": str(Rule.of(job.spec)),
            "bytes": sum([kept.bytes for part in parts for kept in (await index.of(part)).values()]),
            "expires": await index.expires(job.id),
            "published": names,
        }

    async def newest_points(self, job: JobRecord) -> dict[str, Any]:
        """Return the newest points by source, as `_last_metrics` does; cached for a moment for all callers."""
        read = partial(self._last_metrics, job.id)
        return await (read() if job.state.final else self._points.get(job.id, read))

    async def _last_metrics(self, job: str) -> dict[str, Any]:
        """Return the newest point of each source. Empty while NATS is away: the rest of a job is known without it."""
        if not self.bus.nc.is_connected:
            return {}
        stream = required_stream(METRIC)
        try:
            info = await self.bus.js.stream_info(stream, subjects_filter=METRIC.at(job=job, source="*"))
            messages = await asyncio.gather(
                *(self.bus.js.get_last_msg(stream, subject) for subject in info.state.subjects or {})
            )
        except (TimeoutError, nats.errors.Error) as error:
            log.warning("metrics_unavailable", job=job, error=str(error) or type(error).__name__)
            return {}
        points = [msgspec.json.decode(message.data or b"", type=MetricPoint) for message in messages]
        return {p.source: {"step": p.step, "time": p.time, "values": p.values} for p in points}

    @Route("PATCH", "/v1/jobs/{id}", Action.JOBS_WRITE, body=LabelChanges, answer=api_types.JobSummary)
    async def label(self, request: web.Request) -> web.Response:
        """Change a job's name, project, tags or notes.

        It may be over."""
        job = await self.found(request)
        asked = parsed(LabelChanges, await read_json(request))
        await self.rows.label(job.id, asked.values(), asked.add_tags or (), asked.remove_tags or ())
        self.all_rows.forget(job.tenant)
        return json_response(job_summary(await self.store.job(job.id)))

    @Route("POST", "/v1/jobs/{id}/cancel", Action.JOBS_WRITE, answer=api_types.JobSummary)
    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a job."""
        job = await self.found(request)
        refusal = "has ended already ({state}); there is nothing to cancel"
        return await self._move(job.id, JobState.CANCELLED, refusal, reason="cancelled by request")

    @Route("POST", "/v1/jobs/{id}/pause", Action.JOBS_WRITE, answer=api_types.JobSummary)
    async def pause(self, request: web.Request) -> web.Response:
        """Pause a job: save its training state and release its workers.

        Pausing a paused job is allowed."""
        job = await self.found(request)
        changes = {"allowed": PAUSABLE, "since": time.time(), "reason": "paused by request"}
        refusal = "is {state}: it cannot be paused"
        return await self._move(job.id, JobState.PAUSED, refusal, **changes, waiting_for="", asleep=False)

    @Route("POST", "/v1/jobs/{id}/resume", Action.JOBS_WRITE, answer=api_types.JobSummary)
    async def resume(self, request: web.Request) -> web.Response:
        """Resume a paused job from its latest checkpoint.

        Back to the queue. Resuming what is not paused, and not over, is fine."""
        job = await self.found(request)
        if job.state == JobState.PAUSED:
            changes = {"allowed": [JobState.PAUSED], "since": time.time(), "event": "unpaused"}
            refusal = "is {state}: it cannot be resumed"
            return await self._move(job.id, JobState.QUEUED, refusal, **changes, reason="", asleep=False)
        if job.state.final:
            raise Conflict(f"job {job.id} has ended already ({job.state}); there is nothing to resume")
        return json_response(job_summary(job))

    async def _move(self, id: str, to: JobState, refusal: str, **changes: Any) -> web.Response:
        """Change the job's state and return its summary. Raises Conflict with the refusal, unless it is in that state:
        repeating a call is allowed."""
        try:
            await self.store.transition(id, to, **changes)
        except Conflict:
            state = (await self.store.job(id)).state
            if state != to:
                raise Conflict(f"job {id} {refusal.format(state=state)}") from None
        await self.bus.emit(WAKE, {"job": id}, who="scheduler")
        moved = await self.store.job(id)
        self.all_rows.forget(moved.tenant)
        return json_response(job_summary(moved))

    @Route("POST", "/v1/jobs/{id}/complete", Action.JOBS_WRITE, answer=api_types.JobSummary)
    async def complete(self, request: web.Request) -> web.Response:
        """Complete an inference job, or one that serves the Tinker API."""
        job = await self.found(request)
        if job.kind not in ENDLESS:
            raise Conflict(f"job {job.id} is of kind {job.kind}, and ends by itself; it can be cancelled")
        refusal = "has ended already ({state}); there is nothing to complete"
        return await self._move(job.id, JobState.SUCCEEDED, refusal, reason="completed by request")


def _result(stored: str) -> dict[str, Any]:
    result = orjson.loads(stored)
    return {**result, "categories": categories_of(result["values"])}


def job_summary(job: JobRecord) -> dict[str, Any]:
    """Return a job as lists have it (api_types.JobSummary)."""
    shown = msgspec.to_builtins(job)
    for hidden in HIDDEN:
        del shown[hidden]
    shown["finished"], shown["deleted"] = job.finished or None, job.deleted or None
    shown["priority"] = job.spec["resources"].get("priority", 0)
    shown["progress"] = orjson.loads(job.progress) if job.progress else {}
    shown["curve"] = orjson.loads(job.curve) if job.curve else []
    shown["waiting_for"] = "" if job.state.final else job.waiting_for
    for part, field in (("environment", "name"), ("data", "path")):
        if part in job.spec:
            shown[part] = job.spec[part][field]
    shown["model"] = job.spec["model"]["base"]
    if job.kind == "inference":
        shown["endpoint"] = f"/v1/jobs/{job.id}/v1"
    return dict(shown)
