"""Transport of the client's requests: retries with jitter while the server is away, readable errors.

`client.py` says what is asked; everything may be sent twice, but for what says so (`again`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote

import aiohttp
import orjson

from opentinker.local.discovery import key_for
from opentinker.sdk.wait_notice import WORD_S, Waiting, why
from opentinker.shared.backoff import Backoff
from opentinker.shared.types.errors import Conflict, NotFound, OpenTinkerError, described

T = TypeVar("T")
Json = dict[str, Any]
Query = Mapping[str, str | list[str]]
"""A list: the parameter is there once for each of its texts."""

DEFAULT_URL = "http://127.0.0.1:8080"
CONNECT_S = 2.0
WEBSOCKET_S = 10.0
"""Time limit for opening a WebSocket."""
READ_S = 30.0
"""A stream that sends nothing for this time, not even a keep-alive, is broken."""
AGAIN_S = 0.2
"""Mean delay before a stream is reopened."""
AWAY = (502, 503, 504)
WHAT_TO_DO = {
    401: "; set OPENTINKER_API_KEY, or OPENTINKER_API_KEY_FILE to a file, or be in the directory of `opentinker up`",
    403: "; `opentinker keys create` makes a key that may, if yours may do that",
}
_log = logging.getLogger("opentinker")


class ApiError(OpenTinkerError):
    """The server refused, or was not reached (`status` None). `problem` is its problem document."""

    def __init__(self, message: str, status: int | None = None, problem: Json | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {}

    @property
    def mistakes(self) -> list[Json]:
        """One {field, value, problem, maybe suggestion} for everything that is wrong in the request."""
        return list(self.problem.get("errors", []))


class _Unavailable(aiohttp.ClientConnectionError):
    """The server, or a proxy in front of it, answered that it is unavailable. `refusal`: the reason, if it gave one."""

    def __init__(self, status: int, refusal: ApiError | None) -> None:
        super().__init__(f"it answered {status}" + (f": {refusal}" if refusal else ""))
        self.refusal = refusal


class ApiNotFound(ApiError, NotFound):
    """404."""


class ApiConflict(ApiError, Conflict):
    """409: the job's state does not allow it."""


def _problem(raw: bytes) -> Json | None:
    """Return an answer's problem document; None: it was not our server that answered."""
    try:
        problem = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return problem if isinstance(problem, dict) else None


def _unavailable(status: int, raw: bytes, url: str) -> _Unavailable:
    problem = _problem(raw) or {}
    return _Unavailable(status, _error(status, raw, url) if {"detail", "error"} & problem.keys() else None)


def _error(status: int, raw: bytes, url: str) -> ApiError:
    problem = _problem(raw)
    if problem is None:
        return ApiError(f"{url} answered {status}, not as an OpenTinker server does", status)
    kind = {404: ApiNotFound, 409: ApiConflict}.get(status, ApiError)
    if isinstance(error := problem.get("error"), dict):  # as OpenAI's API says it
        return kind(str(error.get("message")), status, problem)
    mistakes = [f"  {described(mistake)}" for mistake in problem.get("errors", [])]
    detail = str(problem.get("detail", f"{url} answered {status}"))
    if status in WHAT_TO_DO:
        detail += WHAT_TO_DO[status]
    text = "\n".join([str(problem.get("title", "refused")), *mistakes]) if mistakes else detail
    return kind(text, status, problem)


def resource(kind: str, id: str, rest: str = "") -> str:
    """Return the path of an object of the API, or of a part of it."""
    return f"/v1/{kind}/{quote(id, safe='')}{rest}"


def api_key(url: str) -> str:
    """Return the key for a server: OPENTINKER_API_KEY, or the content of the file OPENTINKER_API_KEY_FILE, otherwise
    the operator's key of the server, if it was started in this directory. Raises OpenTinkerError."""
    path = os.environ.get("OPENTINKER_API_KEY_FILE", "")
    try:
        return os.environ.get("OPENTINKER_API_KEY") or (Path(path).read_text().strip() if path else key_for(url))
    except (OSError, UnicodeDecodeError) as error:
        raise OpenTinkerError(f"OPENTINKER_API_KEY_FILE: {error}") from None


