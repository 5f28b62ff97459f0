"""The base of environments that a server plays: connections that episodes share, through the egress guard, and retries
while the server is unavailable."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import aiohttp
import msgspec
import orjson
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from opentinker.envs.adapters.library import Illegal, IllegalConfig, refusal
from opentinker.envs.base import ELSEWHERE, Action, BadReply, Environment, EnvironmentConfig, Step, Unreachable, user
from opentinker.envs.data import in_event_loop
from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.websocket_frames import ConnectionLost
from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.types.core import Image, Message, Text, ToolCall
from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")

REPLY_BYTES = 1024**2
MAX_QUOTED = 200
"""Characters of a response that an error quotes."""
UNAVAILABLE = (502, 503, 504)
"""Statuses of a proxy whose server is down."""
GONE = (404, 410)
PAUSE_S, MAX_PAUSE_S = 0.2, 2.0
CLOSE_S = 1.0


class RemoteFailed(OpenTinkerError):
    """The server is not allowed as a destination, does not answer a request in time, or reports a failure."""


class Missing(RemoteFailed):
    """The server has no such path."""


class ServerConfig(EnvironmentConfig):
    """Settings shared by all environments that call a server."""

    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Concurrent requests (HTTP) or episodes (WebSocket) of one env worker, for this URL and this setting; others
    wait."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of one response."""
    patience_s: Annotated[float, Field(ge=0)] = 10.0
    """How long to wait for an unavailable server, where a request may be repeated."""


class Remote(Environment):
    """An environment on the server behind `url`. Episodes share the connections to it."""

    config: ServerConfig
    url: str = ""
    pools: ClassVar[dict[Any, ConnectionPool]]

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self.id = uuid.uuid4().hex
        self._key = (asyncio.get_running_loop(), self.url, self.config.concurrency)
        self.pool = self.pools.setdefault(self._key, ConnectionPool(self.config.concurrency))
        self.pool.users += 1
        self._has_place = False

    async def take_place(self) -> None:
        """Wait until one more episode may be connected; `close` gives the place back."""
        self._has_place = await self.pool.places.acquire()

    async def close(self) -> None:
        has_place, self._has_place = self._has_place, False
        if has_place:
            self.pool.places.release()
        await self.pool.leave()
        if self.pool.users == 0:
            self.pools.pop(self._key, None)

    async def with_retries(self, once: Callable[[], Awaitable[T]], repeats: tuple[type[Exception], ...]) -> T:
        """Call `once`, and retry on the exceptions in `repeats` until `patience_s` after the first failure.

        Raise Unreachable; RemoteFailed if the egress guard refuses the server, or it has the request and does not
        answer.
        """
        loop = asyncio.get_running_loop()
        give_up, backoff = math.inf, Backoff(PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                return await once()
            except EgressRefused as error:
                raise RemoteFailed(f"{self.url}: {error}") from None
            except (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost) as error:
                give_up = min(give_up, loop.time() + self.config.patience_s)
                refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, EgressRefused)
                if refused or not isinstance(error, repeats) or loop.time() + backoff.next_s > give_up:
                    late = f"no answer within {self.config.request_timeout_s:g} s"
                    why = f"{self.url}: {str(error) or (late if isinstance(error, TimeoutError) else repr(error))}"
                    raise (RemoteFailed if refused or _is_unanswered(error) else Unreachable)(why) from None
            await backoff.sleep()


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """A server's answer to a tool call."""

    content: str | list[Text | Image] = ""
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = {}


class UrlConfig(ServerConfig, IllegalConfig):
    """Settings of an environment whose config names its server."""

    url: Annotated[str, Field(min_length=1)]
    """URL of the server, http(s)://."""
    sessions_path: ClassVar[str] = ""
    """Path that the URL may end in."""

    @field_validator("url")
    @classmethod
    def _may_be_reached(cls, url: str, info: ValidationInfo) -> str:
        return checked_url(url, info).removesuffix(cls.sessions_path)


