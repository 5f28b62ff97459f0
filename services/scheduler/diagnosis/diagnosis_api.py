"""Handler of GET /v1/jobs/{id}/why: where a job's time went, who is silent, and what to change.

Consumes TIMELINE as history, and the newest point of METRIC; asks no worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
from aiohttp import web

from opentinker.services.scheduler.diagnosis.findings import (
    Finding,
    findings_on_learning,
    findings_on_time,
    findings_on_waiting,
)
from opentinker.services.scheduler.diagnosis.holders import holders_of
from opentinker.services.scheduler.diagnosis.time_by_cause import seconds_by_cause
from opentinker.services.scheduler.diagnosis.waits import Wait, waits_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.route_decorator import Integer, Route
from opentinker.shared import api_types
from opentinker.shared.data.step_log import trainer_source
from opentinker.shared.messaging.subjects import TIMELINE
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec, read_stored
from opentinker.shared.types.core import ENDLESS, JobRecord
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.telemetry import Segment, TimelinePart

LAST_S = Integer(
    "last_s", "Seconds that are looked at: the last ones, or those before its end.", default=120, low=5, high=3600
)
MAX_PARTS = 20_000
LATE_S = 2.0
"""Workers report a second's activity after it."""
LEAST_WAIT_S = 3.0
"""A shorter wait is not named."""


class DiagnosisApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.store, self.bus = jobs, jobs.store, jobs.bus

    @Route("GET", "/v1/jobs/{id}/why", Action.JOBS_READ, parameters=(LAST_S,), answer=api_types.Diagnosis)
    async def why(self, request: web.Request) -> web.Response:
        """Say why a job is slow, waits or does not learn.

        Where the last seconds went by cause, which workers are silent, and what to change."""
        job = await self.jobs.undeleted(request)
        until = job.finished or time.time() - LATE_S
        began = job.since if job.state.held else job.created
        since = min(max(until - LAST_S.read(request), began), until)
        parts, is_whole = await self._parts(job, since)
        segments = [segment for part in parts for segment in part.segments]
        if not is_whole:  # nothing is known of what came after them
            until = max(segment.end for segment in segments)
        seconds = await asyncio.to_thread(seconds_by_cause, segments, since, until, is_eval=job.kind == "eval")
        holders = await holders_of(self.store, self.bus, job.id, parts, began, until) if job.state.held else []
        waits = _waits(parts, until) if job.state.held else []
        outage = await self.jobs.outage(job)
        points = await self.jobs.newest_points(job)
        findings = [*findings_on_waiting(job.waiting_for or outage.get("waiting_for", ""))]
        spec: JobSpec | None = None
        try:
            spec = read_stored(job.spec)
        except SpecError as error:  # stored by another release
            findings.append(Finding(f"its stored spec is not valid here: {error}", "submit it anew"))
        if job.state.held and job.kind not in ENDLESS:  # whose workers are silent between requests
            findings += findings_on_time(seconds, holders, job.state, spec, waits)
        if spec is not None:
            for policy in job.policies or [""]:
                values = points.get(trainer_source(policy), {}).get("values", {})
                findings += findings_on_learning(values, spec, policy)
        return json_response(
            {
                "job": job.id,
                "state": job.state,
                "since": since,
                "until": until,
                "is_whole": is_whole,
                "causes": [
                    {"cause": cause, "seconds": spent}
                    for cause, spent in sorted(seconds.items(), key=lambda one: -one[1])
                ],
                "waits": msgspec.to_builtins(waits),
                "silent": [{"worker": one.worker, "seconds": one.silent_s} for one in holders if not one.loading_s],
                "findings": msgspec.to_builtins(findings),
            }
        )

    async def _parts(self, job: JobRecord, since: float) -> tuple[list[TimelinePart], bool]:
        """Return the activity since then, and whether it is all of it: the oldest MAX_PARTS are returned."""
        found = await self.bus.history(TIMELINE, 0, MAX_PARTS, since=since, job=job.id, worker="*")
        return [part for _, part in found], len(found) < MAX_PARTS


def _waits(parts: Iterable[TimelinePart], until: float) -> list[Wait]:
    """Return the waits of a job's workers that are worth a word."""
    segments: defaultdict[str, list[Segment]] = defaultdict(list)
    for part in parts:
        segments[part.worker] += part.segments
    return [one for one in waits_of(segments, until) if one.seconds >= LEAST_WAIT_S]
