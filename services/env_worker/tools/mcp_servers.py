"""The tools of a Model Context Protocol server, through the protocol's own client library.

A connection lives in a task of its own, from its opening to its close, for the library wants both in the same task.
When the server is gone every call of its tools is an error that says so; it is started anew with the next episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from opentinker.envs.tools import Offered, ToolError
from opentinker.services.env_worker.host import KEPT_VARIABLES
from opentinker.services.env_worker.tools.errors import NoTools
from opentinker.shared.egress import Egress
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.types import Tool

CLOSE_S = 5.0
"""For a server to say goodbye; one that is still connecting is left at once."""

if TYPE_CHECKING:
    from mcp import Client

MOST_TOOLS = 64
"""Of one server: every one of them is described in every prompt."""
MOST_PAGES = 16
GONE = "the server of this tool is gone"
COMPLAINT_BYTES = 1000
"""Of what a server says on its stderr: they are shown if it cannot be used."""

log = structlog.get_logger()


class Connection:
    """To one server."""

    def __init__(self, spec: ToolSpec) -> None:
        self._spec = spec
        self._opened: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._client: Client | None = None
        self._over = asyncio.Event()
        self._lost = False
        """The server has gone while the library still waits for it."""
        self._task = asyncio.create_task(self._run(), name=f"mcp {self.name}")
        self.tools: list[Tool] = []
        self._complaint = b""

    @property
    def name(self) -> str:
        return self._spec.url or " ".join(self._spec.command)

    @classmethod
    async def open(cls, spec: ToolSpec) -> Connection:
        """Raises NoTools."""
        one = cls(spec)
        try:
            async with asyncio.timeout(spec.timeout_s):
                one.tools = await asyncio.shield(one._opened)
        except TimeoutError:
            await one.close()
            raise NoTools(f"MCP server {one.name!r} did not answer within {spec.timeout_s:g} s") from None
        except BaseException:
            await one.close()
            raise
        return one

    @property
    def broken(self) -> bool:
        return self._lost or self._task.done()

    @property
    def offered(self) -> list[Offered]:
        return [
            Offered(tool=tool, run=partial(self._call, tool.name), timeout_s=self._spec.timeout_s)
            for tool in self.tools
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
        """From the first word to the last. Never raises: what went wrong is told to who asks next."""
        from mcp import Client

        try:
            async with self._transport() as transport, Client(transport) as client:
                self._client = client
                self._opened.set_result(await _listed(client))
                await self._over.wait()
        except Exception as error:  # noqa: BLE001 - the server's doing, or of the library on its behalf
            why = _why(error) + (f" ({self._complaint.decode(errors='replace')})" if self._complaint else "")
            if self._opened.done():
                log.warning("mcp_server_lost", server=self.name, error=why)
            else:
                self._opened.set_exception(NoTools(f"MCP server {self.name!r} cannot be used: {why}"))

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self._spec.url is None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            command, *arguments = self._spec.command
            server = StdioServerParameters(command=command, args=arguments, env=kept)
            async with self._listening() as stderr:
                yield stdio_client(server, errlog=stderr)
            return
        from mcp.client.streamable_http import streamable_http_client

        async with guarded(self._spec.timeout_s) as http:
            yield streamable_http_client(self._spec.url, http_client=http)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[TextIO]:
        """The server's stderr, of which the end is kept."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: _Listener(self), os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as stderr:
                yield stderr
        finally:
            transport.close()

    def hear(self, data: bytes) -> None:
        self._complaint = (self._complaint + data)[-COMPLAINT_BYTES:]

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Raises ToolError with what the server says is wrong, or if it is gone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._client is None or self.broken:
            raise ToolError(GONE)
        call = asyncio.ensure_future(self._client.call_tool(name, arguments))
        try:
            await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ToolError(GONE)
            result = call.result()
        except MCPError as error:
            self._lost = error.code == CONNECTION_CLOSED
            raise ToolError(GONE if self._lost else str(error)) from None
        finally:
            call.cancel()
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text or "the tool says that it failed")
        return text


class _Listener(asyncio.Protocol):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.hear(data)


def _text(block: Any) -> str:
    """Of a content block; what is no text is named."""
    if getattr(block, "type", "") == "text":
        return str(block.text)
    inner = getattr(getattr(block, "resource", None), "text", None)
    return str(inner) if inner is not None else f"({getattr(block, 'type', 'something')} that cannot be shown)"


async def _listed(client: Client) -> list[Tool]:
    """Raises NoTools if there are none, or too many."""
    tools: list[Tool] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            Tool(name=one.name, description=one.description or "", parameters=one.input_schema) for one in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            break
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise NoTools(f"it has {len(tools)} tools; 1 to {MOST_TOOLS} can be offered")
    return tools


def _why(error: BaseException) -> str:
    """The first cause within groups of errors, which task groups make of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextlib.asynccontextmanager
async def guarded(timeout_s: float) -> AsyncIterator[Any]:
    """A client of HTTP whose every connection goes through the guard; without redirects and proxies."""
    import httpcore2
    import httpx2

    transport = httpx2.AsyncHTTPTransport(trust_env=False)
    # No constructor takes it: the library's own pool, with the place where connections are made changed.
    transport._pool = httpcore2.AsyncConnectionPool(
        ssl_context=httpx2.create_ssl_context(), network_backend=_backend(Egress.of_process())
    )
    async with httpx2.AsyncClient(
        transport=transport, timeout=httpx2.Timeout(timeout_s, read=300.0), trust_env=False
    ) as client:
        yield client


def _backend(egress: Egress) -> Any:
    import anyio
    import httpcore2
    from httpcore2._backends.anyio import AnyIOBackend, AnyIOStream

    class Guarded(AnyIOBackend):
        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: Any = None,
            socket_options: Any = None,
        ) -> Any:
            try:
                made = await egress.connect(host, port, timeout or 10.0)
            except OSError as error:  # refusals are OSErrors too
                raise httpcore2.ConnectError(str(error)) from error
            return AnyIOStream(await anyio.abc.SocketStream.from_socket(made))

    return Guarded()
