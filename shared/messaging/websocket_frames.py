"""The env plane over a WebSocket, for environments that are served by their users or behind a URL.

One side plays, the other asks: the player says Hello, then answers calls, in any order. Which of the two has connected
to the other does not matter here. Every message is one msgpack frame of at most FRAME_BYTES.

    player --Hello--> asker --Welcome, Call, Call...--> player --Answer--> asker

A connection may break at any moment. The player keeps its sessions, the asker asks again on the next connection: a
repeated open or turn is answered from memory (env_protocol.py). Pings of both sides notice a half-open one in seconds.
"""

from __future__ import annotations

import asyncio
import re
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import WSCloseCode, WSMessage, WSMsgType

from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending
from opentinker.shared.types.env_protocol import (
    CloseSession,
    EnvCheck,
    EnvCheckReply,
    OpenSession,
    SessionReply,
    StepSession,
)
from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")
log = structlog.get_logger()

PROTOCOL = 1
FRAME_BYTES = 1024**2
HEARTBEAT_S = 3.0
"""Between pings; half of it later a connection that has not answered is dead."""
HELLO_S = 5.0
GOODBYE = 4000
"""WebSocket close code of a player that will not come back. Any other end of a connection may be an accident."""
TITLE_CHARACTERS = 200
MAX_SESSIONS = 4096
"""Concurrent sessions of one player, regardless of the capacity that it announces."""
_PROCESS = re.compile(r"[A-Za-z0-9_-]{16,64}")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Player -> asker, first of all."""

    protocol: int = PROTOCOL
    process: str
    """Random, made at the start of the player: who says it again after a broken connection is the same player."""
    capacity: int
    """Concurrent sessions; more are answered `busy`."""
    environment: str
    """For people: what is played."""
    host: str = ""


def hello_of(title: str, capacity: int) -> Hello:
    """Return what a player in this process says first. `title`: of its environment."""
    host = socket.gethostname()[:TITLE_CHARACTERS]
    return Hello(process=uuid.uuid4().hex, capacity=capacity, environment=title[:TITLE_CHARACTERS], host=host)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Asker -> player: calls may come from now on."""

    worker: str
    """The player's address, as the asker calls it."""


class CallFrame(msgspec.Struct, frozen=True, array_like=True):
    serial: int
    verb: str
    """open | step | close | check"""
    body: msgspec.Raw
    """OpenSession, StepSession, CloseSession or EnvCheck."""


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    serial: int
    body: msgspec.Raw
    """SessionReply, to a check EnvCheckReply."""


KINDS: dict[str, type[Any]] = {"open": OpenSession, "step": StepSession, "close": CloseSession, "check": EnvCheck}


class Socket(Protocol):
    """Common part of aiohttp's client and server WebSockets."""

    @property
    def closed(self) -> bool: ...
    async def receive(self, timeout: float | None = None) -> WSMessage: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def close(self, *, code: int = 1000, message: bytes = b"") -> Any: ...


class ConnectionLost(OpenTinkerError):
    """The connection ended; what was asked on it may be asked again on another one."""


class BadFrame(OpenTinkerError):
    """The other side sent what is no frame."""


async def frame_of(socket: Socket, kind: type[T], timeout_s: float | None = None) -> T:
    """The next frame. Raises ConnectionLost, BadFrame."""
    try:
        message = await socket.receive(timeout_s)
    except TimeoutError:
        raise BadFrame(f"no {kind.__name__} came within {timeout_s:g} s") from None
    if message.type is WSMsgType.BINARY:
        try:
            return codec.decode(kind, message.data)
        except codec.WireError as error:
            raise BadFrame(str(error)) from None
    if message.type is WSMsgType.TEXT:
        raise BadFrame("a text message came; frames are binary")
    raise ConnectionLost(_why(socket, message))


def _why(socket: Socket, message: WSMessage) -> str:
    code = getattr(socket, "close_code", None)
    said = message.extra if message.type is WSMsgType.CLOSE and message.extra else message.data
    return f"the connection ended (code {code}{f': {said}' if isinstance(said, str | Exception) else ''})"


async def refuse(socket: Socket, error: BadFrame) -> None:
    await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])


async def introduce(socket: Socket, hello: Hello) -> Welcome:
    """The player's first words. Raises ConnectionLost, with the reason of one who refuses; BadFrame."""
    try:
        await socket.send_bytes(codec.encode(hello))
    except (ConnectionError, RuntimeError) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from None
    return await frame_of(socket, Welcome, HELLO_S)


