"""Lets pages of other sites that the operator has named (`http_origins`) use the API with a key.

    preflight  the middleware before the limits: consumes a browser's question whether such a page may ask; answers it
    allow      a response is about to go out: says so there too

Other pages get no CORS headers, so browsers withhold our answers from them. A page has only the rights of the key that
a user gave it: sessions by cookie are for the page of this server alone (`login/cookies.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiohttp import web

from opentinker.services.scheduler.http.errors import Handler
from opentinker.services.scheduler.http.route_decorator import Route

TAKEN = (
    "Authorization, Content-Digest, Content-Type, Idempotency-Key, If-Range, Last-Event-ID, Range, "
    "traceparent, tracestate"
)
SHOWN = "Content-Digest, Content-Range, ETag, Location, Retry-After, X-OpenTinker-Auth"
KNOWN_S = 600
"""Time for which browsers cache the answer to a preflight."""


class CrossOrigin:
    def __init__(self, origins: Collection[str], routes: Sequence[Route]) -> None:
        self._origins = {_as_sent(origin) for origin in origins}
        self._methods = ", ".join(sorted({route.method for route in routes}))

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or request.headers.get("Origin") not in self._origins:
            return await handler(request)
        headers = {"Methods": self._methods, "Headers": TAKEN}
        response = web.Response(status=204, headers={f"Access-Control-Allow-{n}": text for n, text in headers.items()})
        response.headers["Access-Control-Max-Age"] = str(KNOWN_S)
        return response

    async def allow(self, request: web.Request, response: web.StreamResponse) -> None:
        if not self._origins:
            return
        response.headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = SHOWN


def _as_sent(origin: str) -> str:
    """Browsers leave out the port that a scheme has anyway."""
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")
