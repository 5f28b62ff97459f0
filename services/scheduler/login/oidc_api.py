"""Handlers of signing in through the operator's OpenID provider: the authorization code flow, with PKCE.

    GET /v1/login/oidc            state, nonce and verifier --> Redis; a browser --> the provider
    GET /v1/login/oidc/callback   code --provider.py--> claims --groups--> tenant and role --> a session

A sign-in ends in the browser in which it began: the browser's cookie names the attempt, which is used once. Only
`GET /v1/login` reports a failure, and only to that browser, so no link can put text into the page.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import structlog
from aiohttp import web

from opentinker.services.scheduler.http.auth import FAILED, PRINCIPAL, AuthMiddleware
from opentinker.services.scheduler.http.errors import TooMany
from opentinker.services.scheduler.http.keys import NO_STORE
from opentinker.services.scheduler.http.rate_limit import TokenBuckets
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.login.claims import groups_of, printable, user_of
from opentinker.services.scheduler.login.cookies import LOGIN, SESSION
from opentinker.shared.api_types import LoginProvider
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import SCOPES, Action, Principal
from opentinker.shared.state.logins import ATTEMPT_S, Attempt, LoginStore
from opentinker.shared.state.sessions import SignIn
from opentinker.shared.types.errors import Conflict, OpenTinkerError

if TYPE_CHECKING:
    from opentinker.services.scheduler.login.provider import Provider

log = structlog.get_logger()

BEGIN = "/v1/login/oidc"
LOGINS_PER_S, LOGINS_BURST = 5.0, 50.0
"""Limits for one address."""
SHOWN_GROUPS = 20
"""Groups named to a user without a role."""


class LoginRefused(OpenTinkerError):
    """`str(error)` is for the user."""


class OidcApi:
    def __init__(self, ctx: Context, gate: AuthMiddleware) -> None:
        """Raises SpecError: the provider is set and there is no client secret."""
        self._settings, self._gate = ctx.settings, gate
        self._logins = LoginStore(ctx.store.redis)
        self._rate = TokenBuckets(LOGINS_PER_S, LOGINS_BURST)
        self._provider = _provider(ctx) if ctx.settings.oidc_issuer else None

    @property
    def shown(self) -> LoginProvider | None:
        if self._provider is None:
            return None
        return {"name": self._name, "address": self._settings.public_url.rstrip("/") + BEGIN}

    async def problem(self, request: web.Request) -> str | None:
        """Return why the last sign-in of this browser has failed; only once."""
        cookie = self._gate.cookies.read(request, LOGIN) if self._provider is not None else ""
        return await self._logins.problem(cookie) if cookie else None

    @Route("GET", BEGIN, Action.FREE, status=303)
    async def begin(self, request: web.Request) -> web.Response:
        """Send a browser to the identity provider to sign in."""
        provider = self._asked(request)
        attempt = Attempt(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
        )
        cookie = secrets.token_urlsafe(32)
        try:
            address = await provider.address(state=attempt.state, nonce=attempt.nonce, verifier=attempt.verifier)
            await self._logins.begin(cookie, attempt)
        except OpenTinkerError as error:
            address = await self._failed(request, cookie, self._broken(error))
        response = _sent_to(address)
        self._gate.cookies.write(request, response, LOGIN, cookie, ATTEMPT_S)
        return response

    @Route("GET", f"{BEGIN}/callback", Action.FREE, status=303, audited=True)
    async def callback(self, request: web.Request) -> web.Response:
        """Make a session for a browser that comes back from the identity provider."""
        provider, settings = self._asked(request), self._settings
        cookie = self._gate.cookies.read(request, LOGIN)
        attempt = await self._logins.take(cookie) if cookie else None
        try:
            code, attempt = self._code(request, attempt)
            claims = await self._claims(provider, code, attempt)
            token = await self._session(request, claims)
        except LoginRefused as error:
            cookie = secrets.token_urlsafe(32)
            response = _sent_to(await self._failed(request, cookie, str(error)))
            self._gate.cookies.write(request, response, LOGIN, cookie, ATTEMPT_S)
            return response
        await self._gate.sessions.end_of(self._gate.cookies.read(request, SESSION))
        response = _sent_to(self._page)
        self._gate.cookies.write(request, response, SESSION, token, settings.session_max_s)
        self._gate.cookies.remove(request, response, LOGIN)
        return response

    def _asked(self, request: web.Request) -> Provider:
        """Raises Conflict, TooMany."""
        if self._provider is None:
            raise Conflict(
                "this server has no identity provider: sign in with a key (the operator's setting oidc_issuer)"
            )
        if wait_s := self._rate.take(request.remote or "", time.monotonic()):
            raise TooMany("sign-ins", wait_s)
        return self._provider

    def _code(self, request: web.Request, attempt: Attempt | None) -> tuple[str, Attempt]:
        """Return what the provider gave the browser. Raises LoginRefused."""
        asked = request.query
        if attempt is None or not hmac.compare_digest(asked.get("state", "").encode(), attempt.state.encode()):
            raise LoginRefused(
                "this sign-in was not begun in this browser, was begun again since, or took longer than "
                f"{ATTEMPT_S // 60} minutes; sign in again"
            )
        if asked.get("iss", self._settings.oidc_issuer) != self._settings.oidc_issuer:
            raise LoginRefused("the answer came from another provider than the one that was asked; sign in again")
        if "error" in asked:
            told = ": ".join(asked[name][:200] for name in ("error", "error_description") if name in asked)
            raise LoginRefused(f"{self._name} did not sign you in ({printable(told)})")
        if not 0 < len(code := asked.get("code", "")) <= 4096:
            raise LoginRefused(f"{self._name} sent you back without a code; sign in again")
        return code, attempt

    async def _claims(self, provider: Provider, code: str, attempt: Attempt) -> dict[str, Any]:
        """Raises LoginRefused."""
        from opentinker.services.scheduler.login.provider import ProviderError

        try:
            return await provider.claims(code, nonce=attempt.nonce, verifier=attempt.verifier)
        except ProviderError as error:
            raise LoginRefused(self._broken(error)) from None

    async def _session(self, request: web.Request, claims: Mapping[str, Any]) -> str:
        """Return the token of a new session. Raises LoginRefused: the user has no role here."""
        settings = self._settings
        user, groups = user_of(claims, settings.oidc_user_claim), groups_of(claims, settings.oidc_groups_claim)
        granted = settings.role_of(groups)
        if granted is None:
            raise LoginRefused(self._without_role(user, groups))
        now, own = time.time(), [group for group in groups if group in settings.oidc_groups]
        login = SignIn(
            created=now, expires=now + settings.session_max_s, tenant=granted[0], user=user, subject=claims["sub"],
            issuer=settings.oidc_issuer, groups=own,
        )  # fmt: skip
        token, made = await self._gate.sessions.store.create(login)
        request[PRINCIPAL] = Principal(*granted, "", SCOPES, user=user, session=made.id)
        log.info("signed_in", user=user, subject=claims["sub"], tenant=granted[0], role=granted[1].value)
        return token

    def _without_role(self, user: str, groups: list[str]) -> str:
        shown = ", ".join(printable(group[:100]) for group in groups[:SHOWN_GROUPS])
        more = f" and {len(groups) - SHOWN_GROUPS} more" if len(groups) > SHOWN_GROUPS else ""
        seen = f"your groups are {shown}{more}" if groups else f"{self._name} named none of your groups"
        contact = self._settings.oidc_contact or "the operator of this server"
        return f"{user} is in no group that has a role here: {seen}. Ask {contact}."

    async def _failed(self, request: web.Request, cookie: str, problem: str) -> str:
        """Keep for the browser why it could not sign in; return where it reads that."""
        request[FAILED] = problem
        log.info("sign_in_failed", problem=problem)
        await self._logins.fail(cookie, problem)
        return self._page

    @property
    def _page(self) -> str:
        """The URL of the page, which knows the view that its user has left."""
        return f"{self._settings.public_url.rstrip('/')}/#/"

    def _broken(self, error: Exception) -> str:
        contact = self._settings.oidc_contact or "the operator of this server"
        return f"{self._name} could not be used to sign in: {printable(str(error))}. Ask {contact} if it stays so."

    @property
    def _name(self) -> str:
        return self._settings.oidc_name or str(urlsplit(self._settings.oidc_issuer).hostname)


def _sent_to(address: str) -> web.Response:
    return web.Response(status=303, headers={"Location": quote(address, safe="!#$%&'()*+,/:;=?@[]~"), **NO_STORE})


def _provider(ctx: Context) -> Provider:
    from opentinker.services.scheduler.login.provider import Provider

    return Provider(ctx.settings)
