"""Limits clients of the HTTP server: connections, requests a second, lookups of unknown keys a second; and rejects
requests that no honest client sends.

    behind_proxies  middleware in front of all others: the client's address in requests that the operator's proxies pass
                    on (`http_proxies`)
    RequestLimiter  middleware in front of authentication: a token bucket per key, or per address without one (429),
                    odd paths (404), compressed bodies (415)
    TokenBuckets    used by `auth.py` too: lookups of keys that were not valid before, per address (429)
    query_check     middleware behind authentication: query parameters that the route does not know (422)
    bound           connections: of one address, and of all
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
from collections.abc import Collection
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import unquote

import structlog
from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from prometheus_client import Counter as Total

from opentinker.services.scheduler.http.errors import OPENAI, TINKER, Handler, TooMany
from opentinker.services.scheduler.http.route_decorator import route_of
from opentinker.services.scheduler.login.cookies import Cookies
from opentinker.shared.config import Settings
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.mistakes import mistake

log = structlog.get_logger()

BURST_S = 2.0
"""A bucket holds the inflow of this time."""
TINKER_RATE = 4.0
"""So many times as many requests of the Tinker API: its clients send two for each sample."""
MAX_CLIENTS = 20_000
"""Buckets; the least recently used is dropped."""
HEADERS: dict[str, Any] = {"max_line_size": 8190, "max_field_size": 8190, "max_headers": 64}
"""Limits of a request: its first line, each header, their number."""
FORWARDED = "X-Forwarded-For"
MAX_PROXIES = 16
"""Addresses of FORWARDED that are looked at, the last ones."""
IDLE_S = 75.0
"""A connection without a request, or without a complete one, is closed after this time."""
SAY_EVERY_S = 10.0
setattr(web_response, "SERVER_SOFTWARE", "opentinker")  # noqa: B010 - aiohttp tells strangers its and Python's version
_ODD = re.compile(r"[\x00-\x1f\x7f\\]")
_MODEL = re.compile(r"/v1/jobs/[^/%]+/v1/models/")
_ZSTD = {f"{TINKER}forward", f"{TINKER}forward_backward"}
"""Routes that take zstd, which clients of the SDK send there."""


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


class TokenBuckets:
    """A token bucket per client."""

    def __init__(self, per_s: float, burst: float, *, max_clients: int = MAX_CLIENTS) -> None:
        self._per_s, self._burst, self._max_clients = per_s, burst, max_clients
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> tokens, and the time of that."""

    def take(self, client: str, now: float) -> float:
        """Take a token; return 0, or the seconds until there is one."""
        level, at = self._levels.pop(client, (self._burst, now))
        level = min(self._burst, level + max(0.0, now - at) * self._per_s)
        wait_s = max(0.0, (1.0 - level) / self._per_s)
        self._levels[client] = (level if wait_s else level - 1.0, now)
        while len(self._levels) > self._max_clients:
            self._levels.popitem(last=False)
        return wait_s

    def give_back(self, client: str) -> None:
        if client in self._levels:
            level, at = self._levels[client]
            self._levels[client] = level + 1.0, at


def behind_proxies(proxies: Collection[str]) -> Middleware:
    """Return the middleware that gives requests from these networks the address of their client: the last one in
    X-Forwarded-For that is not a proxy's, because a client can write whatever it likes before it."""
    trusted = [ip_network(proxy) for proxy in proxies]

    def is_proxy(address: str) -> bool:
        return any(ip_address(address) in network for network in trusted)

    def client(request: web.Request) -> str:
        address = request.remote or ""
        passed = ",".join(request.headers.getall(FORWARDED, ())).split(",")
        try:
            for before in reversed(passed[-MAX_PROXIES:]):
                if not is_proxy(address):
                    break
                address = str(ip_address(before.strip()))
        except ValueError:  # not an address: the one so far has sent it
            pass
        return address

    @web.middleware
    async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
        address = client(request) if trusted else ""
        return await handler(request.clone(remote=address) if address and address != request.remote else request)

    return named


class RequestLimiter:
    def __init__(self, settings: Settings) -> None:
        self._requests = TokenBuckets(settings.http_rate, max(1.0, BURST_S * settings.http_rate))
        rate = TINKER_RATE * settings.http_rate
        self._tinker = TokenBuckets(rate, max(1.0, BURST_S * rate))
        self._asks = settings.auth
        self._cookies = Cookies(settings)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_odd(request)
        route = route_of(request)
        free = route is not None and route.action is Action.FREE
        login = route is not None and free and route.path.startswith("/v1/login")
        # Logins look at no key, so that one in the request proves nothing and the address counts.
        key = "" if login and self._asks else _key(request, self._cookies.session(request))
        client = key or request.remote or ""
        buckets = self._tinker if request.path.startswith(TINKER) else self._requests
        if (login or not free) and (wait_s := buckets.take(client, time.monotonic())):
            raise TooMany("requests", wait_s)
        return await handler(request)


@web.middleware
async def query_check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raise SpecError for query parameters that the route would ignore."""
    route = route_of(request)
    if route is not None and route.action is not Action.FREE and not _lenient(request.path):
        names = {parameter.name for parameter in route.parameters if parameter.place == "query"}
        if odd := sorted(request.query.keys() - names):
            raise SpecError(
                [mistake(name[:100], request.query[name][:100], _unknown(name, names)) for name in odd[:10]]
            )
    return await handler(request)


def _lenient(path: str) -> bool:
    """Return whether clients of other makers, newer than this server, ask below this path."""
    return OPENAI.match(path) is not None or path.startswith(TINKER)


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
    if encoding != "identity" and not (encoding == "zstd" and request.path in _ZSTD):
        raise web.HTTPUnsupportedMediaType(
            text=f"compressed bodies are not accepted (Content-Encoding: {encoding[:40]})"
        )


def _unknown(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    takes = f"takes {', '.join(sorted(known))}" if known else "takes no parameters"
    return f"is not a parameter of this route{f'; did you mean {near[0]}?' if near else f', which {takes}'}"


def _key(request: web.Request, session: str) -> str:
    """Return the digest of the request's key or of its session's token; empty without one."""
    borne = request.headers.get("Authorization", "") or request.headers.get("X-API-Key", "") or session
    return hashlib.sha256(borne.encode("utf-8", "surrogateescape")).hexdigest() if borne else ""
