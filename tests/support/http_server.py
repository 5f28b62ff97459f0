"""HTTP servers on loopback with a test's own routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def http_server(*routes: web.RouteDef, port: int = 0) -> AsyncIterator[str]:
    """Give the URL of a server with these routes."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(create: Callable[[web.Request], Awaitable[web.Response]]) -> AbstractAsyncContextManager[str]:
    """A stand-in for the scheduler, which answers submissions and who asks; gives its URL."""
    return http_server(web.post("/v1/jobs", create), web.get("/v1/whoami", create))


@asynccontextmanager
async def socket_server(
    hear: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Give the URL of a server that does this on each connection, which need not be HTTP."""
    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
