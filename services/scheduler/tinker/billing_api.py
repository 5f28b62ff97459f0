"""Handlers of usage as `tinker billing` asks for it: tokens by hour, session and base, and what checkpoints hold.

There are no prices here, so costs are empty; `opentinker usage` has seconds of workers and what they cost.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Parameter, Route
from opentinker.services.scheduler.tinker.access import Access, shown_base
from opentinker.services.scheduler.tinker.sessions_api import PROJECT, refuse_project, when
from opentinker.shared.security.authorization import Action
from opentinker.shared.state.tinker.billing import HOUR_S, Spent, TinkerSpent
from opentinker.shared.types.errors import SpecError

MAX_HOURS = 14 * 24
MAX_ENTRIES = 20_000
"""Of one answer: a few megabytes."""
GIGABYTE = 10**9
FIRST = Parameter("starting_on", "First hour, such as 2026-11-29T09:00:00Z.")
END = Parameter("ending_before", "Hour after the last one; at most 14 days later.")


class BillingApi:
    def __init__(self, access: Access) -> None:
        self._store, self._spent = access.store, TinkerSpent(access.ctx.store.redis)

    @Route("GET", "/api/v1/billing/usage/events", Action.JOBS_READ, parameters=(FIRST, END))
    async def events(self, request: web.Request) -> web.Response:
        """List what the tenant's requests had, by hour, session and base (Tinker)."""
        first, end = _hour(request, FIRST.name), _hour(request, END.name)
        if not 0 < end - first <= MAX_HOURS:
            problem = f"must be after {FIRST.name}, and at most {MAX_HOURS // 24} days"
            raise SpecError.of(END.name, request.query[END.name][:100], problem)
        tenant = tenant_of(request)
        if (entries := await self._spent.entries(tenant, first, end)) > MAX_ENTRIES:
            problem = f"leaves {entries} entries, and one answer may have {MAX_ENTRIES}; ask for fewer hours at a time"
            raise SpecError.of(END.name, request.query[END.name][:100], problem)
        found = await self._spent.between(tenant, first, end)
        ids = [id for id in dict.fromkeys(one.session for one in found) if id]
        known = {one.id: one.metadata or None for one in await self._store.sessions(tenant, ids)}
        sessions = {id: {"user_metadata": known.get(id)} for id in ids}  # None too where it was removed
        return json_response({"data": [_event(one) for one in found], "sessions": sessions, "cost_data_through": None})

    @Route("GET", "/api/v1/billing/usage/checkpoints/current", Action.JOBS_READ, parameters=(PROJECT,))
    async def checkpoints(self, request: web.Request) -> web.Response:
        """Get the number and bytes of the tenant's checkpoints (Tinker)."""
        refuse_project(request)
        tenant = tenant_of(request)
        size, (_, count) = await self._store.stored_bytes(tenant), await self._store.checkpoint_paths(tenant, 0, 1)
        all_ = {"checkpoint_count": count, "size_bytes": size, "size_gigabytes": size / GIGABYTE}
        return json_response({"data": [all_] if count else []})


def _hour(request: web.Request, name: str) -> int:
    """Return the hour since 1970 of a parameter. Raises SpecError."""
    text = request.query.get(name, "")
    try:
        at = datetime.fromisoformat(text)
        seconds = (at.replace(tzinfo=UTC) if at.tzinfo is None else at).timestamp()
    except (ValueError, OverflowError):
        seconds = -1.0
    if seconds < 0 or seconds % HOUR_S:
        raise SpecError.of(name, text[:100], "must be the beginning of an hour in UTC, such as 2026-11-29T09:00:00Z")
    return int(seconds) // HOUR_S


def _event(spent: Spent) -> dict[str, Any]:
    info: dict[str, Any] = {"type": spent.kind}
    info["count" if spent.kind == "checkpoint" else "token_count"] = spent.amount
    if spent.kind == "sampling_prefill":
        info["cached"] = False
    return {
        "bucket_start": when(spent.hour * HOUR_S),
        "bucket_end": when((spent.hour + 1) * HOUR_S),
        "base_model": shown_base(spent.base),
        "session_id": spent.session,
        "event_info": info,
    }
