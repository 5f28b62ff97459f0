"""Cost of jobs over HTTP: by job, by day, by key.

usage   consumes what leases, workers and the artifact store's index have counted in Redis
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import may_see, tenant_of
from opentinker.services.scheduler.http.errors import integer, json_response
from opentinker.services.scheduler.http.jobs import JOB_ID, JOBS, MOST_JOBS, JobsApi
from opentinker.shared.state.usage import DAYS, KINDS, STORED, Usage
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import NotFound, SpecError

MOST_DAYS = DAYS
USUAL_DAYS = 30
AGAIN_S = 30.0
"""Interval between measurements of a job's stored bytes."""
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class UsageApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.store = jobs, jobs.store
        self.spent = Usage(jobs.store.redis)
        self.artifacts = jobs.artifacts
        self._sizes: dict[str, tuple[float, int]] = {}

    async def usage(self, request: web.Request) -> web.Response:
        by = request.query.get("by", "job")
        rows: Sequence[Mapping[str, Any]]
        match by:
            case "job":
                rows = await self._by_job(await self._asked_for(request))
            case "day":
                rows = await self._by_day(request)
            case "key":
                rows = _summed(await self._by_job(await self._asked_for(request)), "key")
            case other:
                problem = "must be `job`, `day` or `key`"
                raise SpecError([{"field": "by", "value": other[:100], "problem": problem}])
        total = {kind: sum(row[kind] for row in rows) for kind in KINDS}
        stored = [row[STORED] for row in rows]
        total[STORED] = max(stored, default=0) if by == "day" else sum(stored)  # of a day it is the most at a time
        return json_response({"by": by, "usage": rows, "total": total})

    async def _asked_for(self, request: web.Request) -> list[JobRecord]:
        if (id := request.query.get("job")) is not None:
            found = await self.store.jobs([id]) if JOB_ID.fullmatch(id) else []
            if not found or not may_see(request, found[0].tenant):
                raise NotFound(f"you have no job {id[:100]!r}")
            return found
        return await self.store.jobs_of(tenant_of(request), integer(request, "limit", JOBS, 1, MOST_JOBS))

    async def _by_job(self, jobs: list[JobRecord]) -> list[dict[str, Any]]:
        spent = await self.spent.of_jobs([job.id for job in jobs])
        sizes = await self._stored(jobs)
        return [
            {"job": job.id, "name": job.name, "kind": job.kind, "state": job.state, "key": job.key, **own}
            | {STORED: size}
            for job, own, size in zip(jobs, spent, sizes, strict=True)
        ]

    async def _by_day(self, request: web.Request) -> list[dict[str, Any]]:
        last = _day(request, "to", datetime.now(UTC).date())
        first = _day(request, "from", last - timedelta(days=USUAL_DAYS - 1))
        if not 0 <= (last - first).days < MOST_DAYS:
            problem = f"must not be after `to` ({last}), nor more than {MOST_DAYS} days before it"
            raise SpecError([{"field": "from", "value": str(first), "problem": problem}])
        found = await self.spent.of_days(tenant_of(request), first, last)
        return [{"day": str(day), **spent} for day, spent in found.items()]

    async def _stored(self, jobs: list[JobRecord]) -> list[int]:
        """Bytes. What is put away is counted; what others may still write into is measured."""
        index = self.artifacts.index
        kept = await index.stored(jobs[0].tenant) if jobs else {}
        going_on = set(await index.opened()) | {job.id for job in jobs if not job.state.final or job.id not in kept}
        return [await self._measured(job) if job.id in going_on else kept[job.id] for job in jobs]

    async def _measured(self, job: JobRecord) -> int:
        now = time.monotonic()
        at, size = self._sizes.get(job.id, (float("-inf"), 0))
        if now - at > AGAIN_S:
            size = await self.artifacts.size(job)
            for old in [id for id, (measured, _) in self._sizes.items() if now - measured > AGAIN_S]:
                del self._sizes[old]
            self._sizes[job.id] = (now, size)
        return size


def _summed(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = sums.setdefault(row[name], {name: row[name], "jobs": 0, **dict.fromkeys((*KINDS, STORED), 0)})
        own["jobs"] += 1
        for kind in (*KINDS, STORED):
            own[kind] += row[kind]
    return [sums[key] for key in sorted(sums)]


def _day(request: web.Request, name: str, default: date) -> date:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:  # such as the 31st of February
        pass
    raise SpecError([{"field": name, "value": text[:100], "problem": "must be a day, as 2026-11-22"}])
