"""Handlers of sessions: signing in to the page with a key, signing out, and the sessions of a tenant.

    POST /v1/session   a key in Authorization --> a cookie that the page cannot read, and its CSRF token

The page keeps neither the key nor the session's token; a program needs no session, it sends its key.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.http.auth import AuthMiddleware, Shown, may_see, principal_of, secret_of, tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.keys import NO_STORE, OF_TENANT
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.login.cookies import SESSION
from opentinker.services.scheduler.login.identity import Identity, NotIdentified
from opentinker.services.scheduler.login.oidc_api import OidcApi
from opentinker.shared import api_types
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action, outranks
from opentinker.shared.state.sessions import Session, SignIn, csrf_token
from opentinker.shared.types.errors import Conflict, NotFound


class SessionsApi:
    def __init__(self, ctx: Context, gate: AuthMiddleware, oidc: OidcApi) -> None:
        self._settings, self._gate, self._oidc = ctx.settings, gate, oidc

    @Route("GET", "/v1/login", Action.FREE, answer=api_types.Login)
    async def login(self, request: web.Request) -> web.Response:
        """Return how to sign in to the page, and whether this browser is signed in."""
        token, ends = self._gate.cookies.session(request), 0.0
        if token and self._settings.auth:
            self._gate.cookies.refuse_other_sites(request)
            try:
                await self._gate.identified(request, Shown("", token))
                ends = (await self._gate.sessions.identify(token)).expires
            except NotIdentified:
                ends = 0.0
        answer = {
            "auth": "on" if self._settings.auth else "off",
            "csrf": csrf_token(token) if ends else None,
            "expires": ends or None,
            "provider": self._oidc.shown,
            "problem": None if ends else await self._oidc.problem(request),
        }
        return json_response(answer, headers=NO_STORE)

    @Route("POST", "/v1/session", Action.ABOUT, status=201, answer=api_types.SignedIn, audited=True)
    async def sign_in(self, request: web.Request) -> web.Response:
        """Make a session of the page with the API key in `Authorization`.

        It replaces the session that the browser had."""
        asked = principal_of(request)
        if not asked.key or asked.session:
            raise Conflict("a session is made with an API key in `Authorization: Bearer KEY`")
        self._gate.cookies.refuse_other_sites(request)
        now = time.time()
        expires, secret = now + self._settings.session_max_s, secret_of(request)
        login = SignIn(created=now, expires=expires, tenant=asked.tenant, key=asked.key, secret=secret)
        token, made = await self._gate.sessions.store.create(login)
        await self._gate.sessions.end_of(self._gate.cookies.read(request, SESSION))
        ends = made.ends(self._settings.session_idle_s)
        response = json_response({"csrf": csrf_token(token), "expires": ends}, 201, NO_STORE)
        self._gate.cookies.write(request, response, SESSION, token, self._settings.session_max_s)
        return response

    @Route("DELETE", "/v1/session", Action.ABOUT, answer=api_types.SignedOut, audited=True)
    async def sign_out(self, request: web.Request) -> web.Response:
        """End the session by which this is asked."""
        id = principal_of(request).session
        if not id:
            raise Conflict("this request has no session: a key is revoked by POST /v1/keys/ID/revoke")
        await self._gate.sessions.end(await self._gate.sessions.store.found(id))
        response = json_response({"session": id})
        self._gate.cookies.remove(request, response, SESSION)
        return response

    @Route("GET", "/v1/sessions", Action.KEYS_READ, parameters=(OF_TENANT,), answer=api_types.Sessions)
    async def list(self, request: web.Request) -> web.Response:
        """List the sessions of the page."""
        tenant = request.query.get("tenant", tenant_of(request))
        if not may_see(request, tenant):
            raise NotFound(f"no tenant {tenant[:100]!r} whose sessions you may see")
        found = await self._gate.sessions.store.of(tenant)
        live = await self._gate.sessions.several(session.id for session in found)
        return json_response({"sessions": [_shown(request, one, live[one.id]) for one in found if one.id in live]})

    @Route("POST", "/v1/sessions/{id}/revoke", Action.KEYS_WRITE, answer=api_types.SignedOut)
    async def revoke(self, request: web.Request) -> web.Response:
        """End a session of the page; its requests are cut off within a second."""
        id = request.match_info["id"]
        session = await self._gate.sessions.store.found(id)
        if not may_see(request, session.tenant):
            raise NotFound(f"you have no session {id!r}")
        identity = (await self._gate.sessions.several([id])).get(id)
        if identity is not None and not outranks(
            principal_of(request), identity.principal.role, identity.principal.scopes
        ):
            role = identity.principal.role
            raise web.HTTPForbidden(text=f"this session has the role {role}, with rights that you lack")
        await self._gate.sessions.end(session)
        return json_response({"session": id})


def _shown(request: web.Request, session: Session, identity: Identity) -> dict[str, Any]:
    return {
        "id": session.id,
        "tenant": session.tenant,
        "role": identity.principal.role,
        "key": session.key or None,
        "user": session.user or None,
        "created": session.created,
        "last_used": session.used,
        "expires": identity.expires,
        "own": session.id == principal_of(request).session,
    }