async def _asked_once(request: aiohttp.ClientRequest, go_on: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send a request once. aiohttp repeats a DELETE after a broken connection, but not after this exception type."""
    try:
        return await go_on(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(why(error)) from error


class ExitExecutor(ThreadPoolExecutor):
    """Runs a call in the caller's thread once the interpreter is exiting, when executors refuse new work: exit hooks
    still make requests, and a request looks up a host name."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            future: Future[Any] = Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised where the future is awaited, as by any executor
                future.set_exception(error)
            return future


class Http:
    """One server, by its URL. Requests without an answer are retried until `wait_s` has passed without success.

    `key`, or our key for the server (`api_key`), is sent with every request, as `Authorization: Bearer`.
    `on_wait(sentence)` is called at the first failed try of a request, when no answer arrives (`word_s`), and
    once if the server requires no key; default: it is logged.
    """

    def __init__(
        self,
        url: str | None,
        wait_s: float,
        timeout_s: float,
        on_wait: Callable[[str], None] | None,
        key: str | None = None,
    ) -> None:
        self.url = (url or os.environ.get("OPENTINKER_URL") or DEFAULT_URL).rstrip("/")
        self.wait_s, self.timeout_s = wait_s, timeout_s
        self.tell = on_wait or _log.warning
        self._key = key
        self.word_s = WORD_S
        """Silence after which a server counts as waited for."""
        self.page = 500
        """Entries that `newest` asks for at a time."""
        self._said_open = False
        self._open_session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._open_session is not None:
            await self._open_session.close()
            self._open_session = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            key = self._key or api_key(self.url)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._open_session = aiohttp.ClientSession(read_bufsize=1 << 20, headers=headers)
        return self._open_session

    async def json(
        self,
        answer: type[T],
        method: str,
        path: str,
        query: Query | None = None,
        *,
        noun: Any = ...,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        again: bool = True,
    ) -> T:
        """Make a request and return its JSON answer, which is not checked further. `noun`: sent as JSON in the place of
        `body`. `again` False: send it once, even if the connection breaks, because it must not take effect twice."""
        if noun is not ...:  # None is JSON too
            body, headers = orjson.dumps(noun), {**(headers or {}), "Content-Type": "application/json"}

        waiting = self.waiting()

        async def once() -> T:
            timeout = aiohttp.ClientTimeout(total=timeout_s or self.timeout_s, sock_connect=CONNECT_S)
            data = None if body is None else io.BytesIO(body)
            with waiting.for_answer():
                async with self._session.request(
                    method,
                    self.url + path,
                    params=query,
                    data=data,
                    headers=headers,
                    timeout=timeout,
                    middlewares=() if again else (_asked_once,),
                ) as response:
                    raw = await response.read()
                    await self._check(response, raw)
            try:
                found = orjson.loads(raw)
            except orjson.JSONDecodeError:
                found = None
            if not isinstance(found, dict):
                raise ApiError(f"{self.url} does not answer as an OpenTinker server does", response.status)
            return cast(T, found)

        if again:
            return await self.patiently(once, waiting)
        try:
            return await once()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(f"no answer from {self.url} ({why(error)}): it may have been done or not") from None

    async def _check(self, response: aiohttp.ClientResponse, raw: bytes | None = None, *, again: bool = True) -> None:
        """Raise ApiError for a refusal. `again`: the caller retries while the server is unavailable."""
        if response.headers.get("X-OpenTinker-Auth") == "off" and not self._said_open:
            self._said_open = True
            self.tell(f"AUTH IS OFF at {self.url}: anyone who reaches it is an operator")
        if response.status < 400:
            return
        raw = await response.read() if raw is None else raw
        if response.status in AWAY and again:
            raise _unavailable(response.status, raw, self.url)
        raise _error(response.status, raw, self.url)

    @asynccontextmanager
    async def open(
        self,
        path: str,
        query: dict[str, str],
        read_s: float,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        waiting: Waiting | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a streaming response to a GET, or to a POST with a JSON `body`. `waiting`: of a caller that reopens
        broken streams and reports what arrived (`answered`, `heard`), because an open stream alone is not an answer."""
        waiting = waiting or self.waiting()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_s)
        method, data = ("GET", None) if body is None else ("POST", io.BytesIO(body))
        headers = headers if body is None else {"Content-Type": "application/json"}
        asked = self._session.request(
            method, self.url + path, params=query, data=data, headers=headers, timeout=timeout
        )
        with waiting.for_answer():
            response = await asked
        async with response:
            await self._check(response, again=body is None)
            with waiting.standing():
                yield response

    async def follow(
        self,
        path: str,
        query: dict[str, str],
        is_new: Callable[[Json], bool],
        is_over: Callable[[bool], Awaitable[bool]],
    ) -> AsyncGenerator[Any, None]:
        """Yield the data of server-sent events, each one line of JSON, that `is_new`. Reconnect with `query`, which the
        caller keeps up to date, until the stream ends and `is_over(whether it brought something new)`."""
        waiting = self.waiting()
        while True:
            news = False
            try:
                async with self.open(path, query, READ_S, waiting=waiting) as response:
                    async for line in response.content:
                        item = orjson.loads(line[5:]) if line.startswith(b"data:") else None
                        if item is None or not is_new(item):
                            waiting.heard()
                            continue
                        waiting.answered()
                        news = True
                        yield item
                    waiting.heard()
                if await is_over(news):
                    return
                await self.on_end(waiting)
            except (aiohttp.ClientError, TimeoutError) as error:
                await self.stand_by(waiting, error)

    async def pages(
        self,
        path: str,
        items: str,
        after: int,
        query: Query | None = None,
        *,
        only_first: dict[str, str] | None = None,
    ) -> list[Any]:
        """Return the whole of a list that comes in pages, from the cursor `after` on. `only_first`: asked of the first
        page alone."""
        found: list[Any] = []
        once = only_first or {}
        while True:
            page = await self.json(Json, "GET", path, {**(query or {}), **once, "after": str(after)})
            found += page[items]
            after, once = page["cursor"], {}
            if not page["more"]:
                return found

    async def newest(self, path: str, items: str, limit: int, query: dict[str, str] | None = None) -> list[Any]:
        """Return the first `limit` of a list that comes in pages, newest first, `page` at a time."""
        found: list[Any] = []
        asked = dict(query or {})
        while len(found) < limit:
            asked["limit"] = str(min(self.page, limit - len(found)))
            page = await self.json(Json, "GET", path, asked)
            found += page[items]
            if not page["more"]:
                break
            asked["before"] = page["cursor"]
        return found

    async def websocket(
        self, path: str, waiting: Waiting, *, heartbeat: float, max_msg_size: int
    ) -> aiohttp.ClientWebSocketResponse:
        """Raises aiohttp.ClientError."""
        timeout = aiohttp.ClientWSTimeout(ws_close=CONNECT_S)
        with waiting.for_answer():
            async with asyncio.timeout(WEBSOCKET_S):
                return await self._session.ws_connect(
                    self.url + path, heartbeat=heartbeat, max_msg_size=max_msg_size, timeout=timeout
                )

    async def patiently(self, once: Callable[[], Coroutine[Any, Any, T]], waiting: Waiting) -> T:
        """Retry a request until `wait_s` has passed without success."""
        deadline, backoff = time.monotonic() + self.wait_s, Backoff(0.1, 1.0)
        while True:
            try:
                return await once()
            except aiohttp.InvalidURL:
                raise ApiError(f"{self.url!r} is not a URL") from None
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() + backoff.next_s > deadline:
                    raise self.unreachable(error) from None
                waiting.failed(error)
            await backoff.sleep()

    async def stand_by(self, waiting: Waiting, error: Exception) -> None:
        """Pause after a stream broke off or could not be opened. Raise ApiError once `wait_s` has passed."""
        if waiting.away_s > self.wait_s:
            raise (self._cut_off(error) if waiting.cut_off else self.unreachable(error)) from None
        waiting.failed(error)
        await asyncio.sleep(AGAIN_S * (0.5 + random.random()))

    async def on_end(self, waiting: Waiting) -> None:
        """Pause after a stream ended before its subject did. Raise ApiError as `stand_by` if it delivered nothing."""
        if waiting.away_s:
            await self.stand_by(waiting, aiohttp.ClientPayloadError("the stream ended too early"))
        else:
            await asyncio.sleep(AGAIN_S * (0.5 + random.random()))

    def waiting(self) -> Waiting:
        return Waiting(self.url, self.tell, self.word_s)

    def _cut_off(self, error: Exception) -> ApiError:
        return ApiError(
            f"the stream from {self.url} breaks off each time before anything new comes: {why(error)}. "
            "Does a proxy before the server cut streams off?"
        )

    def unreachable(self, error: Exception) -> ApiError:
        """Return the exception to raise after the last retry: the server's reason, if it gave one, else `error`."""
        if isinstance(error, _Unavailable) and error.refusal is not None:
            return error.refusal
        return ApiError(f"cannot reach {self.url}: {why(error)}. Is `opentinker up` running there?")
