"""Sessions of environments behind URLs, at an env worker."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.env_protocol import CloseSession, SessionReply
from tests.support.http_server import http_server
from tests.support.playing import opening, step


class Playing:
    """One session at an env worker's `Sessions`."""

    def __init__(self, url: str, deadline_s: float = 20.0, **config: Any) -> None:
        self.sessions = Sessions("w", limit=8, resolver=Resolver(modules=False))
        options: dict[str, Any] = {"patience_s": 0.5, **config}
        request = opening(url, uuid.uuid4().hex, row=3, seed=5, deadline_s=deadline_s, **options)
        self.request = msgspec.structs.replace(request, answer_within_s=10.0)

    async def open(self) -> SessionReply:
        return await self.sessions.open(self.request)

    async def step(self, turn: int, text: str, **more: Any) -> SessionReply:
        return await self.sessions.step(step(turn, text, self.request.session, **more))

    async def close(self) -> None:
        await self.sessions.close(CloseSession(session=self.request.session))
        assert await self.sessions.drain(5.0) == 0


class Game:
    """An environment server as the published wire has it: guess the parity of a number."""

    def __init__(self) -> None:
        self.instances: dict[str, int] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Any] = []
        """Instead of the right ones, oldest first: a body, a status, or None for the right one."""
        self.hang = asyncio.Event()
        self.hang.set()
        self.takes_s = 0.0
        """For each answer."""

    async def reset(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("reset", body))
        self.instances[body["instance_id"]] = random.Random(body["seed"]).randint(0, 99)
        number = self.instances[body["instance_id"]]
        return await self._answer({"observation": f"Is {number} odd?", "system_prompt": "Say yes or no."})

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("step", body))
        if body["instance_id"] not in self.instances:
            return web.json_response({"detail": "unknown instance"}, status=404)
        right = (body["action"] == "yes") == bool(self.instances[body["instance_id"]] % 2)
        info = {"right": right, "tries": 1, "why": "text"}
        return await self._answer({"observation": "", "reward": float(right), "done": True, "info": info})

    async def finalize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("finalize", body))
        return web.json_response({"removed": self.instances.pop(body["instance_id"])})

    async def _answer(self, right: dict[str, Any]) -> web.Response:
        await self.hang.wait()
        await asyncio.sleep(self.takes_s)
        planned = self.answers.pop(0) if self.answers else None
        if isinstance(planned, int):
            return web.Response(status=planned, text="planned")
        if isinstance(planned, bytes):
            return web.Response(body=planned)
        return web.json_response(right if planned is None else right | planned)


@asynccontextmanager
async def server(game: Game, port: int = 0) -> AsyncIterator[str]:
    routes = web.post("/reset", game.reset), web.post("/step", game.step), web.post("/finalize", game.finalize)
    async with http_server(*routes, port=port) as url:
        try:
            yield url
        finally:
            game.hang.set()
