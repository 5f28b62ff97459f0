"""Handlers of /v1/sweeps."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from opentinker.services.scheduler.http.auth import may_see, principal_of, tenant_of
from opentinker.services.scheduler.http.errors import json_response, parsed, read_json
from opentinker.services.scheduler.http.jobs import FRESH_S, JobsApi
from opentinker.services.scheduler.http.list_parameters import GROUP_BY, parameters_of
from opentinker.services.scheduler.http.publishing import PublishingApi
from opentinker.services.scheduler.http.route_decorator import Integer, Parameter, Route
from opentinker.services.scheduler.jobs.list_pages import id_of, page_of, unknown_cursor
from opentinker.services.scheduler.jobs.list_query import SWEEPS, ListQuery, groups_of
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.single_flight import SingleFlight
from opentinker.shared.spec.labels import LabelChanges
from opentinker.shared.state.list_rows import ListRow, ListRows
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.state.usage import UsageStore
from opentinker.shared.types.errors import Conflict, NotFound, SpecError
from opentinker.shared.types.sweeps import MAX_SWEEP_TAGS, TABLE, SweepRecord, SweepState, SweepSummary, Trial

SWEEP_ID = re.compile(r"s-[a-z0-9]{10}")
BEFORE_SWEEP = Parameter("before", "Only sweeps listed after this one: the cursor of the previous response.")
LIMIT_SWEEPS = Integer("limit", "Sweeps per response.", default=100, low=1, high=1000)
SORT_SWEEPS, FILTERS = parameters_of(SWEEPS)
SHOWN = (
    *("id", "name", "project", "tags", "notes", "kind", "model", "environment", "tenant", "key", "state", "reason"),
    *("created", "updated", "planned", "method", "metric", "goal"),
)
"""Fields of a record that a summary has as they are."""


class SweepsApi:
    def __init__(self, jobs: JobsApi, publishing: PublishingApi) -> None:
        self.ctx, self.jobs, self.publishing = jobs.ctx, jobs.store, publishing
        self.store, self.rows = SweepStore(jobs.store.redis), ListRows(jobs.store.redis, "sweep")
        self.all_rows = SingleFlight[list[ListRow]](FRESH_S)
        """Pages with a filter or an order ask for them."""

    async def _found(self, request: web.Request) -> SweepRecord:
        """Return the sweep that the path names. Raises NotFound; a sweep of another tenant looks like one that does not
        exist."""
        id = request.match_info["id"]
        for sweep in await self.store.sweeps([id] if SWEEP_ID.fullmatch(id) else []):
            if may_see(request, sweep.tenant):
                return sweep
        raise NotFound(f"you have no sweep {id[:100]!r}")

    async def _rows(self, tenant: str) -> list[ListRow]:
        """Return the tenant's sweeps, newest first."""
        return await self.all_rows.get(tenant, partial(self.rows.of, tenant))

    @Route(
        "GET",
        "/v1/sweeps",
        Action.JOBS_READ,
        parameters=(BEFORE_SWEEP, LIMIT_SWEEPS, SORT_SWEEPS, *FILTERS),
        answer=api_types.Sweeps,
    )
    async def list(self, request: web.Request) -> web.Response:
        """List your sweeps.

        `cursor` is the `before` of the next call."""
        limit, before = LIMIT_SWEEPS.read(request), request.query.get("before", "")
        tenant, wanted = tenant_of(request), ListQuery.of(request.query, SWEEPS)
        if wanted.plain:
            try:
                found = await self.store.of(tenant, limit + 1, id_of(before))
            except NotFound:
                raise unknown_cursor(before, SWEEPS) from None
            shown, more = found[:limit], len(found) > limit
            cursor = shown[-1].id if shown else before
        else:
            page = await asyncio.to_thread(page_of, await self._rows(tenant), wanted, before, limit, SWEEPS)
            shown, cursor, more = await self.store.summaries(page.ids), page.cursor, page.more
        return json_response({"sweeps": [sweep_summary(sweep) for sweep in shown], "cursor": cursor, "more": more})

    @Route("GET", "/v1/sweeps/groups", Action.JOBS_READ, parameters=(GROUP_BY, *FILTERS), answer=api_types.SweepGroups)
    async def groups(self, request: web.Request) -> web.Response:
        """Count your sweeps by project, tag, state or another property."""
        wanted = ListQuery.of(request.query, SWEEPS)
        rows = await asyncio.to_thread(wanted.chosen, await self._rows(tenant_of(request)))
        return json_response({"groups": groups_of(rows, GROUP_BY.read(request), SWEEPS)})

    @Route("GET", "/v1/sweeps/{id}", Action.JOBS_READ, answer=api_types.Sweep)
    async def get(self, request: web.Request) -> web.Response:
        """Get a sweep: its trials, the best so far, and which settings matter."""
        sweep = await self._found(request)
        trials = await self.store.trials(sweep.id)
        spent = await UsageStore(self.jobs.redis).of_jobs(_jobs(trials))
        return json_response(
            {
                **sweep_summary(sweep),
                "spec": {**sweep.base, TABLE: sweep.table},
                "all_trials": [_trial(trial) for trial in trials],
                "importance": sweep.progress.importance,
                "undelivered": msgspec.to_builtins(sweep.undelivered),
                "worker_s": round(sum(one["worker_s"] for one in spent), 3),
            }
        )

    @Route("PATCH", "/v1/sweeps/{id}", Action.JOBS_WRITE, body=LabelChanges, answer=api_types.SweepSummary)
    async def label(self, request: web.Request) -> web.Response:
        """Change a sweep's name, project, tags or notes.

        It may be over. Jobs that it submits from then on have the new ones; those that there are keep theirs."""
        sweep = await self._found(request)
        asked = parsed(LabelChanges, await read_json(request))
        if len(asked.tags or ()) > MAX_SWEEP_TAGS:
            raise SpecError.of("tags", None, f"a sweep may have {MAX_SWEEP_TAGS}: its jobs have its id as one more")
        await self.rows.label(sweep.id, asked.values(), asked.add_tags or (), asked.remove_tags or ())
        self.all_rows.forget(sweep.tenant)
        return json_response(sweep_summary(await self.store.sweep(sweep.id)))

    @Route("POST", "/v1/sweeps/{id}/cancel", Action.JOBS_WRITE, answer=api_types.SweepSummary)
    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a sweep, and its jobs that have not ended.

        The jobs follow within seconds."""
        sweep = await self._found(request)
        before = await self.store.end(sweep.id, SweepState.CANCELLED, "cancelled by request")
        self.all_rows.forget(sweep.tenant)
        if before not in (SweepState.RUNNING, SweepState.CANCELLED):
            raise Conflict(f"sweep {sweep.id} has ended already ({before}); there is nothing to cancel")
        return json_response(sweep_summary(await self.store.sweep(sweep.id)))

    @Route("DELETE", "/v1/sweeps/{id}", Action.CHECKPOINTS_WRITE, answer=api_types.DeletedSweep)
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a sweep that has ended, and all artifacts of its jobs.

        The jobs' records and usage stay. It is refused if a checkpoint of one of them is published or in use; if that
        happens in between, the artifacts of some jobs are gone and the sweep stays. It may be repeated."""
        sweep = await self._found(request)
        if sweep.state is SweepState.RUNNING:
            raise Conflict(f"sweep {sweep.id} is running; cancel it first")
        if await self.store.is_active(sweep.id):  # for good: what has ended does not become active again
            raise Conflict(f"jobs of sweep {sweep.id} are still being cancelled; try again in a few seconds")
        jobs = [job for job in await self.jobs.jobs(_jobs(await self.store.trials(sweep.id))) if not job.deleted]
        for job in jobs:
            await self.publishing.refuse_kept(job)
        size = 0
        for job in jobs:
            _, freed = await self.publishing.remove_all(job, principal_of(request).name)
            size += freed
        await self.store.delete(sweep.id, sweep.tenant)
        return json_response({"sweep": sweep.id, "jobs": [job.id for job in jobs], "bytes": size})


def _jobs(trials: list[Trial]) -> list[str]:
    return [job.id for trial in trials for job in trial.jobs if job.id]


def sweep_summary(sweep: SweepSummary) -> dict[str, Any]:
    """Return a sweep as lists have it (api_types.SweepSummary)."""
    done = sweep.progress
    return {
        **{name: getattr(sweep, name) for name in SHOWN},
        "finished": sweep.finished or None,
        "trials": done.states,
        "jobs": done.jobs,
        "best": None if done.best is None else {"number": done.best, "value": done.value, "settings": done.settings},
    }


def _trial(trial: Trial) -> dict[str, Any]:
    shown = msgspec.to_builtins(trial)
    del shown["judged"]
    for job in shown["jobs"]:
        del job["rungs"], job["over"]
    return {**shown, "finished": trial.finished or None}
