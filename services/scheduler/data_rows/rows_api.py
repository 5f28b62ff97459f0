"""Handler of GET /v1/jobs/{id}/rows: the rows of a job's data set as its policy gets them, and how each was played.

rows   consumes files of the job, and of a job that plays ENV_ROWS of an env worker, which has the data; renders in a
       separate process; stores nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from aiohttp import web

from opentinker.services.scheduler.data_rows import row_table
from opentinker.services.scheduler.data_rows.row_table import FIELDS, ORDERS, PlayedRows
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.jobs import POLICY, JobsApi
from opentinker.services.scheduler.http.route_decorator import Choice, Integer, Parameter, Route
from opentinker.services.scheduler.jobs.eval_coordinator import RESULTS
from opentinker.shared import api_types
from opentinker.shared.data.readable_paths import opening, readable_by
from opentinker.shared.data.rendered_rows import FileRows, RenderedRows, RowsToRender, render
from opentinker.shared.messaging.bus import NoResponders
from opentinker.shared.messaging.subjects import ENV_ROWS, SANDBOX_ROWS
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec, read_stored
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.env_protocol import SERVED, EnvRows, EnvRowsReply, is_url
from opentinker.shared.types.errors import Conflict, JobFailed, NotFound, SpecError

ANSWER_S = 40.0
"""An env worker may have to read the data, in a process that it starts first."""
RENDERS = 2
"""Processes that render at the same time; more requests wait."""
TEXT_CHARACTERS = 200
ENDLESS = (
    "makes up its episodes, or does not list its rows: gsm8k, math, reasoning_gym, skyrl_gym and harbor list"
    " theirs, and so does a class that defines `data_rows`"
)
ELSEWHERE = "is played elsewhere, and cannot list its rows: only environments that env workers play can"
OFFSET = Integer("offset", "Rows that are skipped.", high=2**40)
LIMIT = Integer("limit", "Rows per response.", default=50, low=1, high=100)
TEXT = Parameter(
    "text", f"Only rows with this text, at most {TEXT_CHARACTERS} characters; letter case does not matter."
)
LEAST = Integer("least_solved", "Only rows solved in at least this percentage of their episodes.", default=-1, high=100)
MOST = Integer("most_solved", "Only rows solved in at most this percentage of their episodes.", default=-1, high=100)
ABOVE = Integer("solved_above", "Only rows solved in more than this percentage.", default=-1, high=100)
BELOW = Integer("solved_below", "Only rows solved in less than this percentage.", default=-1, high=100)
BOUNDS = {"least": LEAST, "most": MOST, "above": ABOVE, "below": BELOW}
"""Parameters, by field of Bounds."""
SORT = Choice(
    "sort",
    f"Order: {', '.join(ORDERS)}; a leading - reverses it. Rows that were not played are last.",
    among=("row", *(f"{sign}{name}" for name in ORDERS for sign in ("", "-") if f"{sign}{name}" != "row")),
)


class RowsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a request."""

    offset: int
    limit: int
    text: str
    solved: row_table.Bounds
    sort: str

    @classmethod
    def of(cls, request: web.Request) -> RowsQuery:
        """Raises SpecError."""
        text = request.query.get("text", "")
        if len(text) > TEXT_CHARACTERS:
            raise SpecError.of("text", text[:100], f"has {len(text)} characters, and {TEXT_CHARACTERS} are allowed")
        bounds = {name: share / 100 for name, one in BOUNDS.items() if (share := one.read(request)) >= 0}
        return cls(
            offset=OFFSET.read(request),
            limit=LIMIT.read(request),
            text=text,
            solved=row_table.Bounds(**bounds),
            sort=SORT.read(request),
        )

    @property
    def is_of_counts(self) -> bool:
        """Return whether the choice depends on how rows were played."""
        return bool(self.solved) or self.sort.removeprefix("-") != "row"


