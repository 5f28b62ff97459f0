"""Who may ask: whoever bears the operator's token. Without one the API listens on this machine alone (`config.py`)."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from aiohttp import web

from opentinker.services.scheduler.problems import Handler
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


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
