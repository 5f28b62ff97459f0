"""Cost of jobs over HTTP: by job, by day, by key.

usage   consumes what leases, workers and the artifact store's index have counted in Redis
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import LIMIT_JOBS, JobsApi
from opentinker.services.scheduler.http.route_decorator import Choice, Parameter, Route
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.state.usage import DAYS, KINDS, STORED, UsageStore
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import SpecError

MAX_DAYS = DAYS
DEFAULT_DAYS = 30
MEASURE_S = 30.0
"""Interval between measurements of a job's stored bytes."""
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")

BY = Choice("by", "`job` (default; the newest jobs), `day` or `key`.", among=("job", "day", "key"))
FIRST = Parameter("from", "With `day`: the first day, YYYY-MM-DD; default: 30 days ago.")
LAST_DAY = Parameter("to", f"With `day`: the last day; at most {MAX_DAYS} days.")
ONE_JOB = Parameter("job", "With `job`: only this job.")


class UsageApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.store = jobs, jobs.store
        self.spent = UsageStore(jobs.store.redis)
        self.artifacts = jobs.artifacts
        self._sizes = SingleFlight[int](MEASURE_S)

    @Route(
        "GET",
        "/v1/usage",
        Action.JOBS_READ,
        parameters=(BY, FIRST, LAST_DAY, ONE_JOB, LIMIT_JOBS),
        answer=api_types.Usage,
    )
    async def usage(self, request: web.Request) -> web.Response:
        """Usage of your jobs: worker, GPU and CPU seconds, tokens, stored bytes."""
        by = BY.read(request)
        rows: Sequence[Mapping[str, Any]]
        more = False
        if by == "day":
            rows = await self._by_day(request)
        else:
            jobs, more = await self._asked_for(request)
            rows = await self._by_job(jobs)
            rows = _summed(rows, "key") if by == "key" else rows
        total = {kind: sum(row[kind] for row in rows) for kind in KINDS}
        stored = [row[STORED] for row in rows]
        total[STORED] = max(stored, default=0) if by == "day" else sum(stored)  # of a day it is the most at a time
        settings = self.jobs.ctx.settings
        priced = [{**row, "cost": settings.cost(row["worker_s"], row["gpu_s"])} for row in (*rows, total)]
        currency = "" if priced[-1]["cost"] is None else settings.price_currency
        summed = {"usage": priced[:-1], "total": priced[-1], "more": more}
        return json_response({"by": by, **summed, "currency": currency})

    async def _asked_for(self, request: web.Request) -> tuple[list[JobRecord], bool]:
        """Return the jobs, and whether there are more."""
        if (id := request.query.get("job")) is not None:
            return [await self.jobs.found(request, id)], False
        limit = LIMIT_JOBS.read(request)
        found = await self.store.jobs_of(tenant_of(request), limit + 1)
        return found[:limit], len(found) > limit

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
        first = _day(request, "from", last - timedelta(days=DEFAULT_DAYS - 1))
        if not 0 <= (last - first).days < MAX_DAYS:
            problem = f"must not be after `to` ({last}), nor more than {MAX_DAYS} days before it"
            raise SpecError.of("from", str(first), problem)
        found = await self.spent.of_days(tenant_of(request), first, last)
        return [{"day": str(day), **spent} for day, spent in found.items()]

    async def _stored(self, jobs: list[JobRecord]) -> list[int]:
        """Return the bytes of each job with its policies. What is archived is counted; what others may still write
        into is measured."""
        index = self.artifacts.index
        kept = await index.stored(jobs[0].tenant) if jobs else {}
        opened = set(await index.opened())
        sizes = []
        for job in jobs:
            size = 0
            for part in [job.part(policy) for policy in ("", *job.policies)]:
                if job.state.final and part.id in kept and part.id not in opened:
                    size += kept[part.id]
                else:
                    size += await self._sizes.get(part.id, partial(self.artifacts.size, part))
            sizes.append(size)
        return sizes


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
    raise SpecError.of(name, text[:100], "must be a day, as 2026-11-22")
