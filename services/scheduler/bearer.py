"""Who may ask: whoever bears the operator's token. Without one the API listens on this machine alone (`config.py`), and
answers programs there, but no web page that a browser on it happens to show."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from opentinker.services.scheduler.problems import Handler
from opentinker.shared.config import LOOPBACK_HOSTS
from opentinker.shared.errors import SpecError

_TOKEN = re.compile(r"[!-~]{24,512}")


def read_token(path: Path) -> str:
    """Raises SpecError."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([{"field": "api_token_file", "value": str(path), "problem": str(error)}]) from None
    if not _TOKEN.fullmatch(token):
        problem = "must hold 24 to 512 printable characters without spaces, e.g. of: openssl rand -hex 32"
        raise SpecError([{"field": "api_token_file", "value": str(path), "problem": problem}])
    return token


class Bearer:
    """`free`: paths that answer everybody."""

    def __init__(self, token: str, free: frozenset[str]) -> None:
        self._digest = _digest(token)
        self._free = free

    @web.middleware
    async def asks(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises HTTPUnauthorized, also for paths that do not exist."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(_digest(token.strip()), self._digest)
        if not known and request.path not in self._free:
            wrong = "this is not the server's token" if token else "the server asks for its token"
            raise web.HTTPUnauthorized(text=f"{wrong}: OPENTINKER_TOKEN, or a file by OPENTINKER_TOKEN_FILE")
        return await handler(request)


@web.middleware
async def no_page(request: web.Request, handler: Handler) -> web.StreamResponse:
    """For a server without a token. A page of another site may send requests here, under its own name (Origin) or, if
    that name leads here, as if it were us (Host)."""
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
    if host and _name_of(host) not in LOOPBACK_HOSTS:
        names = ", ".join(LOOPBACK_HOSTS)
        raise web.HTTPForbidden(text=f"this server has no token (api_token_file), and answers to {names} alone")
    if origin is not None and origin != f"http://{host}":
        raise web.HTTPForbidden(text="this server has no token, and answers no pages of others")
    return await handler(request)


def _name_of(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
