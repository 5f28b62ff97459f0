"""Handlers of sessions, and of what clients ask before they begin: flags, capabilities, their own key.

heartbeats   consumes them; keeps the session alive
telemetry    is accepted and dropped
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from opentinker.services.scheduler.http.auth import principal_of, tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Integer, Parameter, Route
from opentinker.services.scheduler.tinker.access import Access, base_of, context_of, shown_base
from opentinker.services.scheduler.tinker.bodies import (
    MIDDLE,
    FinishBody,
    SearchBody,
    SessionBody,
    SessionId,
    metadata_of,
    read_body,
    read_raw,
    text_of,
)
from opentinker.services.scheduler.tinker.endings import Endings
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import NotFound, SpecError
from opentinker.shared.types.tinker import TinkerSession

JSON = "application/json"
CHUNK_BYTES = 5_000_000
"""Largest chunk of a forward_backward: the message that carries it must fit NATS's max_payload, 8 MB."""
FLAGS: dict[str, Any] = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
    "sample_max_concurrent_requests": 512,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
}
"""Each sample that a client waits for holds a connection, and the server has 1024 for one address. The command
line of 0.38 is aborted at its end now and then by its default transport: 2 runs of 25 with it, none of 25 without."""
DYNAMIC_FLAGS: dict[str, Any] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
UNEMBED = "Adapters leave the output layer as it is (train_unembed); they train attention and MLP layers."
OLDEST_SDK = (0, 13)
FINISHED = {"success", "errored", "interrupted"}
DETAIL = 2000
"""Characters of the explanation of how a session ended."""

SEARCHED, SEARCHED_AT_ONCE = 2000, 200
"""Sessions that one search looks at, and that are read at a time; then the client asks for more with the cursor."""
LIMIT = Integer("limit", "Entries of the answer.", default=20, low=1, high=1000)
OFFSET = Integer("offset", "Entries that are left out, the newest.", default=0, low=0, high=10**9)
SCOPE = Parameter("access_scope", "Ignored: what the key's tenant owns is listed.")
PROJECT = Parameter("project_id", "Refused: models and checkpoints have no projects.")


