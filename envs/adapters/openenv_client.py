"""Client of the OpenEnv protocol: JSON over one WebSocket per session. We send reset, step and close; the server
answers each with an observation or an error. It may also report once, unasked, why there is no session.

A reader task receives messages continuously, so the server's pings are answered while a policy generates: servers
disconnect clients that are silent for 40 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, Self

import aiohttp
import msgspec
import orjson

from opentinker.envs.base import BadReply
from opentinker.envs.remote_server import CLOSE_S, MAX_QUOTED, REPLY_BYTES
from opentinker.shared.messaging.websocket_frames import ConnectionLost
from opentinker.shared.types.errors import OpenTinkerError

ERRORS_SHOWN = 5
ENDS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)


class ServerError(OpenTinkerError):
    """An error message of the server; `code` is one of OpenEnv's WSErrorCode."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.message = code, message


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a reset or a step."""

    observation: dict[str, Any]
    reward: float
    """0.0 if the server gives none."""
    done: bool
    metadata: dict[str, Any] = {}


class OpenEnvSession:
    """One connection, which is one session of the server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._heard: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(1)  # full: further messages are not read
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def connect(cls, http: aiohttp.ClientSession, url: str) -> Self:
        """Connect. Raise aiohttp.ClientError, OSError."""
        timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
        return cls(await http.ws_connect(url, max_msg_size=REPLY_BYTES, timeout=timeout))

    async def _read(self) -> None:
        """Read messages of the server for `ask`; ends with the connection."""
        while True:
            message = await self._socket.receive()
            await self._heard.put(message)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return

    async def ask(self, kind: str, data: dict[str, Any]) -> Observation:
        """Send a request and return its answer. Raise ServerError, BadReply, ConnectionLost, and TypeError for a
        request that is not JSON.

        After an abandoned call the connection is unusable, because its answer may still arrive.
        """
        question = orjson.dumps({"type": kind, "data": data}).decode()
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):  # the reason may be among the received messages
            await self._socket.send_str(question)
        if self._reading.done() and self._heard.empty():
            raise ConnectionLost("the server has ended the session")
        return _seen(await self._heard.get())

    async def close(self) -> None:
        """Free the server's session and wait briefly for its confirmation."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            await self._socket.send_str('{"type":"close"}')
        await asyncio.wait([self._reading], timeout=CLOSE_S)
        self._reading.cancel()
        await self._socket.close()


def _seen(message: aiohttp.WSMessage) -> Observation:
    """Reset or step. Raise as `OpenEnvSession.ask`."""
    if message.type in ENDS:
        raise ConnectionLost(f"the server has ended the session (code {message.data})")
    if message.type is aiohttp.WSMsgType.ERROR:
        if getattr(message.data, "code", None) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            raise BadReply(f"the server answered with more than {REPLY_BYTES:,} bytes")
        raise ConnectionLost(f"the connection broke: {message.data}")
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise BadReply("the server answered with bytes; OpenEnv answers with text")
    try:
        said = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        raise BadReply(f"the server did not answer with JSON: {message.data[:MAX_QUOTED]}") from None
    data = said.get("data") if isinstance(said, dict) else None
    if not isinstance(data, dict) or said.get("type") not in ("observation", "error"):
        raise BadReply(f"the server answered with neither an observation nor an error: {message.data[:MAX_QUOTED]}")
    if said["type"] == "error":
        raise ServerError(str(data.get("code"))[:MAX_QUOTED], _why(data))
    return _check(data)


def _check(data: dict[str, Any]) -> Observation:
    observation, done, reward = data.get("observation"), data.get("done", False), data.get("reward")
    if not isinstance(observation, dict) or type(done) is not bool:
        raise BadReply("the server's observation must be an object, and done true or false")
    if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
        raise BadReply(f"the server's reward must be a finite number or null, not {reward!r:.60}")
    metadata = data.get("metadata") or observation.get("metadata")  # where older servers put it
    return Observation(
        observation=observation,
        reward=float(reward or 0.0),
        done=done,
        metadata=metadata if isinstance(metadata, dict) else {},
    )


def _why(data: dict[str, Any]) -> str:
    """Return an error's message, or the problem of each field."""
    errors = data.get("errors")
    if not isinstance(errors, list) or not errors:
        return str(data.get("message", ""))[: 5 * MAX_QUOTED]
    parts = []
    for error in errors[:ERRORS_SHOWN]:
        if isinstance(error, dict):
            place = error.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            parts.append(f"{where}: {error.get('msg')}" if where else str(error.get("msg")))
    return "; ".join(parts)[: 5 * MAX_QUOTED]
