"""Authenticates and authorizes every request, by the action that its route declares.

    key in Authorization,  --> Principal --> authorize(principal, the route's action) --> handler --> may_see(object)
    or a session's cookie

A key that no server issued (its form or checksum is wrong, or its env is another) is rejected without a Redis lookup. A
key's record is cached for CACHE_S, so a key that is revoked or expires stops working within a second with any number of
schedulers, and its open requests (event streams, answers, WebSockets) are cut off. So is a session of the page
(`login/identity.py`), whose requests are refused unless the page itself wrote them (`login/cookies.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from redis.exceptions import RedisError

from opentinker.services.scheduler.http.errors import TINKER, Handler, TooMany
from opentinker.services.scheduler.http.rate_limit import TokenBuckets
from opentinker.services.scheduler.http.route_decorator import route_of
from opentinker.services.scheduler.login.cookies import Cookies
from opentinker.services.scheduler.login.identity import NotIdentified, Sessions
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.login_settings import LOOPBACK_HOSTS
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import DEFAULT_TENANT, SCOPES, Action, Principal, Role, Verdict, authorize
from opentinker.shared.security.key_text import digest_of, parse, read_key
from opentinker.shared.state.keys import Key, KeyStore
from opentinker.shared.types.core import split_part
from opentinker.shared.types.errors import NotFound, SpecError

log = structlog.get_logger()

CACHE_S = 0.4
"""With RECHECK_S less than a second."""
RECHECK_S = 0.3
"""How often the keys of open requests are looked at."""
GUESSES_PER_S = 100.0
"""Lookups of keys that were never valid, of one address; a valid key gives its token back."""
MAX_UNKNOWN_LOOKUPS = 4
"""Concurrent lookups of keys that were never valid: guesses wait for other guesses."""
MAX_CACHED = 10_000
PREFIX = "tml-"
"""Before a key in API_KEY: clients of Tinker send no other keys."""
API_KEY = "X-API-Key"
UNAUTHENTICATED = Principal(DEFAULT_TENANT, Role.OPERATOR, "", SCOPES)
"""Whoever asks a server that wants no keys."""
PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)
ACTION: web.RequestKey[Action] = web.RequestKey("action", Action)
TOUCHED: web.RequestKey[str] = web.RequestKey("touched", str)
"""The job that a request was about, where its path does not say so: for the audit log."""
FAILED: web.RequestKey[str] = web.RequestKey("failed", str)
"""Why a sign-in through the identity provider has failed: for the audit log."""


def principal_of(request: web.Request) -> Principal:
    """Return the authenticated caller."""
    return request[PRINCIPAL]


def tenant_of(request: web.Request) -> str:
    """Return the tenant whose objects the request reads or creates."""
    return request[PRINCIPAL].tenant


def secret_of(request: web.Request) -> str:
    """SHA-256 of the key or the session's token that was shown; empty on a server that wants none."""
    shown = request.get(SHOWN)
    return "" if shown is None else digest_of(shown.session or _shown(shown.header)[1])


def may_see(request: web.Request, tenant: str) -> bool:
    """Return whether an object of this tenant is visible for the requester and the requested action."""
    return authorize(request[PRINCIPAL], request[ACTION], tenant) is Verdict.ALLOWED


def borne_by(request: web.Request) -> str:
    """Return the Authorization of a request; Tinker's clients send the key in another header."""
    key = request.headers.get(API_KEY, "") if request.path.startswith(TINKER) else ""
    return f"Bearer {key.removeprefix(PREFIX)}" if key else request.headers.get("Authorization", "")


class Shown(NamedTuple):
    """Credentials of a request."""

    header: str
    """Authorization."""
    session: str
    """The token of a session; empty if there is a key, or neither."""


SHOWN: web.RequestKey[Shown] = web.RequestKey("shown", Shown)