async def greet(socket: Socket) -> Hello:
    """The asker's first look. Raises ConnectionLost, BadFrame; the caller refuses, or sends Welcome."""
    hello = await frame_of(socket, Hello, HELLO_S)
    if hello.protocol != PROTOCOL:
        raise BadFrame(f"protocol {hello.protocol} is not spoken here, only {PROTOCOL}: install the same opentinker")
    if not _PROCESS.fullmatch(hello.process):
        raise BadFrame("process must be 16 to 64 letters, digits and -_")
    if not 1 <= hello.capacity <= MAX_SESSIONS:
        raise BadFrame(f"capacity must be 1 to {MAX_SESSIONS}")
    if max(len(hello.environment), len(hello.host)) > TITLE_CHARACTERS:
        raise BadFrame(f"environment and host have at most {TITLE_CHARACTERS} characters")
    return hello


class Asker:
    """The asking side of one connection. `run` reads answers as long as it lasts."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._serial = 0
        self._answers = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._over = ""

    async def run(self) -> None:
        """Returns when the connection has ended. Raises BadFrame, after closing it."""
        try:
            while True:
                answer = await frame_of(self._socket, AnswerFrame)
                self._answers += 1
                if self._answers > self._serial:
                    raise BadFrame(f"{self._answers} answers came to {self._serial} calls")
                waiting = self._waiting.get(answer.serial)
                if waiting is not None and not waiting.done():
                    waiting.set_result(bytes(answer.body))
        except ConnectionLost as error:
            self._over = str(error)
        except BadFrame as error:
            self._over = str(error)
            await refuse(self._socket, error)
            raise
        finally:
            self._over = self._over or "the connection is being closed"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionLost(self._over))

    async def ask(self, verb: str, noun: Any, kind: type[T]) -> T:
        """Raises ConnectionLost; WireError if the answer is no `kind`. Waits as long as the connection lasts."""
        if self._over:
            raise ConnectionLost(self._over)
        serial = self._serial = self._serial + 1
        waiting = self._waiting[serial] = asyncio.get_running_loop().create_future()
        try:
            await self._send(codec.encode(CallFrame(serial, verb, msgspec.Raw(codec.encode(noun)))))
            return codec.decode(kind, await waiting)
        finally:
            del self._waiting[serial]
            if waiting.done() and not waiting.cancelled():
                waiting.exception()  # retrieved, because no caller may be left to receive it

    async def _send(self, data: bytes) -> None:
        if len(data) > FRAME_BYTES:
            raise codec.WireError(f"a call of {len(data):,} bytes is too large: a frame has at most {FRAME_BYTES:,}")
        try:
            await self._socket.send_bytes(data)
        except (ConnectionError, RuntimeError) as error:  # aiohttp: closing, or closed
            raise ConnectionLost(str(error) or type(error).__name__) from None


Play = Callable[[str, Any], Awaitable[Any]]
"""Callback with a verb and its struct."""


async def answer_calls(socket: Socket, play: Play) -> None:
    """Serve the playing side of one connection after its Hello. Returns when the connection has ended; running sessions
    continue.

    Raises BadFrame, after closing it.
    """
    playing: set[asyncio.Task[None]] = set()

    async def answer(call: CallFrame, noun: Any) -> None:
        data = _answer(call.serial, await play(call.verb, noun))
        if not socket.closed:
            try:
                await socket.send_bytes(data)
            except (ConnectionError, RuntimeError) as error:  # it is asked again on the next connection
                log.info("answer_not_sent", verb=call.verb, reason=str(error))

    try:
        while True:
            call = await frame_of(socket, CallFrame)
            if call.verb not in KINDS:
                raise BadFrame(f"{call.verb!r:.40} is no verb; there are: {', '.join(KINDS)}")
            try:
                noun = codec.decode(KINDS[call.verb], bytes(call.body))
            except codec.WireError as error:
                raise BadFrame(str(error)) from None
            task = asyncio.get_running_loop().create_task(answer(call, noun))
            playing.add(task)
            task.add_done_callback(playing.discard)
    except ConnectionLost:
        return
    except BadFrame as error:
        await refuse(socket, error)
        raise


def _answer(serial: int, reply: Any) -> bytes:
    data = codec.encode(AnswerFrame(serial, msgspec.Raw(codec.encode(reply))))
    if len(data) <= FRAME_BYTES:
        return data
    problem = f"a reply of {len(data):,} bytes is too large: a frame has at most {FRAME_BYTES:,}"
    if isinstance(reply, EnvCheckReply):
        mistake = {"field": "environment.config", "value": None, "problem": problem}
        return codec.encode(AnswerFrame(serial, msgspec.Raw(codec.encode(EnvCheckReply(errors=[mistake])))))
    failed = SessionReply(worker=reply.worker, failure=Ending.ENV_BAD_REPLY, error=problem)
    return codec.encode(AnswerFrame(serial, msgspec.Raw(codec.encode(failed))))
