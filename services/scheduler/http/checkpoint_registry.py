"""Handler of GET /v1/checkpoints: the checkpoints of all jobs of a tenant."""

from __future__ import annotations

import asyncio

from aiohttp import web

from opentinker.services.scheduler.artifacts.registry import Registry
from opentinker.services.scheduler.artifacts.registry_query import (
    ORDERS,
    YES_OR_NO,
    RegistryQuery,
    settings_of,
    sortable,
)
from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.route_decorator import Choice, Integer, Parameter, Route
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import SpecError

BEFORE = Parameter("before", "Only checkpoints listed after this one: the cursor of the previous response.")
LIMIT = Integer("limit", "Checkpoints per response.", default=100, low=1, high=1000)
SORT = Parameter(
    "sort",
    f"Order: {', '.join(ORDERS)}, or a metric of evaluations (`val/` may be left out), the largest first; a leading - "
    "reverses it. Values of one setting are compared, `ranked` says which: `setting`, else that of most checkpoints. "
    "Those without come last. Default: created.",
)
PUBLISHED = Choice("published", "`yes`: only published ones; `no`: only others.", among=("any", *YES_OR_NO))
WEIGHTS = Choice(
    "weights", "Only `whole` models, only adapters (`lora`), or only those without weights (`none`).",
    among=("any", "whole", "lora", "none"),
)  # fmt: skip
FILTERS = (
    Parameter(
        "search", "Only those with all these words in their id, job's name, kind, model, project, tags or names."
    ),
    Parameter("model", "Only checkpoints of this base model."),
    Parameter("job", "Only checkpoints of this job."),
    Parameter("project", "Only checkpoints of jobs in this project."),
    Parameter("tag", "Only checkpoints of jobs with this tag; with all of several, separated by commas."),
    Parameter("setting", "Only checkpoints evaluated in this setting, by whose values a metric sorts."),
    PUBLISHED,
    WEIGHTS,
)


class CheckpointRegistryApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.registry = Registry(jobs.store, jobs.artifacts.index)

    @Route(
        "GET",
        "/v1/checkpoints",
        Action.JOBS_READ,
        parameters=(BEFORE, LIMIT, SORT, *FILTERS),
        answer=api_types.CheckpointRegistry,
    )
    async def list(self, request: web.Request) -> web.Response:
        """List the checkpoints of all your jobs, the newest first.

        Each has its lineage, its published names and its evaluations. `cursor` is the `before` of the next call."""
        limit, before = LIMIT.read(request), request.query.get("before", "")
        query = RegistryQuery.of(request.query, published=PUBLISHED.read(request), weights=WEIGHTS.read(request))
        found = await self.registry.of(tenant_of(request))
        listed = await asyncio.to_thread(query.chosen, found)
        names = [one["checkpoint"] for one in listed]
        if before and before not in names:
            problem = "is not one of the listed checkpoints; use the cursor of the last answer, or start without one"
            raise SpecError.of("before", before[:100], problem)
        start = names.index(before) + 1 if before else 0
        shown = listed[start : start + limit]
        cursor = shown[-1]["checkpoint"] if shown else before
        metrics, settings = await asyncio.to_thread(lambda: (sortable(found), settings_of(found, query.metric)))
        more = len(listed) > start + limit
        complete = len(found) < self.registry.most
        named = {"metrics": metrics, "settings": settings, "complete": complete}
        return json_response({"checkpoints": shown, "cursor": cursor, "more": more, **named})