class AuthMiddleware:
    """In front of all routes."""

    def __init__(self, ctx: Context, guesses: TokenBuckets | None = None) -> None:
        """`guesses`: lookups of unknown keys, by address."""
        self._guesses = guesses or TokenBuckets(GUESSES_PER_S, GUESSES_PER_S)
        self._asks = ctx.settings.auth
        self._env = ctx.settings.key_env
        self._keys = KeyStore(ctx.store.redis)
        self.sessions, self.cookies = Sessions(ctx), Cookies(ctx.settings)
        self._cache: dict[str, tuple[Key, float]] = {}
        """By digest: keys that were right, and when."""
        self._unknown_lookups = asyncio.Semaphore(MAX_UNKNOWN_LOOKUPS)
        self._open: dict[asyncio.Task[object], Shown] = {}
        """By the task that answers it: what a request showed."""

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authenticate and authorize a request. Raises HTTPUnauthorized, also for paths that do not exist,
        HTTPForbidden, and, for every caller, NotFound for what the Tinker API does not have."""
        route = route_of(request)
        action = None if route is None else route.action
        if action is None and request.path.startswith(TINKER):
            raise NotFound(f"{request.method} {request.path[:200]} is not served by this server's Tinker API")
        if action is Action.FREE and self._asks:
            return await handler(request)
        shown = Shown(borne_by(request), self.cookies.session(request))
        principal = await self._principal(request, shown)
        if action is None:  # no such path, or not with this method
            return await handler(request)
        if authorize(principal, action) is not Verdict.ALLOWED:
            raise web.HTTPForbidden(text=_refusal(principal, action))
        if principal.jobs and action is not Action.ABOUT:
            _confine(request, principal)
        request[PRINCIPAL], request[ACTION] = principal, action
        if not self._asks:
            return await handler(request)
        if shown.session:
            self.cookies.refuse_forged(request, shown.session)
        request[SHOWN] = shown
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = shown
        try:
            return await handler(request)
        finally:
            self._open.pop(task, None)

    async def _principal(self, request: web.Request, shown: Shown) -> Principal:
        if not self._asks:
            _refuse_pages(request)
            return UNAUTHENTICATED
        try:
            return await self.identified(request, shown)
        except NotIdentified as error:
            raise web.HTTPUnauthorized(text=str(error)) from None

    async def identified(self, request: web.Request, shown: Shown) -> Principal:
        """Return who shows this. Raises NotIdentified, TooMany."""
        address, guess = request.remote or "", self._is_guess(shown)
        if guess and (wait_s := self._guesses.take(address, time.monotonic())):
            raise TooMany("unknown keys", wait_s)
        principal = await self._shown_by(shown)
        if guess:
            self._guesses.give_back(address)
        return principal

    async def _shown_by(self, shown: Shown) -> Principal:
        """Raises NotIdentified."""
        if shown.session:
            return (await self.sessions.identify(shown.session)).principal
        return (await self._key(shown.header)).principal

    def _is_guess(self, shown: Shown) -> bool:
        """Return whether the key has to be looked up and was not valid the last time."""
        if shown.session:
            return not self.sessions.is_known(shown.session, time.time())
        text = _shown(shown.header)[1]
        if not parse(text):
            return False  # refused without a lookup
        found, _ = self._cache.get(digest_of(text), (None, 0.0))
        return found is None or found.state(time.time()) != "live"

    async def _key(self, header: str) -> Key:
        """Raises NotIdentified."""
        scheme, text = _shown(header)
        if scheme != "bearer" or not text:
            raise NotIdentified("API key required")
        parsed = parse(text)
        if parsed is None:
            raise NotIdentified("malformed API key")
        env, id = parsed
        if env != self._env:
            raise NotIdentified(f"this key belongs to deployment {env!r}, and this server is {self._env!r}")
        digest, now, at = digest_of(text), time.time(), time.monotonic()
        found, seen = self._cache.get(digest, (None, 0.0))
        if found is None or at - seen > CACHE_S:
            async with self._unknown_lookups if found is None else contextlib.nullcontext():
                found = await self._keys.find(id)
            self._cache.pop(digest, None)
            if found is None or not found.fits(digest, now):
                raise NotIdentified("unknown API key")
            if found.state(now) == "live":
                await self._keys.note_use(found, now)
            while len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[digest] = (found, at)
        if not found.fits(digest, now):  # its time of grace is over
            raise NotIdentified("this key was rotated; use the new one")
        if (state := found.state(now)) != "live":
            raise NotIdentified("this key was revoked" if state == "revoked" else "this key has expired")
        return found

    async def run(self) -> None:
        """Cut off what keys that are over have open."""
        while True:
            await sleep(RECHECK_S)
            for task, shown in list(self._open.items()):
                try:
                    await self._shown_by(shown)
                except NotIdentified as error:
                    if self._open.get(task) is shown:  # it has not ended since
                        log.info("request_aborted", reason=str(error))
                        del self._open[task]
                        task.cancel()
                except (RedisError, OSError, TimeoutError) as error:  # looked at again in a moment
                    log.warning("keys_unavailable", error=str(error) or type(error).__name__)
                    break


async def register_operator(ctx: Context) -> None:
    """Register the key in `admin_key_file` for an operator. Raises SpecError: without one the server could not be
    used."""
    if not ctx.settings.auth:
        log.warning("auth_off", reason="everyone on this machine is an operator: use it for development only")
        return
    keys, now = KeyStore(ctx.store.redis), time.time()
    operators = [key for key in await keys.of(DEFAULT_TENANT) if key.role is Role.OPERATOR and key.state(now) == "live"]
    file = ctx.settings.admin_key_file
    if file is None:
        if operators:
            return
        problem = "no operator has a key yet: name a file with one, made by `opentinker keys init FILE`"
        raise SpecError.of("admin_key_file", None, problem)
    text = await asyncio.to_thread(read_key, file)
    env, id = parse(text) or ("", "")
    if env != ctx.settings.key_env:
        problem = f"holds a key of {env!r}, and key_env is {ctx.settings.key_env!r}"
        raise SpecError.of("admin_key_file", str(file), problem)
    found = await keys.create(
        text, now=now, tenant=DEFAULT_TENANT, role=Role.OPERATOR, scopes=None, name="admin_key_file", by="file"
    )
    if not found.fits(digest_of(text), now) or found.state(now) != "live":
        log.warning("operator_key_invalid", file=str(file), key=id, hint="revoked or rotated: put another one there")
    else:
        log.info("operator_key", file=str(file), key=id, others=[key.id for key in operators if key.id != id])


async def mark_unauthenticated(_: web.Request, response: web.StreamResponse) -> None:
    """Mark every answer of a server without keys as such."""
    response.headers["X-OpenTinker-Auth"] = "off"


def _shown(header: str) -> tuple[str, str]:
    """Split an Authorization header into scheme, in lower case, and credential."""
    scheme, _, text = header.partition(" ")
    return scheme.lower(), text.strip()


def _confine(request: web.Request, principal: Principal) -> None:
    """Raise HTTPForbidden if a share link is used for anything but its jobs."""
    route = route_of(request)
    job, _ = split_part(request.match_info.get("id", ""))
    if route is None or not re.match(r"/v1/jobs/\{id\}(/|$)", route.path) or job not in principal.jobs:
        shown = ", ".join(sorted(principal.jobs))
        raise web.HTTPForbidden(text=f"this link shows {shown} and nothing else")


def _refusal(principal: Principal, action: Action) -> str:
    who = f"user {principal.user}" if principal.user else "this key"
    return f"{who} (role {principal.role}, tenant {principal.tenant}) may not do this; it needs {action}"


def _refuse_pages(request: web.Request) -> None:
    """Refuse requests of pages of other sites, on a server without keys. Such a page sends requests under its own name
    (Origin) or, if that name resolves to this server, under ours (Host)."""
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
    if host and _name_of(host) not in LOOPBACK_HOSTS:
        names = ", ".join(LOOPBACK_HOSTS)
        raise web.HTTPForbidden(
            text=f"this server requires no key (auth = false) and accepts requests for {names} only"
        )
    if origin is not None and origin != f"http://{host}":
        raise web.HTTPForbidden(
            text="this server requires no key (auth = false) and rejects requests of other sites' pages"
        )


def _name_of(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
