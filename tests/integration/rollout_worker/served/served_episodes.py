"""Episodes of served environments, and connections to the gateway that send what a test likes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, ClassVar

import aiohttp
import msgspec

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.envs.game import AbstractGame
from opentinker.serve.ws_client import AsyncServing
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.messaging.subjects import SERVED_CHECK
from opentinker.shared.messaging.websocket_frames import AnswerFrame, CallFrame, Hello, Welcome
from opentinker.shared.types import codec
from opentinker.shared.types.core import Message, StopReason
from opentinker.shared.types.env_protocol import EnvCheck, OpenSession, SessionReply, StepSession
from tests.support.api import OPERATOR, bearing

DEADLINE_S = 20.0


class Counting(Environment):
    """Counts the turns that were really played; each waits for its gate."""

    class Config(EnvironmentConfig):
        limit: int = 1000

    config: Config
    gate: ClassVar[asyncio.Event]
    played: ClassVar[list[int]]

    async def open(self, row: int, seed: int) -> list[Message]:
        return [user(f"row {row} seed {seed}")]

    async def step(self, action: Action) -> Step:
        await self.gate.wait()
        self.played.append(action.turn)
        return Step(
            messages=[user(f"turn {action.turn}: {action.text}")], reward=1.0, done=action.turn + 1 >= self.config.limit
        )


class Episode:
    """One session, played as a rollout worker plays it."""

    def __init__(self, bus: Bus, job: str, name: str, session: str = "") -> None:
        self.client = EnvClient(bus, ask_s=1.0, gone_s=0.3)
        self.job, self.name, self.session = job, name, session or uuid.uuid4().hex
        self.worker = ""
        self.importing: Callable[[], AbstractContextManager[object]] = nullcontext

    async def open(self, deadline_s: float = DEADLINE_S, **config: Any) -> SessionReply:
        request = OpenSession(
            job=self.job,
            session=self.session,
            environment=f"served:{self.name}",
            config=config,
            row=3,
            seed=4,
            deadline_s=deadline_s,
        )
        reply = await self.client.open(request, self.importing)
        self.worker = reply.worker
        return reply

    async def begun(self) -> Episode:
        await self.open()
        return self

    async def step(self, turn: int, text: str = "x") -> SessionReply:
        request = StepSession(session=self.session, turn=turn, text=text, stop=StopReason.EOS)
        return await self.client.step(self.worker, request)

    async def close(self) -> None:
        await self.client.close(worker=self.worker, session=self.session)


def serving(environment: type[Environment] | type[AbstractGame] | str, url: str, **options: Any) -> AsyncServing:
    return AsyncServing(environment, name="count", url=url, on_wait=lambda _: None, **{"drain_s": 0.0} | options)


async def checked(bus: Bus, within_s: float = 10.0, tenant: str = "default") -> list[Any]:
    check = EnvCheck(name="served:count", config={})
    keys = {"tenant": tenant, "environment": "served:count"}
    return (await bus.request(SERVED_CHECK, check, within_s, **keys)).errors


class Raw:
    """A client that sends what it likes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, noun: Any) -> None:
        await self.socket.send_bytes(codec.encode(noun))

    async def join(self) -> str:
        """The address that it was given."""
        await self.send(HELLO)
        return str((await self.next(Welcome)).worker)

    async def closed(self) -> tuple[int, str]:
        message = await self.socket.receive(10.0)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return int(message.data or 0), str(message.extra)

    async def next(self, kind: type[Any]) -> Any:
        return codec.decode(kind, await self.socket.receive_bytes(timeout=10.0))

    async def answer(self, reply: Any) -> CallFrame:
        """Of the next call."""
        call: CallFrame = await self.next(CallFrame)
        await self.send(AnswerFrame(call.serial, msgspec.Raw(codec.encode(reply))))
        return call


@asynccontextmanager
async def raw(url: str, name: str = "count", key: str = OPERATOR, **options: Any) -> AsyncIterator[Raw]:
    async with (
        aiohttp.ClientSession(headers=bearing(key)) as http,
        http.ws_connect(f"{url}/v1/served/{name}", **options) as socket,
    ):
        yield Raw(socket)


HELLO = Hello(process="p" * 32, capacity=4, environment="raw")
