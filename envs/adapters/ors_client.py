"""A session of an ORS server (Open Reward Standard): HTTP requests, and server-sent events for what may take long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import orjson

from opentinker.envs.base import BadReply, Unreachable
from opentinker.envs.remote_server import CLOSE_S, MAX_QUOTED, REPLY_BYTES, RemoteFailed, check_status, read_limited
from opentinker.shared.types import codec

PING_S = 60.0
"""Servers drop sessions that are silent for 15 minutes."""


class Block(msgspec.Struct):
    type: str
    text: str = ""
    data: str = ""
    """Base64 of an image."""


class ToolSpec(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None


class TerminalTool(msgspec.Struct):
    """The tool that a turn without calls is given to; the policy does not see it."""

    name: str
    arg: str | None = None
    """Field that takes the turn's text; None: the tool takes nothing."""


class Tools(msgspec.Struct):
    tools: list[ToolSpec]
    terminal_tool: TerminalTool | None = None


class ToolOutput(msgspec.Struct):
    blocks: list[Block]
    reward: float | None = None
    finished: bool = False


class ToolReply(msgspec.Struct):
    ok: bool
    output: ToolOutput | None = None
    error: str = ""


class OrsSession:
    """Requests of one episode. All raise aiohttp's errors, OSError or TimeoutError if the server cannot be reached,
    Unreachable, RemoteFailed or BadReply."""

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._http, self.url = http, url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._id = ""
        self._pings: asyncio.Task[None] | None = None

    async def ask(self, method: str, path: str, reply: Any, body: dict[str, Any] | None = None) -> Any:
        """Return the answer as the type `reply`."""
        url = f"{self.url}{path}"
        async with self._request(method, url, body) as response:
            raw = await read_limited(response)
            check_status(url, response.status, raw)
        return self._read(raw, reply, path)

    async def begin(self, task: dict[str, Any]) -> None:
        """Make a session and its episode."""
        async for name, data in self._events("/create_session", {}):
            if name == "task_id":
                self._id = data.strip()
        if not self._id or not self._id.isascii() or not self._id.isprintable() or len(self._id) > 200:
            raise BadReply(f"{self.url}/create_session named no session: {self._id[:MAX_QUOTED]!r}")
        await self.ask("POST", "/create", dict[str, Any], task)
        self._pings = asyncio.create_task(self._ping())

    async def call(self, environment: str, body: dict[str, Any]) -> ToolReply:
        """Call a tool. The server first says which `task_id` the call has, which is put into `body`: a repeated request
        then waits for the same call. Without it the call might be made twice, so a lost connection is Unreachable."""
        path, parts = f"/{environment}/call", list[str]()
        try:
            async for name, data in self._events(path, body):
                match name:
                    case "task_id":
                        body["task_id"] = data.strip()
                    case "chunk" | "end":
                        parts.append(data)
                    case "error":
                        raise RemoteFailed(f"{self.url}{path}: {body['name']}: {data[:MAX_QUOTED]}")
                if name == "end":
                    reply: ToolReply = self._read("".join(parts), ToolReply, path)
                    return reply
            raise aiohttp.ClientPayloadError("the answer ended before the call")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if "task_id" in body:
                raise
            raise Unreachable(f"{self.url}{path}: {error or 'no answer in time'}") from None

    async def close(self) -> None:
        """End the episode and the session, in CLOSE_S each at most."""
        if self._pings is not None:
            self._pings.cancel()
        for path in ("/delete", "/delete_session") if self._id else ():
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S), self._request("POST", f"{self.url}{path}"):
                    pass

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
                check_status(url, response.status, await read_limited(response))
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
