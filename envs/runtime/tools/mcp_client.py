"""Tools of a Model Context Protocol server, through the protocol's own client library.

Each connection lives in one task from open to close, because the library requires both in the same task. If the server
dies, every call of its tools returns an error; the server is restarted for the next episode. Tool descriptions
(envs/tool_limits.py) and results (mcp_limits.py) are limited; a server that exceeds them is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from opentinker.envs.runtime.child_process import KEPT_VARIABLES
from opentinker.envs.runtime.tools.mcp_limits import (
    BLOCKS,
    CURSOR_CHARACTERS,
    MAX_PAGES,
    MESSAGE_BYTES,
)
from opentinker.envs.tool_limits import MAX_TOOLS, bounded_tools
from opentinker.envs.tools import NoTools, OfferedTool, ToolError
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.types.core import Tool

CLOSE_S = 5.0
"""Time for a server to shut down; one that is still connecting is dropped immediately."""

if TYPE_CHECKING:
    from mcp import Client

GONE = "the server of this tool is gone"
COMPLAINT_BYTES = 1000
"""Bytes of a server's stderr that are shown if it cannot be used."""

log = structlog.get_logger()


class McpConnection:
    """Connection to one server."""

    def __init__(self, spec: ToolSpec) -> None:
        self._spec = spec
        self._opened: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._client: Client | None = None
        self._over = asyncio.Event()
        self._lost = False
        """The server has gone while the library still waits for it."""
        self._task = asyncio.create_task(self._run(), name=f"mcp {self.name}")
        self._complaint = _OutputEnd()
        self._excess = ""
        """The limit that the server violated."""

    @property
    def name(self) -> str:
        return self._spec.url or " ".join(self._spec.command)

    @classmethod
    async def open(cls, spec: ToolSpec) -> McpConnection:
        """Raises NoTools."""
        one = cls(spec)
        try:
            async with asyncio.timeout(spec.timeout_s):
                await asyncio.shield(one._opened)
        except TimeoutError:
            await one.close()
            raise NoTools(
                f"MCP server {one.name!r} did not answer within {spec.timeout_s:g} s, its timeout_s"
            ) from None
        except BaseException:
            await one.close()
            raise
        return one

    @property
    def broken(self) -> bool:
        return self._lost or self._task.done()

    @property
    def offered(self) -> list[OfferedTool]:
        return [
            OfferedTool(tool=tool, run=partial(self._call, tool.name), timeout_s=self._spec.timeout_s)
            for tool in self._opened.result()
        ]

    async def close(self) -> None:
        self._over.set()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_S if self._opened.done() else 0.0)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._opened.done():
            self._opened.cancel()

    async def _run(self) -> None:
        """Run the connection from open to close. Never raises: errors are reported to the next caller."""
        from mcp import Client

        try:
            async with self._transport() as transport, Client(transport) as client:
                self._client = client
                self._opened.set_result(await _list_tools(client))
                await self._over.wait()
        except Exception as error:  # noqa: BLE001 - the server's doing, or of the library on its behalf
            said = f" ({self._complaint.kept.decode(errors='replace')})" if self._complaint.kept else ""
            why = self._excess or _why(error) + said
            if self._opened.done():
                log.warning("mcp_server_lost", server=self.name, error=why)
            else:
                self._opened.set_exception(NoTools(f"MCP server {self.name!r} cannot be used: {why}"))

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self._spec.url is None:
            from opentinker.envs.runtime.tools.mcp_stdio import talking

            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            async with self._capture_stderr() as stderr:
                yield talking(self._spec.command, kept, stderr, self._complain)
            return
        from mcp.client.streamable_http import streamable_http_client

        from opentinker.envs.runtime.tools.mcp_http import guarded

        async with guarded(self._spec.timeout_s) as http:
            yield streamable_http_client(self._spec.url, http_client=http, max_sse_event_size=MESSAGE_BYTES)

    def _complain(self, problem: str) -> None:
        self._excess = problem
        self._lost = True
        log.warning("mcp_limit_exceeded", server=self.name, problem=problem)

    @property
    def _gone(self) -> str:
        return f"{GONE}: {self._excess}" if self._excess else GONE

    @contextlib.asynccontextmanager
    async def _capture_stderr(self) -> AsyncIterator[TextIO]:
        """The server's stderr, of which the end is kept."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: self._complaint, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as stderr:
                yield stderr
        finally:
            transport.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raise ToolError with the server's error, or if it is gone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._client is None or self.broken:
            raise ToolError(self._gone)
        call = asyncio.ensure_future(self._client.call_tool(name, arguments))
        try:
            await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ToolError(self._gone)
            result = call.result()
        except MCPError as error:
            closed = error.code == CONNECTION_CLOSED
            self._lost = self._lost or closed
            said = f"{self._gone} ({error})" if self._spec.url and closed else self._gone
            raise ToolError(said if closed else str(error)) from None
        finally:
            call.cancel()
        text = "\n".join(_text(block) for block in result.content[:BLOCKS])
        if len(result.content) > BLOCKS:
            text += f"\n({len(result.content) - BLOCKS} more parts are left out)"
        if result.is_error:
            raise ToolError(text or "the tool says that it failed")
        return text


class _OutputEnd(asyncio.Protocol):
    kept = b""

    def data_received(self, data: bytes) -> None:
        self.kept = (self.kept + data)[-COMPLAINT_BYTES:]


def _text(block: Any) -> str:
    """Return a content block as text; a block that is not text is named."""
    if getattr(block, "type", "") == "text":
        return str(block.text)
    inner = getattr(getattr(block, "resource", None), "text", None)
    return str(inner) if inner is not None else f"({getattr(block, 'type', 'something')} that cannot be shown)"


async def _list_tools(client: Client) -> list[Tool]:
    """Return the tools. Raise NoTools if there are none, too many, or their descriptions are too large."""
    tools: list[Tool] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            Tool(name=one.name, description=one.description or "", parameters=one.input_schema) for one in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            try:
                return bounded_tools(tools)
            except ValueError as error:
                raise NoTools(str(error)) from None
        if len(tools) > MAX_TOOLS or len(cursor) > CURSOR_CHARACTERS:
            break
    raise NoTools(f"its list of tools does not end: {len(tools)} so far; 1 to {MAX_TOOLS} can be offered")


def _why(error: BaseException) -> str:
    """Return the first cause within the exception groups of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
