"""Turns errors of requests into application/problem+json (RFC 9457) with a `hint`; and parses JSON strictly.

Bad input is never a 500: the middleware knows every error of ours and aiohttp's. Anything else is a bug, which is
logged with an id and answered as a problem too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import secrets
import time
from collections import Counter as Counting
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import orjson
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import Counter, Histogram
from pydantic import BaseModel, ConfigDict, ValidationError
from redis.exceptions import RedisError

from opentinker.services.scheduler.artifacts.store import StoreUnavailable
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway
from opentinker.shared.anthropic.answers import messages_error
from opentinker.shared.messaging.bus import NoReply, StreamFull
from opentinker.shared.openai.fields import InvalidField
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.redact import without_keys
from opentinker.shared.state.tinker.sessions import TooManyRecords
from opentinker.shared.types.errors import Conflict, NotFound, OpenTinkerError, SpecError
from opentinker.shared.types.mistakes import mistakes_of

log = structlog.get_logger()
M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PROBLEM = "application/problem+json"
BODY_LIMIT = 1 << 20
SMALL_BODY = 1 << 14
"""Larger bodies are parsed in a thread, so that other requests are answered."""
DEPTH_LIMIT = 32
NODE_LIMIT = 100_000
REQUESTS = Counter("opentinker_http_requests", "HTTP requests", ["method", "route", "status"], registry=REGISTRY)
LATENCY = Histogram("opentinker_http_seconds", "Time until the response began", ["route"], registry=REGISTRY)

HINTS = {
    400: "see /openapi.json for what this route accepts",
    401: "send `Authorization: Bearer KEY`; our clients read OPENTINKER_API_KEY, or the file OPENTINKER_API_KEY_FILE",
    403: "docs/keys.md lists what roles and scopes allow; `opentinker keys create` creates a key",
    404: "see /openapi.json for the routes; GET /v1/jobs lists your jobs",
    405: "see /openapi.json for the methods of this route",
    408: "send the request again",
    409: "GET the object to see its current state",
    413: f"a request body may have at most {BODY_LIMIT} bytes",
    416: "request the whole content",
    415: "send JSON with `Content-Type: application/json`; a spec may be TOML with `Content-Type: application/toml`",
    422: "correct the fields under `errors` and send it again",
    429: "send fewer requests; `Retry-After` says when to retry",
    500: "report the id to the operator of the server",
    503: "a part of the service is restarting; retry in a few seconds",
}
BODY_S: web.AppKey[float] = web.AppKey("body_s", float)
"""Settings.http_body_s"""
STARTED: web.RequestKey[float] = web.RequestKey("started", float)
"""Arrival time of a request."""
OPENAI = re.compile(r"/v1/jobs/[^/]+/v1(/|$)")
"""Paths below which errors look as OpenAI's do."""
ANTHROPIC = re.compile(r"/v1/jobs/[^/]+/v1/messages$")
"""Those whose errors look as Anthropic's do."""
TINKER = "/api/v1/"
"""Where paths of the Tinker API begin."""
TINKER_HINTS = {
    401: "set TINKER_API_KEY to tml- and a key of this server, tml-ot_...; the client sends it as X-API-Key",
    404: "docs/tinker.md lists the calls that are served; client.get_server_capabilities() lists the base models",
    409: "a number of this session or model was used for another request; open another session",
    413: "send fewer or shorter data in one request",
    415: "send JSON, uncompressed; forward_backward takes application/x-protobuf and Content-Encoding: zstd too",
    422: "correct the request; docs/tinker.md says what is served",
}
"""Hints there, where they differ."""


class TooMany(OpenTinkerError):
    """Too many requests of one client."""

    def __init__(self, what: str, wait_s: float) -> None:
        self.wait_s = max(1, math.ceil(wait_s))
        super().__init__(f"too many {what}; retry in {self.wait_s} s")


class SlowBody(OpenTinkerError):
    """It has not come within the time that a body may take."""


