"""An OpenAI-compatible server on loopback, well-behaved or hostile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.http_server import http_server

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
