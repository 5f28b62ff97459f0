"""A stand-in for the server, for tests of submissions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def answering(create: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """A stand-in for the server, which answers submissions and who asks; gives its URL."""
    app = web.Application()
    app.add_routes([web.post("/v1/jobs", create), web.get("/v1/whoami", create)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