class TinkerSessionsApi:
    def __init__(self, access: Access, endings: Endings) -> None:
        self._access, self._store, self._endings = access, access.store, endings

    @Route("GET", "/api/v1/healthz", Action.FREE)
    async def healthz(self, _: web.Request) -> web.Response:
        """Liveness check (Tinker)."""
        return json_response({"status": "ok"})

    @Route("POST", "/api/v1/client/config", Action.ABOUT, takes=JSON)
    async def config(self, _: web.Request) -> web.Response:
        """Get the flags of a client (Tinker)."""
        return json_response(FLAGS)

    @Route("POST", "/api/v1/client/dynamic_config", Action.ABOUT, takes=JSON)
    async def dynamic_config(self, _: web.Request) -> web.Response:
        """Get the flags that a client asks for again and again (Tinker)."""
        return json_response(DYNAMIC_FLAGS)

    @Route("POST", "/api/v1/telemetry", Action.ABOUT, takes=JSON)
    async def telemetry(self, request: web.Request) -> web.Response:
        """Accept a client's telemetry and drop it (Tinker)."""
        await read_raw(request, MIDDLE)
        return json_response({"status": "accepted"})

    @Route("GET", "/api/v1/get_server_capabilities", Action.JOBS_READ)
    async def capabilities(self, request: web.Request) -> web.Response:
        """List the base models that the key's tenant can train and sample (Tinker)."""
        lengths = {shown_base(base_of(job)): context_of(job) for job in reversed(await self._access.servers(request))}
        models = [
            {"model_name": base, "max_context_length": length, "trainable": True, "sampleable": True}
            for base, length in sorted(lengths.items())
        ]
        return json_response({"supported_models": models})

    @Route("GET", "/api/v1/auth/apikey/me", Action.ABOUT)
    async def own_key(self, request: web.Request) -> web.Response:
        """Describe the key of the request (Tinker)."""
        who = principal_of(request)
        number = int.from_bytes(hashlib.sha256(who.name.encode()).digest()[:6], "big")
        details = {"org_details": {"name": who.tenant}, "user_details": {"email": who.user or who.key}}
        note = f"role {who.role}, tenant {who.tenant}"
        return json_response({"key_id": number, "name": who.name or "no key", "note": note, "details": details})

    # --- sessions ---------------------------------------------------------------------------------------------------

    @Route("POST", "/api/v1/create_session", Action.JOBS_WRITE, takes=JSON)
    async def create_session(self, request: web.Request) -> web.Response:
        """Open a session (Tinker)."""
        body = await read_body(request, SessionBody)
        if len(body.tags) > 64:
            raise SpecError.of("tags", None, "has more than 64 entries")
        session = TinkerSession(
            id=_new_id(request),
            tenant=tenant_of(request),
            created=time.time(),
            sdk_version=_sdk_version(body.sdk_version),
            tags=[text_of("tags", tag) for tag in body.tags],
            metadata=metadata_of(body.user_metadata),
            project=text_of("project_id", body.project_id),
            name=text_of("display_name", body.display_name),
            key=principal_of(request).name,
        )
        await self._endings.with_room(session.tenant, partial(self._store.open_session, session))
        return json_response({"type": "create_session", "session_id": session.id, "warning_message": UNEMBED})

    @Route("POST", "/api/v1/session_heartbeat", Action.JOBS_WRITE, takes=JSON, frequent=True)
    async def heartbeat(self, request: web.Request) -> web.Response:
        """Keep a session alive (Tinker)."""
        body = await read_body(request, SessionId)
        try:
            session = await self._access.session(request, body.session_id)
        except NotFound as error:  # the client sends no more of them
            raise web.HTTPGone(text=str(error)) from None
        if not await self._store.beat(session.id):
            raise web.HTTPGone(text=f"session {session.id} has ended")
        return json_response({"type": "session_heartbeat"})

    @Route("POST", "/api/v1/sessions/{id}/finish", Action.JOBS_WRITE, takes=JSON)
    async def finish(self, request: web.Request) -> web.Response:
        """Note how a session ended (Tinker)."""
        session = await self._access.session(request, request.match_info["id"])
        body = await read_body(request, FinishBody)
        if body.reason.get("type") not in FINISHED:
            raise SpecError.of("reason.type", None, f"must be one of {', '.join(sorted(FINISHED))}")
        how = {"type": body.reason["type"], "detail": _detail(body.detail or "")}
        await self._store.finish(session.id, msgspec.json.encode(how).decode())
        return json_response({})

    @Route("GET", "/api/v1/sessions", Action.JOBS_READ, parameters=(LIMIT, OFFSET, SCOPE))
    async def sessions(self, request: web.Request) -> web.Response:
        """List the tenant's sessions, the newest first (Tinker)."""
        ids = await self._store.session_ids(tenant_of(request), OFFSET.read(request), LIMIT.read(request))
        return json_response({"sessions": ids})

    @Route("GET", "/api/v1/sessions/{id}", Action.JOBS_READ, parameters=(SCOPE,))
    async def session(self, request: web.Request) -> web.Response:
        """Get a session with its models and samplers (Tinker)."""
        session = await self._access.session(request, request.match_info["id"])
        return json_response(
            {
                "training_run_ids": await self._store.models_in(session.id),
                "sampler_ids": await self._store.samplers_in(session.id),
                "user_metadata": session.metadata or None,
                "display_name": session.name or None,
            }
        )

    @Route("POST", "/api/v1/sessions/search", Action.JOBS_READ, takes=JSON)
    async def search(self, request: web.Request) -> web.Response:
        """Search the tenant's sessions, the newest first (Tinker)."""
        body = await read_body(request, SearchBody)
        if not 1 <= body.limit <= 200:
            raise SpecError.of("limit", body.limit, "must be 1 to 200")
        page, last, is_end = await self._found(tenant_of(request), body)
        more = {"last_created_at": when(last.created), "last_session_id": last.id} if last and not is_end else None
        return json_response({"sessions": [await self._summary(one) for one in page], "next_cursor": more})

    async def _found(self, tenant: str, body: SearchBody) -> tuple[list[TinkerSession], TinkerSession | None, bool]:
        """Return sessions that fit, the last one that was looked at, and whether it is the tenant's last."""
        page: list[TinkerSession] = []
        if body.session_id and not (body.display_name or "").split():
            with contextlib.suppress(NotFound):
                page = [await self._store.session(tenant, body.session_id)]
            return [one for one in page if _fits(one, body)], None, True
        last = "" if body.cursor is None else body.cursor.last_session_id
        created = _time_of(body.cursor.last_created_at) if body.cursor and body.cursor.last_created_at else 0.0
        seen: TinkerSession | None = None
        for _ in range(SEARCHED // SEARCHED_AT_ONCE):
            some = await self._store.sessions_after(tenant, last, created, SEARCHED_AT_ONCE)
            for at, one in enumerate(some):
                seen, last, created = one, one.id, one.created
                if _fits(one, body):
                    page.append(one)
                if len(page) == body.limit:
                    is_end = at + 1 == len(some) and not await self._store.sessions_after(tenant, last, created, 1)
                    return page, seen, is_end
            if len(some) < SEARCHED_AT_ONCE:
                return page, seen, True
        return page, seen, False

    async def _summary(self, session: TinkerSession) -> dict[str, Any]:
        models = await self._store.models_in(session.id)
        saved = [one for model in models for one in await self._store.checkpoints(model)]
        ended = await self._store.finished(session.id)
        status: dict[str, Any] | None = {"type": "active"} if await self._store.is_alive(session.id) else None
        if ended:
            how = msgspec.json.decode(ended)
            status = {"type": "client_finished", "reason": {"type": how["type"]}, "detail": how["detail"] or None}
        return {
            "session_id": session.id,
            "created_at": when(session.created),
            "owner": session.key or session.tenant,
            "project_id": session.project,
            "status": status,
            "checkpoints_count": len(saved),
            "display_name": session.name or None,
            "user_metadata": session.metadata or None,
            "checkpoint_storage_bytes": sum(one.size for one in saved),
        }


def refuse_project(request: web.Request) -> None:
    """Raises SpecError for a request that would list what is of one project alone."""
    if PROJECT.name in request.query:
        raise SpecError.of(PROJECT.name, request.query[PROJECT.name][:100], "is not served: leave it out")


def _detail(text: str) -> str:
    """Return a client's explanation, such as a traceback, within DETAIL characters: its beginning and its end, without
    what cannot be shown."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)
    return shown if len(shown) <= DETAIL else f"{shown[: DETAIL // 2 - 1]}…{shown[-DETAIL // 2 :]}"


def _sdk_version(text: str) -> str:
    """Return the version of a client. Raises SpecError for the SDK before 0.13; other clients may name none."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", text)
    if found and (int(found[1]), int(found[2])) < OLDEST_SDK:
        raise SpecError.of("sdk_version", text[:64], "is not served; use tinker 0.13 or newer (pip install -U tinker)")
    return text_of("sdk_version", text, 64)


def when(at: float) -> str:
    """Return a Unix time as clients read it."""
    return datetime.fromtimestamp(at, UTC).isoformat()


def _time_of(text: str) -> float:
    """Return the Unix time that `when` wrote. Raises SpecError."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise SpecError.of("cursor.last_created_at", text[:100], "must be a time, as it was in next_cursor") from None


def _new_id(request: web.Request) -> str:
    """Return the id of a session; a repeated request gets the same one."""
    key = request.headers.get("X-Idempotency-Key", "")
    text = f"{tenant_of(request)}\n{principal_of(request).name}\n{key or time.time_ns()}"
    return "s-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def _fits(session: TinkerSession, wanted: SearchBody) -> bool:
    words = (wanted.display_name or "").lower().split()
    named = bool(words) and all(word in session.name.lower() for word in words)
    if (wanted.session_id or words) and not (named or session.id == wanted.session_id):
        return False
    if wanted.project_ids is not None and session.project not in wanted.project_ids:
        return False
    return wanted.user_metadata.items() <= session.metadata.items()
