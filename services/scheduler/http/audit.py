"""Writes the audit log: records who did what to which object before the answer is sent.

record   consumes actions of handlers; woken by them; several requests share one write to the disk
watch    the outermost middleware: writes a line for every route that changes something or returns weights, with any
         outcome, and, rate-limited, for requests that were refused

A line that cannot be written (a full disk) is in the service's log instead, and counted: what was done was done.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import Counter

from opentinker.services.scheduler.http.auth import ACTION, FAILED, PRINCIPAL, TOUCHED, borne_by
from opentinker.services.scheduler.http.errors import Handler
from opentinker.services.scheduler.http.rate_limit import TokenBuckets
from opentinker.services.scheduler.http.route_decorator import route_of
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.audit_log import AuditFile, folder
from opentinker.shared.security.authorization import Action
from opentinker.shared.security.key_text import parse

log = structlog.get_logger()
LINES = Counter("opentinker_audit_lines", "Lines of the audit log", ["written"], registry=REGISTRY)
for _written in ("yes", "no"):
    LINES.labels(_written)  # from zero on: Prometheus sees no rate in a series that begins with its first event

WATCHED = {action for action in Action if action.endswith(":write")}
WATCHED |= {Action.CHECKPOINTS_READ, Action.ENVIRONMENTS_SERVE}
REFUSED = (401, 403)
REFUSALS_PER_S, REFUSALS_BURST = 5.0, 100.0
"""Beyond, refused requests are counted, and the count stands in the next line of one."""


class Audit:
    def __init__(self, ctx: Context) -> None:
        self._file = AuditFile(folder(ctx.settings.data_dir), ctx.worker)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._refusals = TokenBuckets(REFUSALS_PER_S, REFUSALS_BURST)
        self._uncounted = 0

    async def record(self, entry: dict[str, Any]) -> None:
        """Returns when the line is on the disk, or could not be brought there."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(({"time": round(time.time(), 3), **entry}, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(done)

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            entries = [entry for entry, _ in batch]
            try:
                await asyncio.to_thread(self._file.append, entries)
                LINES.labels("yes").inc(len(batch))
            except (OSError, ValueError, KeyError) as error:  # a full disk; a file that somebody has spoilt
                LINES.labels("no").inc(len(batch))
                log.error("audit_write_failed", error=str(error) or type(error).__name__, lines=entries)
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        action = None if route is None else route.action
        watched = route is not None and not route.frequent and (action in WATCHED or route.audited)
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            if watched:
                await self.record(self._line(request, action, "cut off"))
            raise
        if action is Action.FREE and (FAILED in request or response.status >= 400):  # anyone can send as many
            watched = False
        refused = response.status in REFUSED or FAILED in request
        if watched or (refused and self._counts()):
            entry = self._line(request, action, response.status)
            if made := response.headers.get("Location"):
                entry["made"] = made
            if job := request.get(TOUCHED):
                entry["job"] = job
            if failed := request.get(FAILED):
                entry["failed"] = failed
            if self._uncounted and refused:
                entry["more_refused"], self._uncounted = self._uncounted, 0
            await self.record(entry)
        return response

    @web.middleware
    async def begins(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Behind the gate: what is answered for long has a line before it begins, too."""
        action = request.get(ACTION)
        if action in WATCHED and request.method == "GET":
            await self.record(self._line(request, action, "begins"))
        return await handler(request)

    def _counts(self) -> bool:
        if self._refusals.take("", time.monotonic()):
            self._uncounted += 1
            return False
        return True

    def _line(self, request: web.Request, action: Action | None, result: int | str) -> dict[str, Any]:
        principal = request.get(PRINCIPAL)
        entry: dict[str, Any] = {"action": None if action is None else action.value, "result": result}
        if principal is not None:
            entry |= {"tenant": principal.tenant, "role": principal.role.value, "key": principal.key}
            entry |= {name: text for name in ("user", "session") if (text := getattr(principal, name))}
        else:
            claimed = parse(borne_by(request).partition(" ")[2].strip())
            entry |= {"claimed_key": "" if claimed is None else claimed[1]}
        entry |= {"from": request.remote or "", "method": request.method, "path": request.path[:300]}
        return entry | ({"name": request.query["name"][:100]} if "name" in request.query else {})
