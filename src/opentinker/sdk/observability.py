"""Observability of a job from Python: its log, training episodes, distributions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TypeVar, cast

import aiohttp
import orjson

from opentinker.sdk.artifacts import path_of, query_of
from opentinker.sdk.http import Http
from opentinker.sdk.inputs import Spec, prepared
from opentinker.shared.api_types import (
    Distribution,
    Distributions,
    LogLine,
    LogLines,
    Rollouts,
    StreamCredentials,
    Timeline,
    TimelinePart,
    Usage,
    Validation,
)

T = TypeVar("T")

READ_S = 30.0
"""A stream that sends nothing for this time, not even a keep-alive, is broken."""


class ObservabilityCalls:
    """Calls of AsyncClient for logs, rollouts, timelines, usage and validation."""

    _http: Http

    async def log_lines(self, id: str, after: int = 0, *, level: str = "debug", last: int = 0) -> list[LogLine]:
        """Return current lines of this level and above, oldest first; `last` limits their number. Each line has
        `cursor`, `time`, `level`, `service`, `worker`, `event`, `fields` and `trace`."""
        lines: list[LogLine] = []
        query = {"format": "json", "level": level, "last": str(last)}
        while True:
            page = cast(LogLines, await self._http.json("GET", path_of(id, "/logs"), {**query, "after": str(after)}))
            lines += page["lines"]
            after = page["cursor"]
            if not page["more"]:
                return lines

    async def logs(
        self, id: str, after: int = 0, *, level: str = "debug", last: int = 0
    ) -> AsyncGenerator[LogLine, None]:
        """Yield lines as they arrive, until the job has ended and is silent. Reconnects and continues where it was."""
        waiting = self._http.waiting()
        query = {"level": level, "last": str(last)}
        while True:
            try:
                asked = {**query, "after": str(after)}
                async with self._http.open(path_of(id, "/logs"), asked, read_s=READ_S, waiting=waiting) as response:
                    async for raw in response.content:
                        line: LogLine | None = orjson.loads(raw[5:]) if raw.startswith(b"data:") else None
                        if line is None or line["cursor"] <= after:
                            waiting.heard()
                            continue
                        waiting.answered()
                        after, query["last"] = line["cursor"], "0"
                        yield line
                    waiting.heard()
                if not await self._goes_on(id):
                    return
                await self._http.on_end(waiting)
            except (aiohttp.ClientError, TimeoutError) as error:
                await self._http.stand_by(waiting, error)

    async def rollouts(self, id: str, step: int | None = None) -> Rollouts:
        """Kept training episodes of a step's batch (default: the newest): `step`, `rollouts`, and all `steps`. `id`:
        JOB~POLICY for a job with several policies."""
        query = {} if step is None else {"step": str(step)}
        return cast(Rollouts, await self._http.json("GET", path_of(id, "/rollouts"), query_of(id, **query)))

    async def distributions(
        self, id: str, step: int | None = None, *, after: int = 0, limit: int = 1
    ) -> list[Distribution]:
        """Histograms of a step, or of the newest `limit` steps above `after`, oldest first: `step`, and by name `edges`
        and `counts`, of which there is one more (below the first edge, ..., from the last one on)."""
        query = {"after": str(after), "limit": str(limit)} if step is None else {"step": str(step)}
        asked = query_of(id, **query)
        return cast(Distributions, await self._http.json("GET", path_of(id, "/distributions"), asked))["distributions"]

    async def timeline(self, id: str, after: int = 0, *, last_s: int = 0) -> list[TimelinePart]:
        """Return the activity of the job's workers: a part per worker and second, oldest first, with its `segments`
        (`lane`, `kind`, `start`, `end`, `version`, `level`) and `cursor`; `last_s`: only the last seconds."""
        parts: list[TimelinePart] = []
        query = {"last_s": str(last_s)} if last_s else {}
        while True:
            asked = {**query, "after": str(after)}
            page = cast(Timeline, await self._http.json("GET", path_of(id, "/timeline"), asked))
            parts += page["timeline"]
            after, query = page["cursor"], {}
            if not page["more"]:
                return parts

    async def stream_credentials(self, id: str) -> StreamCredentials:
        """Where and how the job is heard live on NATS, for a while: `servers`, `token`, `subjects`, `expires_at`..."""
        return cast(StreamCredentials, await self._http.json("POST", path_of(id, "/stream-credentials"), again=False))

    async def validate(self, spec: Spec, *, beside: str | Path | None = None) -> Validation:
        """Have the server check a spec without submitting it: `valid`, `mistakes`, `checks` (what, found, result: ok,
        note or bad, hint), `messages` of an episode's beginning. Mistakes raise nothing. `beside`: as in `submit`."""
        data = await prepared(self._http, spec, beside)
        return cast(Validation, await self._http.json("POST", "/v1/validate", noun=data, timeout_s=90.0))

    async def usage(
        self,
        by: str = "job",
        *,
        job: str | None = None,
        first: str | None = None,
        last: str | None = None,
        limit: int = 100,
    ) -> Usage:
        """Return the cost of jobs: `usage`, a row for each of the newest `limit` jobs, of their keys (`by="key"`), or
        of each day from `first` to `last` (`by="day"`, as 2026-11-22); and the `total` of these rows."""
        given = {"job": job, "from": first, "to": last, "limit": str(limit)}
        query = {name: value for name, value in given.items() if value is not None}
        return cast(Usage, await self._http.json("GET", "/v1/usage", {"by": by, **query}))

    async def _goes_on(self, id: str) -> bool:
        """The stream has ended: because the job has, or because the server stops."""
        return not (await self._http.json("GET", path_of(id)))["finished"]
