"""Handlers of /v1/jobs and everything below it. Only `found` loads a job for them, if the requester may see it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import orjson
import structlog
from aiohttp import web

from opentinker.services.scheduler.artifacts.catalog import Artifacts
from opentinker.services.scheduler.artifacts.retention import Rule
from opentinker.services.scheduler.http import transcripts
from opentinker.services.scheduler.http.auth import may_see, principal_of, tenant_of
from opentinker.services.scheduler.http.errors import integer, json_response
from opentinker.services.scheduler.http.single_flight import SingleFlight
from opentinker.services.scheduler.http.spec_body import read_spec
from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.jobs.submit import submit
from opentinker.services.scheduler.placement.cluster_view import Cluster
from opentinker.shared.messaging.subjects import METRIC, METRICS, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.tracing import incoming
from opentinker.shared.state.staleness import Admission
from opentinker.shared.types.core import Discard, JobRecord, JobState
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.telemetry import MetricPoint

log = structlog.get_logger()

JOB_ID = re.compile(r"j-[a-z0-9]{10}")
EVENT_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,15})?")
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,200}")
LOOK_S = 1.0
FRESH_S = 0.5
"""So old may the last metrics of a job be."""
COMMENT_S = 10.0
"""An idle event stream says something so often, so that proxies keep it and a dead client is noticed."""
POINTS = 1000
MOST_POINTS = 10_000
JOBS = 100
FAILURES = 100
MOST_FAILURES = 1000
PAUSABLE = (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
MOST_JOBS = 1000
MOST_LOOKED = 500
SEARCH = 200
"""Characters."""


class JobsApi:
    def __init__(self, ctx: Context) -> None:
        self.ctx, self.store, self.bus = ctx, ctx.store, ctx.bus
        self.artifacts = Artifacts(ctx)
        self._history = MetricHistory(ctx.bus, self.artifacts)
        self._points = SingleFlight(self._last_metrics, FRESH_S)
        """Every page that shows a job asks for them every two seconds."""

    async def found(self, request: web.Request) -> JobRecord:
        """Raises NotFound; a job of another tenant looks like one that does not exist."""
        id = request.match_info["id"]
        if JOB_ID.fullmatch(id):
            found = await self.store.jobs([id])
            if found and may_see(request, found[0].tenant):
                return found[0]
        raise NotFound(f"you have no job {id[:100]!r}")

    async def undeleted(self, request: web.Request) -> JobRecord:
        """Return a job whose history and artifacts exist. Raises NotFound, HTTPGone."""
        job = await self.found(request)
        if job.deleted:
            raise web.HTTPGone(text=f"what job {job.id} left was deleted; its record and its usage are there")
        return job

    async def create(self, request: web.Request) -> web.Response:
        key = request.headers.get("Idempotency-Key")
        if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
            raise SpecError(
                [{"field": "Idempotency-Key", "value": key[:200], "problem": "must be 1 to 200 printable characters"}]
            )
        asked, trace = principal_of(request), incoming(request.headers)
        with self.ctx.tracer.span("submit", trace):
            body = await read_spec(request)
            id, repeated = await submit(self.ctx, body, asked.tenant, key or "", key=asked.key, trace=trace)
        headers = {"Location": f"/v1/jobs/{id}"} | ({"Idempotency-Replayed": "true"} if repeated else {})
        record = await self.store.job(id)
        summary = _summary(record)
        if record.state == JobState.QUEUED and not record.waiting_for:  # placement says so with its next look
            cluster = Cluster(await self.store.workers(), [])
            summary["waiting_for"] = cluster.lacks(record)
        return json_response(summary, 201, headers)

    async def list(self, request: web.Request) -> web.Response:
        """`cursor` is the `before` of the next call. With a filter one call looks at MOST_LOOKED jobs at most: `more`
        says whether there are any behind those, however few were found."""
        limit = integer(request, "limit", JOBS, 1, MOST_JOBS)
        before = request.query.get("before", "")
        wanted = _filter(request)
        looks = MOST_LOOKED if wanted else limit
        try:
            page = await self.store.jobs_of(tenant_of(request), looks, before)
        except NotFound:
            problem = "is none of your jobs; take the cursor of the last answer"
            raise SpecError([{"field": "before", "value": before[:100], "problem": problem}]) from None
        found = [job for job in page if wanted is None or wanted(job)][:limit]
        full = len(found) == limit
        cursor = found[-1].id if full else page[-1].id if page else before
        return json_response(
            {"jobs": [_summary(job) for job in found], "cursor": cursor, "more": full or len(page) == looks}
        )

    async def get(self, request: web.Request) -> web.Response:
        job = await self.found(request)
        ledger = await Admission(self.store.redis, job.id).ledger()
        workers = [
            {"id": w.id, "pool": w.pool, "status": w.status, "host": w.host, "pid": w.pid, "detail": w.detail}
            for w in await self.store.workers()
            if w.job == job.id
        ]
        return json_response(
            {
                **_summary(job),
                "spec": job.spec,
                "ledger": {**msgspec.to_builtins(ledger), "version": str(ledger.version), "balanced": ledger.balanced},
                "workers": workers,
                "metrics": await (self._last_metrics(job.id) if job.state.final else self._points.get(job.id)),
                **({"result": orjson.loads(job.result)} if job.result else {}),
                "artifacts": await self._kept(job),
            }
        )

    async def _kept(self, job: JobRecord) -> dict[str, Any]:
        index = self.artifacts.index
        names = [name for name, one in (await index.published(job.tenant)).items() if one.job == job.id]
        return {
            "rule": str(Rule.of(job.spec)),
            "bytes": sum(kept.bytes for kept in (await index.of(job.id)).values()),
            "expires": await index.expires(job.id),
            "published": names,
        }

    async def _last_metrics(self, job: str) -> dict[str, Any]:
        """By source: the newest point. Nothing while NATS is away: all else of a job is known without it."""
        assert METRICS.name is not None
        if not self.bus.nc.is_connected:
            return {}
        try:
            return await self._newest_points(METRICS.name, job)
        except (TimeoutError, nats.errors.Error) as error:
            log.warning("metrics_unavailable", job=job, error=str(error) or type(error).__name__)
            return {}

    async def _newest_points(self, stream: str, job: str) -> dict[str, Any]:
        info = await self.bus.js.stream_info(stream, subjects_filter=METRIC.at(job=job, source="*"))
        messages = await asyncio.gather(
            *(self.bus.js.get_last_msg(stream, subject) for subject in info.state.subjects or {})
        )
        points = [msgspec.json.decode(message.data or b"", type=MetricPoint) for message in messages]
        return {p.source: {"step": p.step, "time": p.time, "values": p.values} for p in points}

    async def cancel(self, request: web.Request) -> web.Response:
        job = await self.found(request)
        return await self._end(job.id, JobState.CANCELLED, reason="cancelled by request", verb="cancel")

    async def pause(self, request: web.Request) -> web.Response:
        """Save the job's training state and release its workers. Pausing a paused job is allowed."""
        job = await self.found(request)
        await self._move(
            job, JobState.PAUSED, PAUSABLE, "paused", reason="paused by request", waiting_for="", asleep=False
        )
        return json_response(_summary(await self.store.job(job.id)))

    async def resume(self, request: web.Request) -> web.Response:
        """Back to the queue. Resuming what is not paused, and not over, is fine."""
        job = await self.found(request)
        if job.state == JobState.PAUSED:
            await self._move(
                job, JobState.QUEUED, [JobState.PAUSED], "resumed", event="unpaused", reason="", asleep=False
            )
        elif job.state.final:
            raise Conflict(f"job {job.id} has {job.state} already; there is nothing to resume")
        return json_response(_summary(await self.store.job(job.id)))

    async def _move(self, job: JobRecord, to: JobState, allowed: Sequence[JobState], done: str, **changes: Any) -> None:
        """Change the job's state. Raises Conflict, unless another request has made the same change in between."""
        try:
            await self.store.transition(job.id, to, allowed=allowed, since=time.time(), **changes)
        except Conflict:
            state = (await self.store.job(job.id)).state
            if state != to:
                raise Conflict(f"job {job.id} is {state}: it cannot be {done}") from None
        await self.bus.emit(WAKE, {"job": job.id}, who="scheduler")

    async def failures(self, request: web.Request) -> web.Response:
        """Return permanent failures: the newest groups with their errors, and the number of all."""
        job = await self.undeleted(request)
        limit = integer(request, "limit", FAILURES, 1, MOST_FAILURES)
        ledger = await Admission(self.store.redis, job.id).ledger()
        found = await self.store.failures(job.id, limit)
        invalid = {Discard.INVALID.value: ledger.discarded.get(Discard.INVALID, 0)}
        counts = ledger.failed | {reason: count for reason, count in invalid.items() if count}
        return json_response({"failures": found, "counts": counts})

    async def complete(self, request: web.Request) -> web.Response:
        """Complete a job that does not end by itself."""
        job = await self.found(request)
        if job.kind != "inference":
            raise Conflict(f"job {job.id} is of kind {job.kind}, and ends by itself; it can be cancelled")
        return await self._end(job.id, JobState.SUCCEEDED, reason="completed by request", verb="complete")

    async def _end(self, job_id: str, state: JobState, *, reason: str, verb: str) -> web.Response:
        """End a job. Repeating the call on a job that has already ended so is allowed."""
        try:
            await self.store.transition(job_id, state, reason=reason)
        except Conflict:
            job = await self.store.job(job_id)
            if job.state != state:
                raise Conflict(f"job {job_id} has {job.state} already; there is nothing to {verb}") from None
        await self.bus.emit(WAKE, {"job": job_id}, who="scheduler")
        return json_response(_summary(await self.store.job(job_id)))

    # --- events -------------------------------------------------------------------------------------------------

    async def events(self, request: web.Request) -> web.StreamResponse:
        job = await self.found(request)
        after = request.query.get("after") or request.headers.get("Last-Event-ID") or "0"
        if not EVENT_ID.fullmatch(after):
            raise SpecError(
                [{"field": "after", "value": after[:100], "problem": "not an event id, e.g. 1763712000000-0"}]
            )
        match request.query.get("format", "sse"):
            case "json":
                return json_response({"events": await self._all_events(job.id, after)})
            case "sse":
                return await self._stream_events(request, job.id, after)
            case other:
                raise SpecError([{"field": "format", "value": other[:100], "problem": "must be `sse` or `json`"}])

    async def _all_events(self, job: str, after: str) -> list[dict[str, Any]]:  # type: ignore[valid-type]
        found: Any = []
        while page := await self.store.events(job, after):
            found += page
            after = page[-1]["id"]
        return found  # type: ignore[no-any-return]

    async def _stream_events(self, request: web.Request, job: str, after: str) -> web.StreamResponse:
        """Until the event of the final state is out, the client leaves, or the service stops."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        said_at = time.monotonic()
        while not self.ctx.stopping.is_set() and request.transport is not None and not request.transport.is_closing():
            over = (await self.store.job(job)).state.final
            page = await self.store.events(job, after, block_ms=None if over else int(LOOK_S * 1000))
            for event in page:
                after = event["id"]
                text = f"id: {after}\nevent: {event['event']}\ndata: {orjson.dumps(event).decode()}\n\n"
                await response.write(text.encode())
                said_at = time.monotonic()
                if event.get("state") in FINAL:
                    return response
            if over and not page:
                return response
            if time.monotonic() - said_at > COMMENT_S:
                await response.write(b": nothing new\n\n")
                said_at = time.monotonic()
        return response

    # --- metrics ------------------------------------------------------------------------------------------------

    async def metrics(self, request: web.Request) -> web.Response:
        """Read from the stream and metrics.jsonl, so it survives every service; `cursor` is the `after` of the next
        call."""
        job = await self.undeleted(request)
        after = integer(request, "after", 0, 0, 2**62)
        limit = integer(request, "limit", POINTS, 1, MOST_POINTS)
        source, names = request.query.get("source", "*"), request.query.get("names", "")
        wanted = set(names.split(",")) if names else None
        found, more = await self._history.page(job, after, limit, "*" if source == ">" else source)
        points = [
            {
                "cursor": at,
                "source": p.source,
                "incarnation": p.incarnation,
                "seq": p.seq,
                "time": p.time,
                "step": p.step,
                "values": {k: v for k, v in p.values.items() if wanted is None or k in wanted},
            }
            for at, p in found
        ]
        if wanted is not None:
            points = [point for point in points if point["values"]]
        cursor = found[-1][0] if found else after
        return json_response({"metrics": points, "cursor": cursor, "more": more})

    async def transcripts(self, request: web.Request) -> web.Response:
        """Validation episodes, word by word: of one step, by default the newest that has any."""
        job = await self.undeleted(request)
        step = integer(request, "step", -1, 0, 10**12)
        home = self.home(job)
        return json_response(await asyncio.to_thread(transcripts.read, home, None if step < 0 else step))

    def home(self, job: JobRecord) -> Path:
        return self.artifacts.home(job)


STATES = tuple(state.value for state in JobState)
FINAL = {state.value for state in JobState if state.final}


def _filter(request: web.Request) -> Callable[[JobRecord], bool] | None:
    """Return a predicate for the query's filters. Raises SpecError."""
    state, words = request.query.get("state", ""), request.query.get("search", "")
    if state and state not in STATES:
        raise SpecError([{"field": "state", "value": state[:100], "problem": f"must be one of {', '.join(STATES)}"}])
    if len(words) > SEARCH:
        raise SpecError([{"field": "search", "value": words[:100], "problem": f"must be {SEARCH} characters at most"}])
    sought = words.lower().split()
    if not state and not sought:
        return None
    return lambda job: (not state or job.state == state) and all(word in _about(job) for word in sought)


def _about(job: JobRecord) -> str:
    """Where a search looks."""
    environment = job.spec.get("environment", {}).get("name", "")
    return " ".join((job.id, job.name, job.kind, job.spec["model"]["base"], environment, job.key)).lower()


def _summary(job: JobRecord) -> dict[str, Any]:
    shown = msgspec.to_builtins(job)
    for hidden in (
        "spec",
        "version",
        "restart_step",
        "resumed_step",
        "rollout_losses",
        "lost_at",
        "retry_at",
        "result",
    ):
        del shown[hidden]
    shown["finished"], shown["deleted"] = job.finished or None, job.deleted or None
    shown["priority"] = job.spec["resources"].get("priority", 0)
    shown["progress"] = orjson.loads(job.progress) if job.progress else {}
    shown["waiting_for"] = "" if job.state.final else job.waiting_for
    for part, field in (("environment", "name"), ("data", "path")):
        if part in job.spec:
            shown[part] = job.spec[part][field]
    shown["model"] = job.spec["model"]["base"]
    if job.kind == "inference":
        shown["endpoint"] = f"/v1/jobs/{job.id}/v1"
    return dict(shown)
