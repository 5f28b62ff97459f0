"""A small OpenID provider on loopback, with real RS256 keys. It signs in whomever a test says, and lies where told to.

Provider.user     claims of who signs in next; `refuse` sends the browser back with an error instead
Provider.lie      changes claims, header or answer just before they are signed or sent
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from joserfc import jwk, jwt

from tests.support.http_server import http_server

CLIENT, SECRET = "opentinker-test", "a-client-secret-of-tests-which-is-long"
ADA: dict[str, Any] = {
    "sub": "248289761001", "email": "ada@lab.example", "email_verified": True, "groups": ["staff", "ml-team"],
}  # fmt: skip


def _nothing(_: dict[str, Any]) -> None:
    """Tell the truth."""


@dataclass
class Provider:
    issuer: str = ""
    user: dict[str, Any] = field(default_factory=lambda: dict(ADA))
    refuse: str = ""
    lie: Callable[[dict[str, Any]], None] = _nothing
    """Of the claims."""
    signed_with: Any = None
    """Another key than the listed one."""
    header: dict[str, Any] = field(default_factory=dict)
    userinfo: dict[str, Any] | None = None
    answer: web.Response | None = None
    """Of the token endpoint, instead of its own."""
    asked: list[dict[str, str]] = field(default_factory=list)
    """Parameters of authorization requests."""
    fetched: list[str] = field(default_factory=list)
    """Paths that the scheduler asked for."""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = [new_signing_key()]

    def rotate(self) -> None:
        """From now on only a new key is used and listed."""
        self.keys = [new_signing_key()]

    async def discovery(self, request: web.Request) -> web.Response:
        self.fetched.append(request.path)
        at = {
            name: f"{self.issuer}/{name.partition('_')[0]}"
            for name in ("authorization_endpoint", "token_endpoint", "userinfo_endpoint", "jwks_uri")
        }
        return web.json_response({"issuer": self.issuer, **at})

    async def jwks(self, request: web.Request) -> web.Response:
        self.fetched.append(request.path)
        return web.json_response({"keys": [key.as_dict(private=False) | {"use": "sig"} for key in self.keys]})

    async def authorization(self, request: web.Request) -> web.Response:
        """The user has signed in already: the browser is sent back at once."""
        asked = dict(request.query)
        self.asked.append(asked)
        assert asked["response_type"] == "code" and asked["client_id"] == CLIENT
        assert asked["code_challenge_method"] == "S256" and "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked
        back = {"error": self.refuse} if self.refuse else {"code": code}
        raise web.HTTPFound(f"{asked['redirect_uri']}?{urlencode({**back, 'state': asked['state']})}")

    async def token(self, request: web.Request) -> web.Response:
        self.fetched.append(request.path)
        if self.answer is not None:
            return self.answer
        form = await request.post()
        login = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if request.headers.get("Authorization") != login:
            return web.json_response({"error": "invalid_client"}, status=401)
        asked = self.codes.pop(str(form["code"]), None)
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if asked is None or asked["code_challenge"] != challenge or asked["redirect_uri"] != form["redirect_uri"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        access = secrets.token_urlsafe(16)
        return web.json_response({"access_token": access, "token_type": "Bearer", "id_token": self.signed(asked)})

    def signed(self, asked: dict[str, str]) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"], **self.user}
        self.lie(claims)
        key = self.signed_with or self.keys[0]
        header = {"alg": "RS256", "kid": self.keys[0].kid, **self.header}
        return str(jwt.encode(header, claims, key, [header["alg"]]))

    async def user_information(self, request: web.Request) -> web.Response:
        self.fetched.append(request.path)
        assert request.headers["Authorization"].startswith("Bearer ")
        return web.json_response(self.userinfo or {"sub": self.user["sub"]})

    async def slow(self, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()


def new_signing_key() -> Any:
    return jwk.RSAKey.generate_key(2048, auto_kid=True)


@asynccontextmanager
async def oidc_provider() -> AsyncIterator[Provider]:
    provider = Provider()
    routes = (
        web.get("/.well-known/openid-configuration", provider.discovery),
        web.get("/jwks", provider.jwks),
        web.get("/authorization", provider.authorization),
        web.post("/token", provider.token),
        web.get("/userinfo", provider.user_information),
        web.post("/slow", provider.slow),
    )
    async with http_server(*routes) as provider.issuer:
        yield provider
