"""A session of an ORS server (Open Reward Standard): HTTP requests, and server-sent events for what may take long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from opentinker.envs.base import BadReply, Unreachable
from opentinker.envs.remote_server import (
    CLOSE_S,
    MAX_QUOTED,
    REPLY_BYTES,
    Missing,
    RemoteFailed,
    check_status,
    read_limited,
)
from opentinker.shared.types import codec

PING_S = 60.0
"""Servers drop sessions that are silent for 15 minutes."""
STARTING_PAUSE_S = 1.0
UNKNOWN_CALL = "unknown task_id"
T = TypeVar("T")


class Block(msgspec.Struct):
    type: str
    text: str = ""
    data: str = ""
    """Base64 of an image."""


class OrsTool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None


class TerminalTool(msgspec.Struct):
    """The tool that a turn without calls is given to; the policy does not see it."""

    name: str
    arg: str | None = None
    """Field that takes the turn's text; None: the tool takes nothing."""


class OrsTools(msgspec.Struct):
    tools: list[OrsTool]
    terminal_tool: TerminalTool | None = None


class ToolOutput(msgspec.Struct):
    blocks: list[Block]
    reward: float | None = None
    finished: bool = False


class ToolReply(msgspec.Struct):
    ok: bool
    output: ToolOutput | None = None
    error: str = ""


class Starting(Unreachable):
    """The server is still setting up the episode."""


class OrsSession:
    """Requests of one episode. All raise aiohttp's errors, OSError or TimeoutError if the server cannot be reached,
    Unreachable, RemoteFailed or BadReply. A server that says that the episode is still being set up is asked again, for
    `timeout_s`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._http, self.url = http, url
        self._timeout_s = timeout_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._id = ""
        self._pings: asyncio.Task[None] | None = None

    async def ask(self, method: str, path: str, reply: Any, body: dict[str, Any] | None = None) -> Any:
        """Return the answer as the type `reply`."""

        async def once() -> bytes:
            async with self._request(method, f"{self.url}{path}", body) as response:
                return await self._accepted(response, path)

        return self._read(await self._once_set_up(once), reply, path)

    async def begin(self, task: dict[str, Any]) -> None:
        """Make a session and its episode, in place of one whose episode may not have been made."""
        await self._delete()
        async for name, data in self._events("/create_session", {}):
            if name == "task_id":
                self._id = data.strip()
        if not self._id or not self._id.isascii() or not self._id.isprintable() or len(self._id) > 200:
            wrong, self._id = self._id, ""
            raise BadReply(f"{self.url}/create_session named no session: {wrong[:MAX_QUOTED]!r}")
        await self.ask("POST", "/create", dict[str, Any], task)
        self._pings = asyncio.create_task(self._ping())

    async def call(self, environment: str, body: dict[str, Any]) -> ToolReply:
        """Call a tool. The server first says which `task_id` the call has, which is put into `body`: a repeated request
        then waits for the same call. Without it the call might be made twice, so a lost connection is Unreachable; so
        is a server that has forgotten the call. Raise RemoteFailed if it takes longer than the timeout."""
        is_known = "task_id" in body
        try:
            return await self._once_set_up(lambda: self._call(f"/{environment}/call", body))
        except Missing as error:
            raise Unreachable(str(error)) if is_known else error from None
        except TimeoutError:
            late = f"{body['name']}: no answer within {self._timeout_s:g} s"
            raise RemoteFailed(f"{self.url}/{environment}/call: {late}") from None
        except (aiohttp.ClientError, OSError) as error:
            if "task_id" in body:
                raise
            raise Unreachable(f"{self.url}/{environment}/call: {error}") from None

    async def _call(self, path: str, body: dict[str, Any]) -> ToolReply:
        parts: list[str] = []
        async for name, data in self._events(path, body):
            match name:
                case "task_id":
                    body["task_id"] = data.strip()
                case "chunk" | "end":
                    parts.append(data)
                case "error":
                    kind = Missing if data.startswith(UNKNOWN_CALL) else RemoteFailed
                    raise kind(f"{self.url}{path}: {body['name']}: {data[:MAX_QUOTED]}")
            if name == "end":
                reply: ToolReply = self._read("".join(parts), ToolReply, path)
                return reply
        raise aiohttp.ClientPayloadError("the answer ended before the call")

    async def close(self) -> None:
        """End the episode and the session, in CLOSE_S each at most."""
        await self._delete()

    async def _delete(self) -> None:
        if self._pings is not None:
            self._pings.cancel()
        for path in ("/delete", "/delete_session") if self._id else ():
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S), self._request("POST", f"{self.url}{path}"):
                    pass
        self._id = ""

    async def _once_set_up(self, once: Callable[[], Awaitable[T]]) -> T:
        """Call `once` until the episode is set up."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._timeout_s
        while True:
            try:
                return await once()
            except Starting:
                if loop.time() + STARTING_PAUSE_S > give_up:
                    raise
            await asyncio.sleep(STARTING_PAUSE_S)

    async def _accepted(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """Return the body of an answer. Raise as `check_status`, or Starting."""
        raw = await read_limited(response)
        if response.status == 503 and response.headers.get("X-Backend-State") == "starting":
            raise Starting(f"{self.url}{path}: the episode is still being set up after {self._timeout_s:g} s")
        check_status(f"{self.url}{path}", response.status, raw)
        return raw

    def _request(self, method: str, url: str, body: Any = None) -> Any:
        headers = {"X-Session-ID": self._id} if self._id else {}
        data = None if body is None else orjson.dumps(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        return self._http.request(method, url, data=data, headers=headers, timeout=self._timeout, allow_redirects=False)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[str, str]]:
        """Yield name and data of events, REPLY_BYTES of them at most."""
        url = f"{self.url}{path}"
        async with self._request("POST", url, body) as response:
            if response.status != 200:
                await self._accepted(response, path)
            size, rest, name, data = 0, b"", "", list[str]()
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > REPLY_BYTES:
                    raise BadReply(f"{url} answered with more than {REPLY_BYTES:,} bytes")
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    field, _, value = line.decode(errors="replace").rstrip("\r").partition(":")
                    if field == "event":
                        name = value.strip()
                    elif field == "data":
                        data.append(value.removeprefix(" "))
                    elif not field and not value and name:  # an empty line ends an event; a comment has a value
                        yield name, "\n".join(data)
                        name, data = "", []

    def _read(self, raw: bytes | str, kind: Any, path: str) -> Any:
        try:
            return codec.from_json(kind, raw)
        except codec.WireError as error:
            raise BadReply(f"{self.url}{path}: {error}") from None

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._request("POST", f"{self.url}/ping"):
                    pass
