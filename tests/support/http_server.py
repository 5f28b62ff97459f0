"""HTTP servers on loopback: with a test's own routes, or an OpenAI-compatible one, well-behaved or hostile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

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


# --- chats ----------------------------------------------------------------------------------------------------------


Answer = str | int | bytes | Callable[[web.Request], Awaitable[web.StreamResponse]]
"""Words; a status; a body; or a handler."""


class ChatServer:
    """Answers with the planned answers, oldest first, then with `usual`."""

    def __init__(self, usual: Answer = "7") -> None:
        self.usual = usual
        self.planned: list[Answer] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        """What each request has in Authorization."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        planned = self.planned.pop(0) if self.planned else self.usual
        match planned:
            case str():
                return web.json_response(completion(planned))
            case int():
                return web.Response(status=planned, text=f"planned; you sent {self.keys[-1]}")
            case bytes():
                return web.Response(body=planned, content_type="application/json")
        return await planned(request)


def completion(words: str | None, finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": {"total_tokens": 1}}


@asynccontextmanager
async def serving(server: ChatServer) -> AsyncIterator[ChatServer]:
    async with http_server(web.post("/v1/chat/completions", server.answer)) as url:
        server.url = f"{url}/v1"
        yield server
