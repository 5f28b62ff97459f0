"""Limits per client of the HTTP server: connections, requests a second, wrong keys a second, time for a body; and
rejection of requests that no honest client sends.

    Buckets  a token bucket per asker (the key that is borne, else the address), kept in this process
    guard    the middleware: consumes requests; refuses those of an empty bucket (429), odd paths (404), compressed
             bodies (415), parameters that a route does not know (422)
    bound    connections: of one address, and of all
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

import structlog
from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import Counter as Total

from opentinker.services.scheduler.http.auth import PRINCIPAL
from opentinker.services.scheduler.http.errors import OPENAI, STARTED, Handler, TooMany
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.config import Settings
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.types.errors import SpecError

log = structlog.get_logger()

BURST_S = 2.0
"""A bucket holds the inflow of this time."""
WRONG_PER_S, WRONG_BURST = 100.0, 100.0
"""Lookups per second of one address for keys that were not just valid. Further ones queue; nothing more is read from
their connections, so a flood of guesses takes hardly any time from other requests."""
MOST_IN_LINE, MOST_IN_LINES = 64, 1024
"""Queued requests of one address, and of all: each holds its data. The next one is answered with 429."""
TRUSTED_S = 60.0
MOST_ASKERS = 20_000
"""The longest unseen are forgotten."""
HEADERS: dict[str, Any] = {"max_line_size": 8190, "max_field_size": 8190, "max_headers": 64}
"""Limits of a request: its first line, each header, their number."""
IDLE_S = 75.0
"""A connection without a request, or without a complete one, is closed after this time."""
SAY_EVERY_S = 10.0
setattr(web_response, "SERVER_SOFTWARE", "opentinker")  # noqa: B010 - aiohttp tells strangers its and Python's version
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")
_MODEL = re.compile(r"/v1/jobs/[^/%]+/v1/models/")


MALFORMED = Total("opentinker_http_malformed", "Requests that are none, answered 400 and closed", registry=REGISTRY)


class ServerLog(logging.Handler):
    """Filter for the log of aiohttp's server. Malformed requests are counted only, because their text is untrusted or
    contains a key."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            MALFORMED.inc()
        else:
            log.error("http_server", said=record.getMessage()[:500], exc_info=error)


def server_log() -> logging.Logger:
    logger = logging.Logger("opentinker.sdk.http", logging.WARNING)
    logger.addHandler(ServerLog())
    return logger