class UrlRemote(Remote):
    """One seat on the server at `config.url`. A turn that is no action is answered with the reason, and costs."""

    Config: ClassVar[type[BaseModel]] = UrlConfig
    config: UrlConfig

    def __init__(self, config: BaseModel) -> None:
        assert isinstance(config, UrlConfig)
        self.url = config.url
        super().__init__(config)
        self._return, self._illegal = 0.0, 0

    async def _play_calls(self, action: Action, play: Callable[[ToolCall], Awaitable[CallResult]]) -> Step:
        """Play each of the turn's tool calls, until one ends the episode or is refused: `play` raises Illegal then."""
        if not action.tool_calls:
            return self._refuse(Illegal(action.problem or "it calls no tool"))
        answers: list[Message] = []
        reward, result = 0.0, CallResult()
        for place, call in enumerate(action.tool_calls, start=1):
            try:
                result = await play(call)
            except Illegal as error:
                unplayed = "not played: an earlier call of this turn was refused"
                left = [tool_message(other, unplayed) for other in action.tool_calls[place:]]
                return self._refuse(error, [*answers, tool_message(call, refusal(error, "")), *left], reward)
            reward += result.reward
            answers.append(tool_message(call, result.content))
            if result.done:
                break
        return self._step([] if result.done else answers, reward, done=result.done, metrics=result.metrics)

    def _step(
        self, messages: list[Message], reward: float, *, done: bool, metrics: Mapping[str, float] | None = None
    ) -> Step:
        self._return += reward
        metrics = {**(metrics or {}), **self._metrics()}
        return Step(messages=messages, reward=reward, components={"reward": reward}, done=done, metrics=metrics)

    def _refuse(self, why: Illegal, messages: Sequence[Message] = (), reward: float = 0.0) -> Step:
        """`reward`: earned earlier in the turn."""
        self._illegal += 1
        self._return += reward
        components = {"illegal": -self.config.penalty} | ({"reward": reward} if reward else {})
        return Step(
            messages=list(messages) or [user(refusal(why, ""))],
            reward=sum(components.values()),
            components=components,
            done=self._illegal >= self.config.max_illegal,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        return {"return": self._return, "illegal": float(self._illegal)}


class ConnectionPool:
    """Connections that the episodes of one URL share; closed when the last of them leaves."""

    def __init__(self, limit: int) -> None:
        self.users = 0
        self.places = asyncio.Semaphore(limit)
        """Limits connections in use, each held for a request or an episode. Waiting here has no time limit."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = Egress.of_process().session(limit=0)
        return self._session

    async def leave(self) -> None:
        self.users -= 1
        if self.users == 0 and self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _is_unanswered(error: Exception) -> bool:
    """Return whether the server was reached but did not answer in time, so a retry may time out as well. A server that
    refuses a WebSocket handshake was reached too."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return error.status not in UNAVAILABLE
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError)


def checked_url(url: str, info: ValidationInfo) -> str:
    """Return the URL of a server in a config, without a slash at its end. Raise ValueError if it has a query, or the
    egress guard refuses it."""
    egress = Egress.of_process()
    try:
        if egress.split(url).query:
            raise ValueError(f"{url!r} has a query: give the server's address alone")
        if not (info.context or {}).get(ELSEWHERE) and not in_event_loop():
            egress.check_blocking(url)
    except EgressRefused as error:
        raise ValueError(str(error)) from None
    return url.rstrip("/")


def tool_message(call: ToolCall, content: str | list[Text | Image]) -> Message:
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def check_status(url: str, status: int, raw: bytes) -> None:
    """Raise Unreachable, Missing or RemoteFailed for a status other than 200; `raw`: the body."""
    if status != 200:
        kind = Unreachable if status in UNAVAILABLE else Missing if status in GONE else RemoteFailed
        raise kind(f"{url} answered {status}: {raw[:MAX_QUOTED].decode(errors='replace')}")


async def read_limited(response: aiohttp.ClientResponse, max_bytes: int = REPLY_BYTES) -> bytes:
    """Read the body. Raise BadReply beyond `max_bytes`."""
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > max_bytes:
            response.close()
            raise BadReply(f"{response.url} answered with more than {max_bytes:,} bytes")
    return bytes(raw)


def object_of(raw: bytes, url: str) -> dict[str, Any]:
    """Return the JSON object that `url` answered with. Raise BadReply."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise BadReply(f"{url} did not answer with a JSON object: {raw[:MAX_QUOTED].decode(errors='replace')}")
    return answer
