"""Handlers of /v1/checks: reports of `opentinker env check`, which ran where the environment is, for the page."""

from __future__ import annotations

import time
from typing import Annotated, Self

import msgspec
import orjson
from aiohttp import web
from pydantic import Field, model_validator

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import Body, json_response, parsed, read_json
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.check_reports import CheckReports, CheckSummary
from opentinker.shared.types.errors import NotFound, SpecError

MAX_BYTES = 256 << 10
Line = Annotated[str, Field(max_length=3000)]
Cell = Annotated[str, Field(max_length=200)]


class CheckReport(Body):
    """The body of POST /v1/checks."""

    environment: Annotated[str, Field(min_length=1, max_length=200)]
    """As it was checked: `module:Class`, a name, `harbor:SET`. The newest report of each is kept."""
    verdict: Annotated[str, Field(min_length=1, max_length=300)]
    """In a sentence."""
    errors: Annotated[list[Line], Field(max_length=1000)] = []
    """Findings that would fail episodes or spoil training."""
    advice: Annotated[list[Line], Field(max_length=1000)] = []
    facts: Annotated[dict[Annotated[str, Field(max_length=50)], Line], Field(max_length=50)] = {}
    """Figures by name."""
    transcript: Annotated[str, Field(max_length=50_000)] = ""
    """An example episode."""
    columns: Annotated[list[Cell], Field(max_length=20)] = []
    rows: Annotated[list[list[Cell]], Field(max_length=1000)] = []
    """A table, such as one row for each task of a set."""

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row must have {len(self.columns)} cells, as many as there are columns")
        return self


class CheckReportsApi:
    def __init__(self, ctx: Context) -> None:
        self._reports = CheckReports(ctx.store.redis)

    @Route(
        "POST",
        "/v1/checks",
        Action.ENVIRONMENTS_WRITE,
        status=201,
        body=CheckReport,
        answer=api_types.EnvironmentCheckSummary,
    )
    async def save(self, request: web.Request) -> web.Response:
        """Save the report of a check; it replaces the last one on the same environment."""
        report = parsed(CheckReport, await read_json(request))
        text = report.model_dump_json().encode()
        if len(text) > MAX_BYTES:
            raise SpecError.of("(body)", None, f"has {len(text):,} bytes; a report has at most {MAX_BYTES:,}")
        summary = await self._reports.save(
            tenant_of(request), report.environment, report.verdict, len(report.errors), text, time.time()
        )
        return json_response(msgspec.to_builtins(summary), 201, {"Location": f"/v1/checks/{summary.id}"})

    @Route("GET", "/v1/checks", Action.ENVIRONMENTS_READ, answer=api_types.EnvironmentChecks)
    async def list(self, request: web.Request) -> web.Response:
        """List the saved checks of environments, newest first."""
        return json_response({"checks": msgspec.to_builtins(await self._reports.of(tenant_of(request)))})

    @Route("GET", "/v1/checks/{check}", Action.ENVIRONMENTS_READ, answer=api_types.EnvironmentCheck)
    async def get(self, request: web.Request) -> web.Response:
        """Get a saved check with its whole report."""
        summary, report = await self._found(request)
        return json_response({**msgspec.to_builtins(summary), "report": orjson.loads(report)})

    @Route("DELETE", "/v1/checks/{check}", Action.ENVIRONMENTS_WRITE, answer=api_types.EnvironmentCheckSummary)
    async def delete(self, request: web.Request) -> web.Response:
        """Delete a saved check."""
        summary, _ = await self._found(request)
        await self._reports.delete(tenant_of(request), summary.id)
        return json_response(msgspec.to_builtins(summary))

    async def _found(self, request: web.Request) -> tuple[CheckSummary, str]:
        """Return summary and report of the check that the path names. Raises NotFound."""
        id = request.match_info["check"]
        found = await self._reports.find(tenant_of(request), id)
        if found is None:
            raise NotFound(f"no check {id[:100]!r}; GET /v1/checks lists them")
        return found