class Buckets:
    def __init__(self, per_s: float, burst: float, most: int = MOST_ASKERS) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Asker -> tokens, and when that was."""

    def wait_s(self, asker: str, now: float) -> float:
        """Until there is a token; 0 if there is one."""
        return max(0.0, (1.0 - self._level(asker, now)) / self._per_s)

    def take(self, asker: str, now: float) -> float:
        """A token, or what `wait_s` says, and then nothing is taken."""
        level = self._level(asker, now)
        enough = level >= 1.0
        self._put(asker, level - 1.0 if enough else level, now)
        return 0.0 if enough else (1.0 - level) / self._per_s

    def owe(self, asker: str, now: float) -> float:
        """Take a token, even if there is none; return the seconds until it is available."""
        level = self._level(asker, now)
        self._put(asker, level - 1.0, now)
        return max(0.0, (1.0 - level) / self._per_s)

    def give_back(self, asker: str) -> None:
        if asker in self._left:
            left, at = self._left[asker]
            self._left[asker] = left + 1.0, at

    def _put(self, asker: str, level: float, now: float) -> None:
        self._left[asker] = (level, now)
        self._left.move_to_end(asker)
        while len(self._left) > self._most:
            self._left.popitem(last=False)

    def _level(self, asker: str, now: float) -> float:
        left, at = self._left.get(asker, (self._burst, now))
        return min(self._burst, left + max(0.0, now - at) * self._per_s)


class RequestLimiter:
    """`free`: paths that are answered at any rate. `known`: (method, route) -> its query parameters."""

    def __init__(self, settings: Settings, free: Collection[str], known: Mapping[tuple[str, str], set[str]]) -> None:
        self._requests = Buckets(settings.http_rate, max(1.0, BURST_S * settings.http_rate))
        self._asks = settings.auth
        self._wrong = Buckets(WRONG_PER_S, WRONG_BURST)
        self._in_line: Counter[str] = Counter()
        self._in_lines = 0
        self._free, self._known = frozenset(free), known
        self._trusted: OrderedDict[str, float] = OrderedDict()
        """Keys (as digests) that were right, and when."""

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_odd(request)
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in self._free:
            return await handler(request)
        now, address, key = time.monotonic(), request.remote or "", _key(request)
        if wait_s := self._requests.take(key or address, now):
            raise TooMany("requests", wait_s)
        stood = self._asks and not self._is_trusted(key, now)
        if stood:
            await self._stand_in_line(request, address)
        try:
            return await self._asked(request, handler)
        except web.HTTPUnauthorized:
            self._trusted.pop(key, None)
            raise
        finally:
            if PRINCIPAL in request:  # the key was looked at, and is right
                if stood:
                    self._wrong.give_back(address)
                if key:
                    self._trust(key, now)

    async def _stand_in_line(self, request: web.Request, address: str) -> None:
        """Queue for a lookup. Raises TooMany, also if the requester has disconnected since."""
        if self._in_line[address] >= MOST_IN_LINE or self._in_lines >= MOST_IN_LINES:
            raise TooMany("wrong keys", self._wrong.wait_s(address, time.monotonic()))
        wait_s = self._wrong.owe(address, time.monotonic())
        if not wait_s:
            return
        self._in_line[address] += 1
        self._in_lines += 1
        try:
            await sleep(wait_s)
        finally:
            self._in_lines -= 1
            self._in_line[address] -= 1
            if not self._in_line[address]:
                del self._in_line[address]
        if request.transport is None:
            raise TooMany("wrong keys", wait_s)
        request[STARTED] = time.monotonic()  # of the answer

    async def _asked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises SpecError for a parameter that the route would not look at."""
        resource = request.match_info.route.resource
        route = (request.method, "" if resource is None else resource.canonical)
        known = self._known.get(route)
        if known is not None and not OPENAI.match(request.path) and (odd := sorted(request.query.keys() - known)):
            raise SpecError([{"field": name[:100], "value": request.query[name][:100], "problem": _unknown(name, known)}
                             for name in odd[:10]])  # fmt: skip
        return await handler(request)

    def _trust(self, key: str, now: float) -> None:
        self._trusted[key] = now
        self._trusted.move_to_end(key)
        while len(self._trusted) > MOST_ASKERS:
            self._trusted.popitem(last=False)

    def _is_trusted(self, key: str, now: float) -> bool:
        return now - self._trusted.get(key, -math.inf) < TRUSTED_S


def bound(server: web.Server, most: int, most_per_address: int) -> None:
    """No more connections than that: one too many is closed before anything of it is read."""
    of_address: Counter[str] = Counter()
    counted: dict[Any, str] = {}
    made, lost, said_at = server.connection_made, server.connection_lost, -math.inf

    def connection_made(handler: Any, transport: asyncio.Transport) -> None:
        nonlocal said_at
        made(handler, transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if len(counted) >= most or of_address[address] >= most_per_address:
            if time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                log.warning("connections_refused", address=address, here=len(counted), of_address=of_address[address])
            transport.abort()
            return
        counted[handler] = address
        of_address[address] += 1

    def connection_lost(handler: Any, exc: BaseException | None = None) -> None:
        lost(handler, exc)
        if (address := counted.pop(handler, None)) is not None:
            of_address[address] -= 1
            if not of_address[address]:
                del of_address[address]

    server.connection_made = connection_made  # type: ignore[method-assign]
    server.connection_lost = connection_lost  # type: ignore[method-assign]


def _refuse_odd(request: web.Request) -> None:
    """A path has no part that means another place once it is decoded, and a body is what it seems to be. The slashes of
    a model's name are encoded by OpenAI's clients."""
    raw = request.raw_path.partition("?")[0]
    plain = unquote(raw)
    encoded = "%2f" in raw.lower() and not _MODEL.match(raw)
    if _ODD.search(plain) or encoded or not {"..", "."}.isdisjoint(plain.split("/")):
        raise web.HTTPNotFound
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise web.HTTPUnsupportedMediaType(text=f"bodies are taken as they are, not as {encoding[:40]}")


def _unknown(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    takes = f"takes {', '.join(sorted(known))}" if known else "takes no parameters"
    return f"is no parameter of this route{f'; did you mean {near[0]}?' if near else f', which {takes}'}"


def _key(request: web.Request) -> str:
    """Return the digest of the request's key; empty without one."""
    borne = request.headers.get("Authorization", "")
    return hashlib.sha256(borne.encode("utf-8", "surrogateescape")).hexdigest() if borne else ""