class BrokenBody(OpenTinkerError):
    """It ended before its end, or is framed as no body is."""


PLAIN: dict[type[OpenTinkerError], tuple[int, str]] = {
    NotFound: (404, "Not found"),
    Conflict: (409, "Conflict"),
    TooMany: (429, "Too many requests"),
    SlowBody: (408, "Request timeout"),
    BrokenBody: (400, "Bad request"),
    TooManyRecords: (422, "Too many records"),
}
"""Status and title of errors whose text is all that the client needs."""


@contextlib.asynccontextmanager
async def body_read(request: web.Request, what: str) -> AsyncIterator[None]:
    """Around the reading of a body or of a part of it. Raises SlowBody, BrokenBody."""
    within_s = request.app[BODY_S]
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise SlowBody(f"{what} was not received within {within_s:g} s") from None
    except (ConnectionError, web.RequestPayloadError, HttpProcessingError) as error:
        raise BrokenBody(f"{what} is truncated or malformed: {type(error).__name__}") from None


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS, default=str)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def problem(status: int, detail: str, *, title: str, **more: Any) -> web.Response:
    body = {
        "type": f"urn:opentinker:problem:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": detail,
        "hint": HINTS.get(status, "see /openapi.json"),
        **more,
    }
    response = json_response(body, status)
    assert isinstance(response.body, bytes)
    response.body = without_keys(response.body)  # the client may keep our answer to a misplaced key
    response.content_type = PROBLEM
    if status in (429, 503):
        response.headers["Retry-After"] = "2"
    return response


def _as_openai(response: web.Response, path: str) -> web.Response:
    """The same problem in OpenAI's shape, under `messages` in Anthropic's: what is wrong in a body is a 400 there."""
    assert isinstance(response.body, bytes)
    said = orjson.loads(response.body)
    status = 400 if response.status == 422 else response.status
    detail = f"{said['detail']}: {said['hint']}" if status == 401 else said["detail"]
    body = (
        said.get("openai") or InvalidField(detail, status=status, code="invalid_api_key" if status == 401 else "").body
    )
    if ANTHROPIC.match(path):
        body = messages_error(InvalidField(body["error"]["message"], status=status))
    kept = ("Retry-After", "Allow", "WWW-Authenticate")
    headers = {name: response.headers[name] for name in kept if name in response.headers}
    return json_response(body, status, headers)


def _hint_tinker(response: web.Response) -> None:
    if response.content_type == PROBLEM and isinstance(response.body, bytes):
        response.body = orjson.dumps(orjson.loads(response.body) | {"hint": TINKER_HINTS[response.status]})


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SpecError as error:
        submitted = request.method == "POST" and request.path == "/v1/jobs"
        title = "Invalid job" if submitted else "Invalid request"
        count = len(error.mistakes)
        detail = f"{count} mistake{'s' if count != 1 else ''}: {error}"
        return problem(422, detail, title=title, errors=error.mistakes)
    except InvalidField as error:
        return problem(error.status, error.message, title="Refused", openai=error.body)
    except tuple(PLAIN) as error:
        return _plain_problem(error)
    except (
        RedisError,
        NoReply,
        StreamFull,
        TimeoutError,
        nats.errors.Error,
        StoreUnavailable,
        ReferencesAway,
    ) as error:
        log.warning("request_unavailable", path=request.path, error=str(error) or type(error).__name__)
        return problem(503, _silent(error), title="Unavailable")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _http_problem(request, error)


def _silent(error: Exception) -> str:
    if isinstance(error, ReferencesAway):
        return str(error)
    if isinstance(error, StreamFull):
        return "the message server has no room; send the request again when its disk has some (docs/operating.md)"
    silent = "artifact store" if isinstance(error, StoreUnavailable) else "state store or the message server"
    return f"the {silent} does not answer"


