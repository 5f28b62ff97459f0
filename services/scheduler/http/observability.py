"""Handlers of what a job says and has done, word by word: its log, episodes of its training, the spread of its numbers.

logs   consumes LOG, as history and as a sign that there is more; produces lines as JSON or as server-sent events
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import orjson
from aiohttp import web

from opentinker.services.scheduler.http import transcripts
from opentinker.services.scheduler.http.errors import integer, json_response
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.shared.asyncio_tools import wait_event
from opentinker.shared.messaging.subjects import LOG, TIMELINE
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.telemetry import LEVELS, LogLine

MOST_STEPS = 1000
PARTS = 1000
LINES = 1000
MOST_LINES = 10_000
LOOK_S = 1.0
COMMENT_S = 10.0
LINGER_S = 3.0
"""After a job's end its services still say how they let go of it."""
STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


class KnowingApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.ctx, self.store, self.bus = jobs, jobs.ctx, jobs.store, jobs.bus

    async def rollouts(self, request: web.Request) -> web.Response:
        """Episodes of one step's batch: by default of the newest step that has any."""
        job = await self.jobs.undeleted(request)
        step = integer(request, "step", -1, 0, 10**12)
        home = self.jobs.home(job)
        return json_response(await asyncio.to_thread(transcripts.read, home, None if step < 0 else step, "rollouts"))

    async def distributions(self, request: web.Request) -> web.Response:
        """Return distributions of one step, or of the newest `limit` above `after`, oldest first."""
        job = await self.jobs.undeleted(request)
        step = integer(request, "step", -1, 0, 10**12)
        after, limit = integer(request, "after", 0, 0, 10**12), integer(request, "limit", 1, 1, MOST_STEPS)
        home = self.jobs.home(job)
        found = await asyncio.to_thread(transcripts.distributions, home, None if step < 0 else step, after, limit)
        return json_response({"distributions": found})

    async def timeline(self, request: web.Request) -> web.Response:
        """Return the activity of the job's workers, in the order of arrival.

        `cursor` is the `after` of the next call.
        """
        job = await self.jobs.undeleted(request)
        after = integer(request, "after", 0, 0, 2**62)
        last_s = integer(request, "last_s", 0, 0, 7 * 86400)
        limit = integer(request, "limit", PARTS, 1, MOST_LINES)
        since = time.time() - last_s if last_s else None
        found = await self.bus.history(TIMELINE, after, limit, since=since, job=job.id, worker="*")
        kept = [(seq, part) for seq, part in found if seq > after]
        parts = [{"cursor": seq, **msgspec.to_builtins(part)} for seq, part in kept]
        cursor = kept[-1][0] if kept else after
        return json_response({"timeline": parts, "cursor": cursor, "more": len(found) == limit})

    # --- logs ---------------------------------------------------------------------------------------------------

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Return log lines; `cursor` is the `after` of the next call; `last` limits the number of current lines."""
        job = await self.jobs.undeleted(request)
        after = integer(request, "after", _resumed(request), 0, 2**62)
        level = request.query.get("level", LEVELS[0])
        if level not in LEVELS:
            raise SpecError(
                [{"field": "level", "value": level[:100], "problem": f"must be one of {', '.join(LEVELS)}"}]
            )
        last = integer(request, "last", 0, 0, MOST_LINES)
        match request.query.get("format", "sse"):
            case "json":
                limit = integer(request, "limit", LINES, 1, MOST_LINES)
                return json_response(await self._page(job.id, after, level, last, limit))
            case "sse":
                return await self._stream(request, job, after, level, last)
            case other:
                raise SpecError([{"field": "format", "value": other[:100], "problem": "must be `sse` or `json`"}])

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
            found = await self.bus.history(LOG, after, MOST_LINES, job=job, level="*")
            kept.extend(_shown(found, level))
            after = found[-1][0] if found else after
            if len(found) < MOST_LINES:
                return list(kept), after

    async def _stream(
        self, request: web.Request, job: JobRecord, after: int, level: str, last: int
    ) -> web.StreamResponse:
        """Until the job is over and silent, the client leaves, or the service stops."""
        news = asyncio.Event()

        async def heard(_: LogLine) -> None:
            news.set()

        response = web.StreamResponse(headers=STREAM)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        listening = await self.bus.listen(LOG, heard, job=job.id, level="*")
        try:
            if last:
                lines, after = await self._last(job.id, after, level, last)
                await _write(response, lines)
            said_at = time.monotonic()
            while (
                not self.ctx.stopping.is_set() and request.transport is not None and not request.transport.is_closing()
            ):
                news.clear()
                now = await self.store.job(job.id)
                found = await self.bus.history(LOG, after, LINES, job=job.id, level="*")
                if found:
                    after = found[-1][0]
                    await _write(response, _shown(found, level))
                    said_at = time.monotonic()
                    continue
                if now.state.final and time.time() - now.finished > LINGER_S:
                    return response
                if time.monotonic() - said_at > COMMENT_S:
                    await response.write(b": nothing new\n\n")
                    said_at = time.monotonic()
                await wait_event(news, LOOK_S)
        finally:
            if not self.bus.nc.is_closed:
                await listening.unsubscribe()
        return response


async def _write(response: web.StreamResponse, lines: list[dict[str, Any]]) -> None:
    text = "".join(f"id: {line['cursor']}\nevent: log\ndata: {orjson.dumps(line).decode()}\n\n" for line in lines)
    if text:
        await response.write(text.encode())


def _shown(found: list[tuple[int, LogLine]], level: str) -> list[dict[str, Any]]:
    floor = LEVELS.index(level)
    kept = ((seq, line) for seq, line in found if line.level in LEVELS and LEVELS.index(line.level) >= floor)
    return [{"cursor": seq, **msgspec.to_builtins(line)} for seq, line in kept]


def _resumed(request: web.Request) -> int:
    """Return the event id after which a resumed stream of server-sent events continues."""
    seen = request.headers.get("Last-Event-ID", "")
    return int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 19 else 0
