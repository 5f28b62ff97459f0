"""Routes for details of a job: log lines, transcripts of training episodes, distributions of metrics.

logs   consumes LOG, as history and as a sign that there is more; produces lines as JSON or as server-sent events
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import orjson
from aiohttp import web

from opentinker.services.scheduler.http import transcripts
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.event_stream import send_events
from opentinker.services.scheduler.http.job_history import FORMAT, LOOK_S
from opentinker.services.scheduler.http.jobs import POLICY, JobsApi
from opentinker.services.scheduler.http.route_decorator import Choice, Integer, Route
from opentinker.shared import api_types
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.messaging.subjects import LOG, TIMELINE
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.telemetry import LEVELS, LogLine

LINES = 1000
LINGER_S = 3.0
"""After a job's end its services still say how they let go of it."""
MAX_LINES = 10_000
TRAINED = Integer("step", "Optimizer step that trained on the episodes; default: the latest.", default=-1, high=10**12)
AFTER_STEP = Integer("after", "Only steps after this one.", high=10**12)
LIMIT_STEPS = Integer("limit", "Steps in the response, the newest.", default=1, low=1, high=1000)
AFTER_PART = Integer("after", "Only parts after this cursor.")
LAST_S = Integer("last_s", "Only the last seconds; 0: everything.", high=7 * 86400)
LIMIT_PARTS = Integer("limit", "Parts per response.", default=1000, low=1, high=MAX_LINES)
AFTER_LINE = Integer("after", "Only lines after this cursor; `Last-Event-ID` is equivalent.")
LEVEL = Choice("level", f"Lines of this level and above: {', '.join(LEVELS)}.", among=LEVELS)
LAST = Integer("last", "Only the last of the current lines; 0: all.", high=MAX_LINES)
LIMIT_LINES = Integer("limit", "With `format=json`: lines per response.", default=LINES, low=1, high=MAX_LINES)


class ObservabilityApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.ctx, self.store, self.bus = jobs, jobs.ctx, jobs.store, jobs.bus

    @Route("GET", "/v1/jobs/{id}/rollouts", Action.JOBS_READ, parameters=(TRAINED, POLICY), answer=api_types.Rollouts)
    async def rollouts(self, request: web.Request) -> web.Response:
        """List stored training episodes.

        Those of one step's batch, by default the newest step that has any."""
        job = await self.jobs.undeleted(request)
        step = TRAINED.read(request)
        home = self.jobs.artifacts.home(self.jobs.part(request, job))
        return json_response(await asyncio.to_thread(transcripts.read, home, None if step < 0 else step, "rollouts"))

    @Route(
        "GET",
        "/v1/jobs/{id}/distributions",
        Action.JOBS_READ,
        parameters=(TRAINED, AFTER_STEP, LIMIT_STEPS, POLICY),
        answer=api_types.Distributions,
    )
    async def distributions(self, request: web.Request) -> web.Response:
        """Histograms of a step's rewards, lengths, turns, staleness and importance ratios.

        For one step, or for the newest `limit` steps above `after`, oldest first."""
        job = await self.jobs.undeleted(request)
        step = TRAINED.read(request)
        after, limit = AFTER_STEP.read(request), LIMIT_STEPS.read(request)
        home = self.jobs.artifacts.home(self.jobs.part(request, job))
        found = await asyncio.to_thread(transcripts.distributions, home, None if step < 0 else step, after, limit)
        return json_response({"distributions": found})

    @Route(
        "GET",
        "/v1/jobs/{id}/timeline",
        Action.JOBS_READ,
        parameters=(AFTER_PART, LAST_S, LIMIT_PARTS),
        answer=api_types.Timeline,
    )
    async def timeline(self, request: web.Request) -> web.Response:
        """List the activity of a job's workers, per second.

        In the order of arrival; `cursor` is the `after` of the next call."""
        job = await self.jobs.undeleted(request)
        after = AFTER_PART.read(request)
        last_s = LAST_S.read(request)
        limit = LIMIT_PARTS.read(request)
        since = time.time() - last_s if last_s else None
        found = await self.bus.history(TIMELINE, after, limit, since=since, job=job.id, worker="*")
        kept = [(seq, part) for seq, part in found if seq > after]
        parts = [{"cursor": seq, **msgspec.to_builtins(part)} for seq, part in kept]
        cursor = kept[-1][0] if kept else after
        return json_response({"timeline": parts, "cursor": cursor, "more": len(found) == limit})

    # --- logs ---------------------------------------------------------------------------------------------------

    @Route(
        "GET",
        "/v1/jobs/{id}/logs",
        Action.JOBS_READ,
        parameters=(AFTER_LINE, LEVEL, LAST, LIMIT_LINES, FORMAT),
        answer=api_types.LogLines,
    )
    async def logs(self, request: web.Request) -> web.StreamResponse:
        """List or stream log lines of all services about a job.

        `cursor` is the `after` of the next call; `last` limits the number of current lines."""
        job = await self.jobs.undeleted(request)
        after = AFTER_LINE.read(request, _resumed(request))
        level, last = LEVEL.read(request), LAST.read(request)
        if FORMAT.read(request) == "json":
            return json_response(await self._page(job.id, after, level, last, LIMIT_LINES.read(request)))
        return await send_events(self.ctx, request, self._news(job.id, after, level, last))

    async def _page(self, job: str, after: int, level: str, last: int, limit: int) -> dict[str, Any]:
        if last:
            lines, cursor = await self._last(job, after, level, last)
            return {"lines": lines, "cursor": cursor, "more": False}
        found = await self.bus.history(LOG, after, limit, job=job, level="*")
        cursor = found[-1][0] if found else after
        return {"lines": _shown(found, level), "cursor": cursor, "more": len(found) == limit}

    async def _last(self, job: str, after: int, level: str, last: int) -> tuple[list[dict[str, Any]], int]:
        kept: deque[dict[str, Any]] = deque(maxlen=last)
        while True:
            found = await self.bus.history(LOG, after, MAX_LINES, job=job, level="*")
            kept.extend(_shown(found, level))
            after = found[-1][0] if found else after
            if len(found) < MAX_LINES:
                return list(kept), after

    async def _news(self, job: str, after: int, level: str, last: int) -> AsyncGenerator[bytes, None]:
        """Yield lines as they come, until the job is over and silent."""
        news = asyncio.Event()
        async with self.bus.wakes(news, LOG, job=job, level="*"):
            if last:
                lines, after = await self._last(job, after, level, last)
                yield _written(lines)
            while True:
                news.clear()
                now = await self.store.job(job)
                if found := await self.bus.history(LOG, after, LINES, job=job, level="*"):
                    after = found[-1][0]
                    yield _written(_shown(found, level))
                    continue
                if now.state.final and time.time() - now.finished > LINGER_S:
                    return
                yield b""
                await wait_event(news, LOOK_S)


def _written(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(b"id: %d\nevent: log\ndata: %b\n\n" % (line["cursor"], orjson.dumps(line)) for line in lines)


def _shown(found: list[tuple[int, LogLine]], level: str) -> list[dict[str, Any]]:
    floor = LEVELS.index(level)
    kept = ((seq, line) for seq, line in found if line.level in LEVELS and LEVELS.index(line.level) >= floor)
    return [{"cursor": seq, **msgspec.to_builtins(line)} for seq, line in kept]


def _resumed(request: web.Request) -> int:
    """Return the event id after which a resumed stream of server-sent events continues."""
    seen = request.headers.get("Last-Event-ID", "")
    return int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 19 else 0
