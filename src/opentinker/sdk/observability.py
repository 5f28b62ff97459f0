"""Observability of a job from Python: its log, training episodes, distributions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

from opentinker.sdk.artifacts import path_of, query_of
from opentinker.sdk.http import Http
from opentinker.sdk.inputs import Spec, prepared
from opentinker.shared.api_types import (
    DataRows,
    Diagnosis,
    Distribution,
    Distributions,
    Job,
    LogLine,
    Rollouts,
    ServedModels,
    StreamCredentials,
    TimelinePart,
    Usage,
    Validation,
)


class ObservabilityCalls:
    """Calls of AsyncClient for logs, rollouts, timelines, usage and validation."""

    _http: Http

    async def log_lines(self, id: str, after: int = 0, *, level: str = "debug", last: int = 0) -> list[LogLine]:
        """Return current lines of this level and above, oldest first; `last` limits their number. Each line has
        `cursor`, `time`, `level`, `service`, `worker`, `event`, `fields` and `trace`."""
        query = {"format": "json", "level": level, "last": str(last)}
        return await self._http.pages(path_of(id, "/logs"), "lines", after, query)

    async def logs(
        self, id: str, after: int = 0, *, level: str = "debug", last: int = 0
    ) -> AsyncGenerator[LogLine, None]:
        """Yield lines as they arrive, until the job has ended and is silent. Reconnects and continues where it was."""
        query = {"level": level, "last": str(last), "after": str(after)}

        async def is_over(_: bool) -> bool:
            """Return whether the job is over; otherwise the stream has ended because the server stops."""
            return bool((await self._http.json(Job, "GET", path_of(id)))["finished"])

        news = self._http.follow(
            path_of(id, "/logs"), query, lambda line: line["cursor"] > int(query["after"]), is_over
        )
        async with aclosing(news):
            async for line in news:
                query |= {"after": str(line["cursor"]), "last": "0"}
                yield line

    async def rollouts(self, id: str, step: int | None = None) -> Rollouts:
        """Kept training episodes of a step's batch (default: the newest): `step`, `rollouts`, and all `steps`. `id`:
        JOB~POLICY for a job with several policies."""
        query = {} if step is None else {"step": str(step)}
        return await self._http.json(Rollouts, "GET", path_of(id, "/rollouts"), query_of(id, **query))

    async def distributions(
        self, id: str, step: int | None = None, *, after: int = 0, limit: int = 1
    ) -> list[Distribution]:
        """Histograms of a step, or of the newest `limit` steps above `after`, oldest first: `step`, and by name `edges`
        and `counts`, of which there is one more (below the first edge, ..., from the last one on)."""
        query = {"after": str(after), "limit": str(limit)} if step is None else {"step": str(step)}
        asked = query_of(id, **query)
        return (await self._http.json(Distributions, "GET", path_of(id, "/distributions"), asked))["distributions"]

    async def rows(
        self,
        id: str,
        *,
        text: str = "",
        least_solved: int | None = None,
        most_solved: int | None = None,
        solved_above: int | None = None,
        solved_below: int | None = None,
        sort: str = "row",
        offset: int = 0,
        limit: int = 50,
    ) -> DataRows:
        """Return rows of the data set that a job plays or learns from: the rendered prompt, its tokens, and how often
        each was played and solved, also over steps. `total` counts the rows that pass the filters.

        `text`: only rows that contain it. `least_solved`, `most_solved`: bounds of the solved share in percent, and
        `solved_above`, `solved_below`: bounds that do not pass themselves. `sort`: row, solved, played or reward; a
        leading - reverses it. `id`: JOB~POLICY for a job with several policies."""
        query = {"text": text, "least_solved": least_solved, "most_solved": most_solved, "sort": sort}
        query |= {"solved_above": solved_above, "solved_below": solved_below}
        asked = {name: str(value) for name, value in query.items() if value not in (None, "")}
        asked |= {"offset": str(offset), "limit": str(limit)}
        return await self._http.json(DataRows, "GET", path_of(id, "/rows"), query_of(id, **asked))

    async def job_models(self, id: str, *, offset: int = 0, limit: int = 100) -> ServedModels:
        """Return the models of your tenant's clients on a Tinker server, the last used first: progress, checkpoints,
        and what their commands wait for. Of other tenants' models the server's tenant gets numbers alone."""
        asked = {"offset": str(offset), "limit": str(limit)}
        return await self._http.json(ServedModels, "GET", path_of(id, "/models"), asked)

    async def timeline(self, id: str, after: int = 0, *, last_s: int = 0) -> list[TimelinePart]:
        """Return the activity of the job's workers: a part per worker and second, oldest first, with its `segments`
        (`lane`, `kind`, `start`, `end`, `version`, `level`) and `cursor`; `last_s`: only the last seconds."""
        query = {"last_s": str(last_s)} if last_s else {}
        return await self._http.pages(path_of(id, "/timeline"), "timeline", after, only_first=query)

    async def why(self, id: str, *, last_s: int = 120) -> Diagnosis:
        """Return where the job's last seconds went by cause, which workers are silent, and what to change."""
        return await self._http.json(Diagnosis, "GET", path_of(id, "/why"), {"last_s": str(last_s)})

    async def stream_credentials(self, id: str) -> StreamCredentials:
        """Return credentials for the live streams of the job, valid for a while: `servers`, `token`, `subjects`,
        `expires_at`..."""
        return await self._http.json(StreamCredentials, "POST", path_of(id, "/stream-credentials"), again=False)

    async def validate(
        self, spec: Spec, *, beside: str | Path | None = None, scope: Literal["all", "queue", "spec"] = "all"
    ) -> Validation:
        """Have the server check a spec, or that of a sweep, without submitting it: `valid`, `mistakes`, `checks` (what,
        found, result: ok, note or bad, hint), `messages` of an episode's beginning, and an `estimate` of what it takes,
        by an earlier job like it. Mistakes raise nothing. `beside`: as in `submit`; `scope`: "queue" plays
        no episode, and "spec" looks at nothing but the text."""
        data = await prepared(self._http, spec, beside)
        return await self._http.json(Validation, "POST", "/v1/validate", {"scope": scope}, noun=data, timeout_s=90.0)

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
        return await self._http.json(Usage, "GET", "/v1/usage", {"by": by, **query})
