"""The dashboard, as browsers get it: one page at `/`, the HTTP API at `/docs`, and what both load below `/page/`.

    dashboard/ --make dashboard--> services/scheduler/page/ --index, part--> a browser, a client of the API like others

The page has only the rights of its user's key, and its policy allows it to load from and connect to only this server
and the message server: no foreign script can run in it, regardless of the contents of names and transcripts.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from aiohttp import web

from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.services.scheduler.streams.credentials_api import reached_by
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import NotFound

HOME = Path(__file__).resolve().parents[1] / "page"
INDEX, DOCS = "index.html", "docs.html"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PART = re.compile(r"[A-Za-z0-9_-]+(-[A-Za-z0-9_-]{8})?\.(css|js|svg)")
FOR_EVER = "public, max-age=31536000, immutable"
"""Cache header of files whose names contain a hash of their content."""
HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>OpenTinker</title>
<h1>The dashboard is not built</h1>
<p>In a checkout of OpenTinker, <code>make dashboard</code> builds it; then load this page again. Wheels contain it.</p>
<p>The API works without it: <a href="/openapi.json">/openapi.json</a>, <code>opentinker status</code>.</p>
</html>
"""


class Page:
    def __init__(self, streams: str = "", home: Path = HOME) -> None:
        """`streams`: nats_websocket_url."""
        self._home, self._streams = home, streams

    @Route("GET", "/", Action.FREE, content="text/html")
    async def index(self, request: web.Request) -> web.Response:
        """The dashboard.

        Return the page; if it is not built, a page that explains how to build it."""
        return await self._html(INDEX, self._policy(request.url.host or ""))

    @Route("GET", "/docs", Action.FREE, content="text/html")
    async def docs(self, _: web.Request) -> web.Response:
        """The HTTP API as Swagger UI shows it, with the key of the tab."""
        return await self._html(DOCS, "; ".join([*POLICY, "connect-src 'self'"]).replace("blob:", "data:"))

    async def _html(self, name: str, policy: str) -> web.Response:
        try:
            text = await asyncio.to_thread((self._home / name).read_text)
        except FileNotFoundError:
            text = NOT_BUILT
        response = web.Response(text=text, content_type="text/html", headers=HEADERS)
        response.headers["Content-Security-Policy"] = policy
        response.headers["Cache-Control"] = "no-cache"
        response.enable_compression()
        return response

    @Route("GET", "/page/{name}", Action.FREE, content="text/javascript")
    async def part(self, request: web.Request) -> web.Response:
        """A script or style sheet of the dashboard."""
        name = request.match_info["name"]
        if not _PART.fullmatch(name):
            raise NotFound(f"the page has no {name[:100]!r}")
        try:
            body = await asyncio.to_thread((self._home / name).read_bytes)
        except FileNotFoundError:
            raise NotFound(f"the page has no {name[:100]!r}; reload the page: it was rebuilt") from None
        suffix = Path(name).suffix
        response = web.Response(body=body, content_type=TYPES[suffix], charset="utf-8", headers=HEADERS)
        response.headers["Cache-Control"] = "no-cache" if suffix == ".svg" else FOR_EVER
        response.enable_compression()
        return response

    def _policy(self, host: str) -> str:
        reached = ["'self'", *([reached_by(self._streams, host)] if self._streams else [])]
        return "; ".join([*POLICY, f"connect-src {' '.join(reached)}"])
