"""Handlers of how a job went: its events, metrics, validation episodes and failures.

events   consumes the job's events, as history and as they come; produces JSON or server-sent events
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from aiohttp import web

from opentinker.services.scheduler.artifacts.registry import evaluation_of, origin_of
from opentinker.services.scheduler.http import transcripts
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.event_stream import send_events
from opentinker.services.scheduler.http.jobs import POLICY, JobsApi
from opentinker.services.scheduler.http.route_decorator import Choice, Integer, Parameter, Route, Texts
from opentinker.services.scheduler.jobs.metric_history import MetricHistory, Page
from opentinker.shared import api_types
from opentinker.shared.evaluation.outcomes import OUTCOME_NAMES
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.admission import admission_of
from opentinker.shared.types.core import Discard, JobState, split_part
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.telemetry import MetricPoint

EVENT_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,15})?")
LOOK_S = 1.0
FINAL = {state.value for state in JobState if state.final}
LIMIT_FAILURES = Integer("limit", "Failures in the response, the newest.", default=100, low=1, high=1000)
AFTER_EVENT = Parameter("after", "Only events after this id; `Last-Event-ID` is equivalent.")
FORMAT = Choice(
    "format",
    "`json`: all current entries as one list; default: a stream of server-sent events.",
    among=("sse", "json"),
)
AFTER_POINT = Integer("after", "Only points after this cursor.")
LIMIT_POINTS = Integer("limit", "Points per response.", default=1000, low=1, high=10_000)
SOURCE = Parameter("source", "Only points of this source, for example `trainer`.")
NAMES = Texts(
    "names",
    "Only these values, one parameter for each. A single one with commas that is not the name of a value lists some.",
)
STEP = Integer("step", "Step of the evaluation; default: the latest.", default=-1, high=10**12)
OUTCOME = Choice(
    "outcome",
    "Only episodes that ended so. `won`, `drawn` and `lost`: where other players have seats.",
    among=("all", *OUTCOME_NAMES),
)
OPPONENT = Parameter("opponent", "Only episodes against this opponent.")

LOOKED_AT = 1000
"""Newest jobs of the tenant among which evaluations of a job are looked for."""


class JobHistoryApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.ctx, self.store = jobs, jobs.ctx, jobs.store
        self._history = MetricHistory(jobs.bus, jobs.artifacts)

    @Route("GET", "/v1/jobs/{id}/evaluations", Action.JOBS_READ, answer=api_types.Evaluations)
    async def evaluations(self, request: web.Request) -> web.Response:
        """List the eval jobs that played checkpoints of this job, by checkpoint.

        Those in which they only play against the evaluated one are not listed."""
        job = await self.jobs.found(request)
        newest = await self.store.jobs_of(job.tenant, LOOKED_AT)
        evaluated = [(split_part(origin_of(one)[0])[0], one) for one in newest if one.kind == "eval"]
        listed = [evaluation_of(one) for source, one in evaluated if source == job.id]
        return json_response({"evaluations": sorted(listed, key=lambda one: (one["policy"], one["step"]))})

    # --- events -------------------------------------------------------------------------------------------------

    @Route("GET", "/v1/jobs/{id}/events", Action.JOBS_READ, parameters=(AFTER_EVENT, FORMAT), answer=api_types.Events)
    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream job events (server-sent events)."""
        job = await self.jobs.found(request)
        after = request.query.get("after") or request.headers.get("Last-Event-ID") or "0"
        if not EVENT_ID.fullmatch(after):
            raise SpecError.of("after", after[:100], "not an event id, e.g. 1763712000000-0")
        if FORMAT.read(request) == "json":
            return json_response({"events": await self.store.all_events(job.id, after)})
        return await send_events(self.ctx, request, self._news(job.id, after))

    async def _news(self, job: str, after: str) -> AsyncGenerator[bytes, None]:
        """Yield events as they come, until that of the final state is out."""
        while True:
            over = (await self.store.job(job)).state.final
            page = await self.store.events(job, after, block_ms=None if over else int(LOOK_S * 1000))
            for event in page:
                after = event["id"]
                yield f"id: {after}\nevent: {event['event']}\ndata: {orjson.dumps(event).decode()}\n\n".encode()
                if event.get("state") in FINAL:
                    return
            if over and not page:
                return
            yield b""

    # --- metrics ------------------------------------------------------------------------------------------------

    @Route(
        "GET",
        "/v1/jobs/{id}/metrics",
        Action.JOBS_READ,
        parameters=(AFTER_POINT, LIMIT_POINTS, SOURCE, NAMES),
        answer=api_types.Metrics,
    )
    async def metrics(self, request: web.Request) -> web.Response:
        """List metric points.

        Read from the stream and metrics.jsonl, so it survives every service; `cursor` is the `after` of the next
        call."""
        job = await self.jobs.undeleted(request)
        after = AFTER_POINT.read(request)
        limit = LIMIT_POINTS.read(request)
        source, names = request.query.get("source", "*"), NAMES.read(request)
        found, more = await self._history.page(job, after, limit, "*" if source == ">" else source)
        wanted = _wanted(names, found)
        points = [_point_of(at, point, wanted) for at, point in found]
        if wanted is not None:
            points = [point for point in points if point["values"]]
        cursor = found[-1][0] if found else after
        return json_response({"metrics": points, "cursor": cursor, "more": more})

    # --- episodes and failures -----------------------------------------------------------------------------------

    @Route(
        "GET",
        "/v1/jobs/{id}/transcripts",
        Action.JOBS_READ,
        parameters=(STEP, OUTCOME, OPPONENT, POLICY),
        answer=api_types.Transcripts,
    )
    async def transcripts(self, request: web.Request) -> web.Response:
        """List stored validation episodes.

        Those of one step, by default the newest that has any; all, or only those with an outcome."""
        job = await self.jobs.undeleted(request)
        step, outcome, opponent = STEP.read(request), OUTCOME.read(request), request.query.get("opponent", "")
        home = self.jobs.artifacts.home(self.jobs.part(request, job))
        found = await asyncio.to_thread(transcripts.read, home, None if step < 0 else step)
        policy = request.query.get("policy", "")
        return json_response(transcripts.by_outcome(found, job.spec, policy, outcome, opponent))

    @Route("GET", "/v1/jobs/{id}/failures", Action.JOBS_READ, parameters=(LIMIT_FAILURES,), answer=api_types.Failures)
    async def failures(self, request: web.Request) -> web.Response:
        """List groups that failed permanently.

        The newest with their errors, and the number of all."""
        job = await self.jobs.undeleted(request)
        limit = LIMIT_FAILURES.read(request)
        ledgers = [await admission_of(self.store.redis, job, policy).ledger() for policy in job.policies or ("",)]
        found = await self.store.failures(job.id, limit)
        counts = max((ledger.failed for ledger in ledgers), key=lambda failed: sum(failed.values()))
        if invalid := max(ledger.discarded.get(Discard.INVALID, 0) for ledger in ledgers):
            counts = {**counts, Discard.INVALID.value: invalid}
        return json_response({"failures": found, "counts": counts})


def _wanted(names: list[str], found: Page) -> set[str] | None:
    """Return the names of the values that are asked for; None: all. Names are free, and may have commas themselves."""
    if len(names) == 1 and not any(names[0] in point.values for _, point in found):
        return set(names[0].split(","))
    return set(names) or None


def _point_of(cursor: int, point: MetricPoint, wanted: set[str] | None) -> dict[str, Any]:
    """Return a point as responses have it, with the `wanted` values; None: all."""
    values = point.values
    return {
        "cursor": cursor,
        "source": point.source,
        "incarnation": point.incarnation,
        "seq": point.seq,
        "time": point.time,
        "step": point.step,
        "values": values if wanted is None else {name: value for name, value in values.items() if name in wanted},
    }
