"""OpenEnv servers for tests: one that says what a test has planned, and real ones in a Python of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from uv import find_uv_bin

from tests.conftest import free_port, wait_port
from tests.support.http_server import http_server

OPENENV = "openenv==0.10.0"
UNTIL = "2026-11-20T00:00:00Z"
"""What it depends on is not younger."""
ENDS_S = 10.0
GUESS = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "guess": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["guess"],
}


def seen(observation: dict[str, Any], reward: float | None = None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done, **more}}


def error(code: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


class Planned:
    """Says the planned answers, oldest first: an object, raw text or bytes, None to say nothing, `hang up` to do so."""

    def __init__(self, *answers: Any, schema: Any = GUESS) -> None:
        self.answers = list(answers)
        self.schema = schema
        self.resets: dict[int, Any] = {}
        """By the number of the connection, from 1: what its reset is answered, instead."""
        self.heard: list[dict[str, Any]] = []
        self.open = 0
        self.connections = 0
        self.places = 99

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.connections += 1
        number = self.connections
        if self.open >= self.places:
            await socket.send_json(error("CAPACITY_REACHED", "full"))
            await socket.close()
            return socket
        self.open += 1
        try:
            async for message in socket:
                self.heard.append(message.json())
                kind = self.heard[-1]["type"]
                if kind == "close":
                    break
                if kind == "reset" and number in self.resets:
                    await self._say(socket, self.resets[number])
                    continue
                await self._say(socket, self.answers.pop(0) if self.answers else seen({"hint": "higher"}))
        finally:
            self.open -= 1
        return socket

    async def _say(self, socket: web.WebSocketResponse, answer: Any) -> None:
        match answer:
            case None:
                return
            case "hang up":
                await socket.close()
            case str():
                await socket.send_str(answer)
            case bytes():
                await socket.send_bytes(answer)
            case _:
                await socket.send_json(answer)

    async def describe(self, _: web.Request) -> web.Response:
        if isinstance(self.schema, int):
            return web.Response(status=self.schema)
        return web.json_response({"action": self.schema, "observation": {}, "state": {}})


@asynccontextmanager
async def planned(*answers: Any, schema: Any = GUESS) -> AsyncIterator[tuple[Planned, str]]:
    server = Planned(*answers, schema=schema)
    async with http_server(web.get("/ws", server.serve), web.get("/schema", server.describe)) as url:
        yield server, url.replace("http", "ws")


# --- real ones ------------------------------------------------------------------------------------------------------


@contextmanager
def real(place: Path) -> Iterator[str]:
    """Serves three environments below one URL, with OpenEnv in a Python of its own: its pins and ours exclude each
    other. `scaffold` is what `openenv init` makes, as it is; `number` and `shop` are written on OpenEnv's classes."""
    programs = place / "venv" / "bin"
    (place / "served.py").write_text(SERVED)
    port = free_port()
    for command in (
        [find_uv_bin(), "venv", "--quiet", "--no-project", "--python", sys.executable, str(place / "venv")],
        [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--python",
            str(place / "venv"),
            "--exclude-newer",
            UNTIL,
            OPENENV,
        ],
        [str(programs / "openenv"), "init", "scaffold", "--output-dir", str(place)],
    ):
        subprocess.run(command, check=True, timeout=500, cwd=place, stdout=subprocess.DEVNULL)
    with running(
        [str(programs / "uvicorn"), "served:app", "--port", str(port), "--log-level", "warning"], place, port
    ) as url:
        yield url


@contextmanager
def running(command: list[str], place: Path, port: int) -> Iterator[str]:
    """Give the URL of a server that a command starts."""
    process = subprocess.Popen(command, cwd=place)
    try:
        wait_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


SERVED = '''
import random

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field
from scaffold.server.app import app as scaffold


class Guess(Action):
    number: int = Field(..., ge=1, le=9, description="your guess")
    sure: bool = False


class Hint(Observation):
    hint: str = ""
    left: int = 0


class Number(Environment):
    """Guess a number from 1 to 9, which the seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=9, **_):
        self.number, self.left = random.Random(seed).randint(1, most), 4
        return Hint(hint=f"It is from 1 to {most}.", left=self.left, metadata={"most": most})

    def step(self, action, timeout_s=None, **_):
        if action.sure:
            raise RuntimeError("nobody can be sure")
        self.left -= 1
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return Hint(hint=hint, left=self.left, reward=float(right), done=right or not self.left)

    @property
    def state(self):
        return State()


class Shop(MCPEnvironment):
    """Tools alone: what is the price of all teas?"""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.prices = {"green tea": 3, "black tea": 4, "coffee": 9}
        self.paid = None
        server = FastMCP("shop")

        @server.tool
        def catalogue() -> list[str]:
            """What there is."""
            return sorted(self.prices)

        @server.tool
        def price(item: str) -> int:
            """What an item costs."""
            return self.prices[item]

        @server.tool
        def pay(amount: int) -> str:
            """Pay for all teas."""
            self.paid = amount
            return "thank you"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(metadata={"task": "Pay the price of all teas together."})

    def step(self, action, timeout_s=None, **more):
        observation = super().step(action, timeout_s=timeout_s, **more)
        return self._judged(observation)

    async def step_async(self, action, timeout_s=None, **more):
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **more))

    def _judged(self, observation):
        observation.done, observation.reward = self.paid is not None, float(self.paid == 7)
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        raise NotImplementedError

    @property
    def state(self):
        return State()


app = FastAPI()
app.mount("/scaffold", scaffold)
app.mount("/number", create_app(Number, Guess, Hint, max_concurrent_envs=2))
app.mount("/shop", create_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=2))
'''