def _plain_problem(error: OpenTinkerError) -> web.Response:
    status, title = next(found for kind, found in PLAIN.items() if isinstance(error, kind))
    response = problem(status, str(error), title=title)
    if isinstance(error, TooMany):
        response.headers["Retry-After"] = str(error.wait_s)
    if isinstance(error, SlowBody | BrokenBody):
        response.force_close()
    return response


def _http_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    ours = {
        404: ("Not found", f"there is no {request.path}"),
        405: ("Method not allowed", f"{request.path} does not support {request.method}"),
        413: ("Body too large", "the body is too large"),
    }
    title, detail = ours.get(error.status, (error.reason, error.text or error.reason))
    response = problem(error.status, detail, title=title)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _unforeseen(request: web.Request, error: Exception) -> web.Response:
    """Log an internal error under an id that the answer repeats. Raises it if an answer has started or no client is
    connected."""
    if request.transport is None or request.transport.is_closing() or request.writer.output_size > 0:
        raise error
    id = secrets.token_hex(6)
    log.error("request_failed", id=id, method=request.method, path=request.path[:300], exc_info=error)
    return problem(500, f"internal error; the server's log has it under id {id}", title="Internal error", id=id)


@web.middleware
async def last_resort(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outside of all others: what they did not foresee is answered as a problem too."""
    request[STARTED] = time.monotonic()  # not later: `begins` does not see the copy that `behind_proxies` makes
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:  # noqa: BLE001 - nothing else is left that could answer it
        return _unforeseen(request, error)


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await _answer(request, handler)
    except web.HTTPException:
        raise
    except Exception as error:  # noqa: BLE001 - it is counted and audited as any answer is
        response = _unforeseen(request, error)
    if OPENAI.match(request.path) and response.content_type == PROBLEM and isinstance(response, web.Response):
        response = _as_openai(response, request.path)
    if request.path.startswith(TINKER) and response.status in TINKER_HINTS and isinstance(response, web.Response):
        _hint_tinker(response)
    REQUESTS.labels(request.method, _route(request), response.status).inc()
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    return response


async def begins(request: web.Request, _: web.StreamResponse) -> None:
    """Observe the latency when the first bytes of a response are sent; a stream's handler continues after that."""
    if STARTED in request:
        LATENCY.labels(_route(request)).observe(time.monotonic() - request[STARTED])


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "(none)" if resource is None else resource.canonical


async def read_json(request: web.Request) -> Any:
    """The body as plain data. Raises SpecError: not JSON, a name twice in an object, NaN, too deep, too many values;
    SlowBody, BrokenBody."""
    async with body_read(request, "the body"):
        raw = await request.read()
    return parse_json(raw) if len(raw) <= SMALL_BODY else await asyncio.to_thread(parse_json, raw)


def parse_json(raw: bytes) -> Any:
    """Raises SpecError."""
    try:
        data = orjson.loads(raw)
        json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise _bad_body("nested too deeply") from None
    except ValueError as error:  # both JSON errors, and integers of absurd length
        raise _bad_body(str(error)) from None
    _measure(data)
    return data


def _bad_body(what: str) -> SpecError:
    return SpecError.of("(body)", None, f"invalid JSON: {what}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counting(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice[:100]!r} appears twice in one object")
    return found


def _measure(data: Any) -> None:
    level, nodes, depth = [data], 0, 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if depth > DEPTH_LIMIT:
            raise _bad_body(f"nested deeper than {DEPTH_LIMIT} levels")
        if nodes > NODE_LIMIT:
            raise _bad_body(f"more than {NODE_LIMIT} values")
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]


class Body(BaseModel):
    """A JSON body: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def parsed(kind: type[M], data: Any) -> M:
    """Validate a body. Raises SpecError."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = [mistake for item in error.errors(include_url=False) for mistake in mistakes_of(item)]
        raise SpecError(
            [{**mistake, "field": mistake["field"].replace("(whole spec)", "(body)")} for mistake in found]
        ) from None
