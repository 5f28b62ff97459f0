"""Cookies of the page, and the proofs that a request with one was written by the page and by no other site's.

A browser adds cookies to requests that any site has caused, so a request that is authenticated by a cookie must come
from a page of this server (`Origin`, `Sec-Fetch-Site`), and one that changes something must also bear the session's
CSRF token, which only such a page can read. Requests with an API key need neither: no browser adds a key by itself.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

from opentinker.shared.config import Settings
from opentinker.shared.state.sessions import csrf_token, session_id

SESSION, LOGIN = "opentinker-session", "opentinker-login"
HOST = "__Host-"
"""Browsers accept a cookie of such a name only with Secure, for all paths, and for this host alone."""
CSRF = "X-CSRF-Token"
SAFE = ("GET", "HEAD", "OPTIONS")


class Cookies:
    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.public_url)
        self._public = _without_port(f"{parts.scheme}://{parts.netloc}") if settings.public_url else ""

    def session(self, request: web.Request) -> str:
        """Return the session's token in a request; empty without one, or if the request has a key."""
        token = "" if "Authorization" in request.headers else self.read(request, SESSION)
        return token if session_id(token) else ""

    def read(self, request: web.Request, name: str) -> str:
        """Return a cookie's value. A site below the same domain could set the one without `__Host-`: where the page is
        opened by https it is not read."""
        own = f"{HOST}{_named(request, name)}"
        if own in request.cookies or self._public == f"https://{_without_port(request.headers.get('Host', ''))}":
            return request.cookies.get(own, "")
        return request.cookies.get(_named(request, name), "")

    def write(self, request: web.Request, response: web.Response, name: str, value: str, max_age_s: float) -> None:
        """Set a cookie that pages cannot read."""
        origin = request.headers.get("Origin") or self._public
        secure = origin.startswith("https://")
        response.set_cookie(
            f"{HOST if secure else ''}{_named(request, name)}",
            value,
            max_age=int(max_age_s),
            httponly=True,
            secure=secure,
            samesite="Lax",
        )

    def remove(self, request: web.Request, response: web.Response, name: str) -> None:
        for prefix in ("", HOST):
            response.del_cookie(f"{prefix}{_named(request, name)}", httponly=True, secure=bool(prefix), samesite="Lax")

    def refuse_other_sites(self, request: web.Request) -> None:
        """Raise HTTPForbidden for a request that a page of another site has caused."""
        origin, host = request.headers.get("Origin"), _without_port(request.headers.get("Host", ""))
        own = {f"http://{host}", f"https://{host}", self._public}
        if origin is not None and _without_port(origin) not in own:
            raise web.HTTPForbidden(
                text=f"a page of {origin[:200]} sent this request with a cookie of {host}; if that is the address of "
                "a proxy in front of this server, the operator must set public_url"
            )
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise web.HTTPForbidden(text="a page of another site caused this request: a session is for this page alone")

    def refuse_forged(self, request: web.Request, token: str) -> None:
        """Raise HTTPForbidden for a request of this session that no page of ours has written."""
        self.refuse_other_sites(request)
        if request.method in SAFE and "Upgrade" not in request.headers:
            return
        shown = request.headers.get(CSRF)
        if shown is None:
            raise web.HTTPForbidden(text=f"the header {CSRF} is missing: GET /v1/login has its value")
        if not hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), csrf_token(token).encode()):
            raise web.HTTPForbidden(text=f"{CSRF} is not that of this session; load the page again")


def _named(request: web.Request, name: str) -> str:
    """The name of a cookie. Cookies belong to all ports of a host: servers on several of them must not share one."""
    port = request.headers.get("Host", "").rpartition(":")[2]
    return f"{name}-{port}" if port.isdigit() else name


def _without_port(address: str) -> str:
    """Browsers leave out the port that a scheme has anyway."""
    return address.removesuffix(":80" if address.startswith("http:") else ":443")
