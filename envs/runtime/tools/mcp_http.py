"""HTTP client for MCP servers: through the egress guard, without redirects to other hosts or proxies, and with limits.

Compressed responses are refused, so that none is larger than what was received; none is read beyond its limit. A server
that ends its event streams immediately is not asked for the next one immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpcore2
import httpx2
from anyio.abc import SocketStream
from httpcore2._backends.anyio import AnyIOBackend, AnyIOStream

from opentinker.envs.runtime.tools.mcp_limits import MESSAGE_BYTES, UNASKED_BYTES
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.security.egress import Egress

BETWEEN_STREAMS_S = 0.5
EVENTS = "text/event-stream"


@contextlib.asynccontextmanager
async def guarded(timeout_s: float) -> AsyncIterator[httpx2.AsyncClient]:
    transport = _Bounded(trust_env=False)
    # No constructor takes it: the library's own pool, with the place where connections are made changed.
    transport._pool = httpcore2.AsyncConnectionPool(
        ssl_context=httpx2.create_ssl_context(), network_backend=_Guarded(Egress.of_process())
    )
    timeout = httpx2.Timeout(timeout_s, read=300.0)
    headers = {"Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(transport=transport, timeout=timeout, headers=headers, trust_env=False) as client:
        yield client


class _Bounded(httpx2.AsyncHTTPTransport):
    _next_stream = 0.0
    """When the next stream of events may be asked for."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            now = asyncio.get_running_loop().time()
            wait_s, self._next_stream = self._next_stream - now, max(now, self._next_stream) + BETWEEN_STREAMS_S
            await sleep(max(0.0, wait_s))
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        coding = response.headers.pop("Content-Encoding", "identity").strip().lower()
        events = response.headers.get("Content-Type", "").lower().startswith(EVENTS)
        refused = "" if coding == "identity" else f"it answered compressed ({coding:.40}), which it was asked not to"
        response.stream = _Limited(response.stream, refused, events)
        return response


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, refused: str, events: bool) -> None:
        self._stream, self._refused = stream, refused
        self._most = UNASKED_BYTES if events else MESSAGE_BYTES
        self._error: type[Exception] = httpx2.SSEError if events else httpx2.StreamError
        """Raised by the library in the call that waits for such a response."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._refused:
            raise self._error(self._refused)
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._most:
                raise self._error(f"it answered with more than {self._most:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Guarded(AnyIOBackend):
    def __init__(self, egress: Egress) -> None:
        super().__init__()
        self._egress = egress

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: Any = None,
        socket_options: Any = None,
    ) -> Any:
        try:
            made = await self._egress.connect(host, port, timeout or 10.0)
        except OSError as error:  # refusals are OSErrors too
            raise httpcore2.ConnectError(str(error)) from error
        return AnyIOStream(await SocketStream.from_socket(made))