class RowsApi:
    def __init__(self, jobs: JobsApi) -> None:
        self.jobs, self.ctx, self.store, self.bus = jobs, jobs.ctx, jobs.store, jobs.bus
        self._renders = asyncio.Semaphore(RENDERS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant, which renders one page at a time, so that none keeps all processes from the others."""

    @Route(
        "GET",
        "/v1/jobs/{id}/rows",
        Action.JOBS_READ,
        parameters=(OFFSET, LIMIT, TEXT, *BOUNDS.values(), SORT, POLICY),
        answer=api_types.DataRows,
    )
    async def rows(self, request: web.Request) -> web.Response:
        """List the rows of a job's data set: prompt, tokens, and how often each was solved.

        For rl and eval jobs whose environment has a data set, and for sft and dpo jobs, which play no row."""
        whole = await self.jobs.undeleted(request)
        part, wanted = self.jobs.part(request, whole), RowsQuery.of(request)
        spec = read_stored(whole.spec)
        if spec.kind not in ("rl", "eval", "sft", "dpo"):
            raise NotFound(
                f"job {whole.id} is of kind {spec.kind}, and has no rows: only rl, eval, sft and dpo jobs have"
            )
        own = spec_of(spec, policy) if (policy := request.query.get("policy", "")) else spec
        try:
            async with opening(self.store, self.ctx.settings, whole.id):
                if spec.data is not None:
                    return json_response(await self._of_file(whole.tenant, own, wanted))
                return json_response(await self._of_environment(whole, part, own, wanted))
        except JobFailed as error:
            raise Conflict(f"the rows of job {whole.id} cannot be read: {error}") from None

    # --- rows of an environment ----------------------------------------------------------------------------------

    async def _of_environment(
        self, job: JobRecord, part: JobRecord, spec: JobSpec, wanted: RowsQuery
    ) -> dict[str, Any]:
        """`part`: the job or the policy that is asked for, and `spec` its settings.

        Raises NotFound if the environment has no rows, Conflict if an env worker cannot list them."""
        name = spec.environment.name
        if name.startswith(SERVED) or is_url(name):
            raise NotFound(f"the environment of job {job.id}, {name}, {ELSEWHERE}")
        solved_at, played = await asyncio.to_thread(self._played, part, spec)
        readable = await readable_by(self.store, self.ctx.settings, job.tenant, job.spec)
        first = list(range(wanted.offset, wanted.offset + wanted.limit))
        ask = EnvRows(
            name=name,
            config=spec.environment.config,
            isolation=spec.environment.isolation or "process",
            tools=[tool.model_dump() for tool in spec.environment.tools],
            own_jobs=sorted(readable.own),
            job=job.id,
            text=wanted.text,
            numbers=[] if wanted.text or wanted.is_of_counts or wanted.sort != "row" else first,
        )
        reply = await self._asked(job.id, ask)
        assert reply.count is not None
        passed = reply.found if wanted.text else range(reply.count)
        choice = row_table.RowChoice(order=wanted.sort, solved=wanted.solved)
        pick = partial(row_table.page_of, passed, played, choice, wanted.offset, wanted.limit)
        total, page = await asyncio.to_thread(pick)
        rows = await self._prompts(job.id, msgspec.structs.replace(ask, text=""), page, reply)
        found = await self._rendered(job.tenant, spec, tools=reply.tools, rows=rows) if rows else RenderedRows()
        searched = reply.searched if wanted.text else reply.count
        return _answer(found, played, total, reply.count, searched) | {"source": name, "solved_at": solved_at}

    def _played(self, part: JobRecord, spec: JobSpec) -> tuple[float, PlayedRows]:
        """Return with which reward an episode is solved, and the counts. Blocking."""
        home = self.jobs.artifacts.home(part)
        if spec.kind == "eval":
            plan = spec.evaluation
            return plan.solved_at, row_table.of_evaluation(home / RESULTS, plan.solved_at, plan.transcripts)
        solved_at = spec.validation.solved_at if spec.validation is not None else 1.0
        return solved_at, row_table.of_training(home)

    async def _asked(self, job: str, ask: EnvRows) -> EnvRowsReply:
        """Raises NotFound, Conflict, NoReply."""
        call = SANDBOX_ROWS if ask.isolation == "sandbox" else ENV_ROWS
        try:
            reply = await self.bus.request(call, ask, ANSWER_S)
        except NoResponders:
            kind = "env worker with sandboxes" if ask.isolation == "sandbox" else "env worker"
            raise Conflict(f"no {kind} is running to list the rows of {ask.name}: start one") from None
        if reply.problem:
            raise Conflict(f"the rows of {ask.name} cannot be listed: {reply.problem}")
        if reply.count is None:
            raise NotFound(f"the environment of job {job}, {ask.name}, {ENDLESS}")
        return reply

    async def _prompts(self, job: str, ask: EnvRows, page: Sequence[int], first: EnvRowsReply) -> list[Any]:
        """Return the rows of a page with their prompts, of which a reply may have a part only."""
        found = {row.number: row for row in first.rows}
        while missing := [number for number in page if number not in found]:
            reply = await self._asked(job, msgspec.structs.replace(ask, tools=[], numbers=missing))
            if not reply.rows:
                raise Conflict(f"the rows of {ask.name} have changed: ask again")
            found |= {row.number: row for row in reply.rows}
        return [found[number] for number in page]

    # --- rows of a file, and both --------------------------------------------------------------------------------

    async def _of_file(self, tenant: str, spec: JobSpec, wanted: RowsQuery) -> dict[str, Any]:
        """Raises SpecError for orders and filters by how rows were played, Conflict if they cannot be read."""
        assert spec.data is not None
        if wanted.is_of_counts or wanted.sort != "row":
            bounds = [one.name for name, one in BOUNDS.items() if getattr(wanted.solved, name) is not None]
            field = "sort" if wanted.sort != "row" else bounds[0]
            raise SpecError.of(field, None, f"does not apply to a job of kind {spec.kind}: it plays no row")
        file = FileRows(
            kind=spec.kind,
            data=spec.data.model_dump(mode="json"),
            text=wanted.text,
            offset=wanted.offset,
            limit=wanted.limit,
        )
        found = await self._rendered(tenant, spec, file=file)
        searched = found.searched if wanted.text else found.count
        answer = _answer(found, PlayedRows([], np.empty((0, FIELDS))), found.found, found.count, searched)
        return answer | {"source": spec.data.path, "solved_at": None}

    async def _rendered(self, tenant: str, spec: JobSpec, **what: Any) -> RenderedRows:
        """`what`: fields of RowsToRender that say which rows. Raises Conflict."""
        asked = RowsToRender(
            base=spec.model.base,
            chat_template=spec.model.chat_template,
            special_tokens=spec.model.special_tokens_in_content,
            **what,
        )
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._renders:
            found = await asyncio.to_thread(render, asked)
        if found.problem:
            raise Conflict(found.problem)
        return found


def _answer(found: RenderedRows, played: PlayedRows, total: int, count: int, searched: int) -> dict[str, Any]:
    shown = [(row.number, msgspec.to_builtins(row)) for row in found.rows]
    return {
        "rows": [{"row": row.pop("number"), **row, **played.shown(number)} for number, row in shown],
        "total": total,
        "count": count,
        "searched": searched,
        "played": len(played.rows),
        "first_step": played.first_step,
        "note": found.note,
    }
