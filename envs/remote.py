"""Environments behind a URL: `environment.name = "http://..."` or `"ws://..."`. Reached through the egress guard.

http(s)://  The wire of OpenTinker's environment servers, which any language can serve: POST /reset {instance_id,
            job_id, ...} gives {observation, system_prompt}, POST /step {instance_id, job_id, action} gives
            {observation, reward, done, info}; an unknown instance is a 404. The numbers of `info` become metrics.
ws(s)://    Our own frames (shared/messaging/websocket_frames.py), as `opentinker env serve --listen` speaks them: seats
and tools too.

The episode's deadline covers everything. A reset, and any call in frames, may be repeated and is while the server is
away; a step over HTTP might be played twice, and is repeated only if no connection was made. A server that stays away
is no failure of the environment: the session is lost, and its episode is played again. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, TypeVar

import aiohttp
import orjson
from pydantic import BaseModel, Field

from opentinker.envs.base import (
    Action,
    BadReply,
    Environment,
    EnvironmentConfig,
    Opening,
    Step,
    Unreachable,
    is_truncation,
    user,
)
from opentinker.shared.messaging.reply_validation import sound
from opentinker.shared.messaging.websocket_frames import (
    FRAME_BYTES,
    HEARTBEAT_S,
    Asker,
    BadFrame,
    ConnectionLost,
    Welcome,
    greet,
)
from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.types.codec import WireError, encode
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, SessionReply, StepSession
from opentinker.shared.types.errors import OpenTinkerError, SpecError

T = TypeVar("T")

REPLY_BYTES = 1024**2
SHOWN = 200
"""Characters of an answer that an error quotes."""
INFO_NUMBERS = 64
AWAY = (502, 503, 504)
"""Statuses of who stands before a server that is not there."""
PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
SESSION_S = 3600.0
"""The other side's own deadline, for what nobody closes; the episode's, here, is shorter."""
CLOSE_S = 1.0
ANSWER_S = 5.0


class RemoteFailed(OpenTinkerError):
    """The server may not be reached, does not answer a request in time, or says that it failed."""


class ServerConfig(EnvironmentConfig):
    """Settings of whatever asks a server."""

    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests (HTTP) or episodes (WebSocket) of one env worker at once, for this URL and this setting; others wait."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """For one answer."""
    patience_s: Annotated[float, Field(ge=0)] = 10.0
    """How long a server that is away is waited for, where a request may be repeated."""


class RemoteConfig(ServerConfig):
    config: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Of the environment: sent with every reset over HTTP, as the environment's config over WebSockets."""
    job_id: Annotated[str, Field(min_length=1, max_length=200)] = "default"
    """HTTP only: what the server files its statistics under."""
    row_key: Annotated[str, Field(max_length=100)] = "row"
    """HTTP only: the name under which a reset is told the row of the episode; empty: it is not told."""
    seed_key: Annotated[str, Field(max_length=100)] = "seed"
    """HTTP only: the same for its seed. The episodes of a group have the same row and seed, and must begin alike."""


class Remote(Environment):
    """A server behind `url`, and the connections to it that its episodes share."""

    config: ServerConfig
    url: str = ""
    pools: ClassVar[dict[Any, Pool]]

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self.id = uuid.uuid4().hex
        self._key = (asyncio.get_running_loop(), self.url, self.config.concurrency)
        self.pool = self.pools.setdefault(self._key, Pool(self.config.concurrency))
        self.pool.users += 1

    async def close(self) -> None:
        await self.pool.leave()
        if self.pool.users == 0:
            self.pools.pop(self._key, None)

    async def patiently(self, once: Callable[[], Awaitable[T]], repeats: tuple[type[Exception], ...]) -> T:
        """Repeat what fails in one of these ways, until `patience_s` after the first time.

        Raises Unreachable; RemoteFailed if it may not be reached, or has the request and does not answer.
        """
        loop = asyncio.get_running_loop()
        give_up, pause = math.inf, PAUSE_S
        while True:
            try:
                return await once()
            except EgressRefused as error:
                raise RemoteFailed(f"{self.url}: {error}") from None
            except (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost) as error:
                give_up = min(give_up, loop.time() + self.config.patience_s)
                refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, EgressRefused)
                if refused or not isinstance(error, repeats) or loop.time() + pause > give_up:
                    late = f"no answer within {self.config.request_timeout_s:g} s"
                    why = f"{self.url}: {str(error) or (late if isinstance(error, TimeoutError) else repr(error))}"
                    raise (RemoteFailed if refused or _unanswered(error) else Unreachable)(why) from None
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, LONGEST_PAUSE_S)


class Pool:
    """Connections that the episodes of one URL share; it is closed when none of them is left."""

    def __init__(self, limit: int) -> None:
        self.users = 0
        self.places = asyncio.Semaphore(limit)
        """Whoever uses a connection holds one, for a request or for an episode: waiting here has no time limit."""
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


class HttpRemote(Remote):
    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._begun = self._done = False

    async def open(self, row: int, seed: int) -> list[Message]:
        told = {self.config.row_key: row, self.config.seed_key: seed}
        body = {**self.config.config, **{key: value for key, value in told.items() if key}}
        self._begun = True
        answer = await self._post("reset", body, (aiohttp.ClientError, OSError, TimeoutError))
        observation, system = answer.get("observation"), answer.get("system_prompt")
        if type(observation) is not str or not isinstance(system, str | None):
            raise BadReply(f"{self.url}/reset must give observation, a string, and system_prompt, a string or null")
        return [*([Message(role="system", content=system)] if system else []), user(observation)]

    async def step(self, action: Action) -> Step:
        answer = await self._post("step", {"action": action.text}, (aiohttp.ClientConnectorError,))
        missing = {"observation", "reward", "done"} - answer.keys()
        observation, info = answer.get("observation"), answer.get("info") or {}
        if missing or type(observation) is not str or not isinstance(info, dict):
            raise BadReply(f"{self.url}/step must give observation (a string), reward, done, and info (an object)")
        self._done = bool(answer["done"])
        numbers = {name: value for name, value in info.items() if isinstance(value, int | float) and name.isascii()}
        return Step(
            messages=[user(observation)],
            reward=answer["reward"],
            done=answer["done"],
            truncated=self._done and is_truncation(info),
            metrics=dict(list(numbers.items())[:INFO_NUMBERS]),
        )

    async def _post(self, route: str, body: dict[str, Any], repeats: tuple[type[Exception], ...]) -> dict[str, Any]:
        data = orjson.dumps({**body, "instance_id": self.id, "job_id": self.config.job_id})
        timeout = aiohttp.ClientTimeout(total=self.config.request_timeout_s, sock_connect=10.0)

        async def once() -> dict[str, Any]:
            async with self.pool.session.post(
                f"{self.url.rstrip('/')}/{route}",
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                return self._answer(route, response.status, await limited(response))

        async with self.pool.places:
            return await self.patiently(once, repeats)

    async def close(self) -> None:
        """A server that keeps its games until they are finalized is told of one that was cut off."""
        try:
            if self._begun and not self._done:
                async with asyncio.timeout(CLOSE_S):
                    await self._post("finalize", {}, ())
        except (TimeoutError, RemoteFailed, Unreachable, BadReply):
            pass  # it has no such route, or is gone
        finally:
            await super().close()

    def _answer(self, route: str, status: int, raw: bytes) -> dict[str, Any]:
        said = raw[:SHOWN].decode(errors="replace")
        if status == 404 and route == "step":
            raise Unreachable(f"{self.url}/step knows no such instance any more (404): was the server restarted?")
        if status in AWAY:
            raise Unreachable(f"{self.url}/{route} answered {status}: {said}")
        if status != 200:
            raise RemoteFailed(f"{self.url}/{route} answered {status}: {said}")
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise BadReply(f"{self.url}/{route} did not answer with a JSON object: {said}")
        return answer


def _unanswered(error: Exception) -> bool:
    """A connection was there, and what was asked took too long: the same request may again. A WebSocket's server that
    refuses is there as well."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return error.status not in AWAY
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError)


async def limited(response: aiohttp.ClientResponse) -> bytes:
    """Raises BadReply."""
    raw = b""
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > REPLY_BYTES:
            response.close()
            raise BadReply(f"{response.url} answered with more than {REPLY_BYTES:,} bytes")
    return raw


class WebSocketRemote(Remote):
    """One connection per episode. A broken one is made anew, and what was asked on it is asked again."""

    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._asker: Asker | None = None
        self._reading: asyncio.Task[None] | None = None
        self._placed = False

    async def open(self, row: int, seed: int) -> Opening:
        request = OpenSession(
            job=self.config.job_id,
            session=self.id,
            environment=self.url,
            config=self.config.config,
            row=row,
            seed=seed,
            deadline_s=SESSION_S,
            answer_within_s=ANSWER_S,
            policy=self.policy,
        )
        self._placed = await self.pool.places.acquire()
        reply, pause = await self._ask("open", request), PAUSE_S
        while reply.busy or reply.opening:  # it says the latter after `answer_within_s`, or as fast as it likes
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
            reply = await self._ask("open", request)
        self.wants_tokens = reply.wants_tokens
        return Opening(
            messages=reply.messages,
            seat=reply.seat,
            stream=reply.stream,
            tools=reply.tools,
            prompt_ids=reply.prompt_ids,
            prompt_text=reply.prompt_text,
            max_tokens=reply.max_tokens,
            stop=reply.stop,
        )

    async def step(self, action: Action) -> Step:
        request = StepSession(
            session=self.id,
            turn=action.turn,
            seat=action.seat,
            text=action.text,
            stop=action.stop,
            tool_calls=action.tool_calls,
            problem=action.problem,
            words=action.words,
            ids=action.ids,
            logprobs=action.logprobs,
            prompt_tokens=action.prompt_tokens,
        )
        reply = await self._ask("step", request)
        if reply.busy or reply.opening:
            raise BadReply(f"{self.url} answered a turn as if it were an open: busy, or still opening")
        return Step(
            messages=reply.messages,
            reward=reply.reward,
            done=reply.done,
            truncated=reply.truncated,
            components=reply.components,
            seat=reply.seat,
            stream=reply.stream,
            tools=reply.tools,
            rewards=reply.rewards,
            prompt_ids=reply.prompt_ids,
            prompt_text=reply.prompt_text,
            max_tokens=reply.max_tokens,
            stop=reply.stop,
            metrics=reply.metrics,
        )

    async def _ask(self, verb: str, noun: OpenSession | StepSession) -> SessionReply:
        """Raises RemoteFailed, Unreachable, BadReply."""

        async def once() -> SessionReply:
            asker = await self._connected()
            async with asyncio.timeout(self.config.request_timeout_s):
                return sound(await asker.ask(verb, noun, SessionReply), "")

        try:
            reply = await self.patiently(once, (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost))
        except (WireError, BadFrame) as error:
            raise BadReply(f"{self.url}: {error}") from None
        if reply.failure == Ending.ENV_BAD_REPLY:
            raise BadReply(f"{self.url}: {reply.error}")
        if reply.failure == Ending.ENV_LOST:
            raise Unreachable(f"{self.url}: {reply.error}")
        if reply.failure is not None:
            raise RemoteFailed(f"{self.url}: {reply.error}")
        self.seats = tuple(dict.fromkeys((*self.seats, reply.seat, *reply.rewards)))  # the other side is the referee
        return reply

    async def _connected(self) -> Asker:
        """The connection, a new one if the last has ended. Raises aiohttp.ClientError, ConnectionLost, BadFrame."""
        if self._asker is not None and self._reading is not None and not self._reading.done():
            return self._asker
        await self._disconnect()
        socket = self._socket = await self.pool.session.ws_connect(
            self.url, heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=1.0)
        )
        await greet(socket)
        await socket.send_bytes(encode(Welcome(worker=self.id)))
        self._asker = Asker(socket)
        self._reading = asyncio.get_running_loop().create_task(_read(self._asker))
        return self._asker

    async def _disconnect(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._socket is not None:
            await self._socket.close()

    async def close(self) -> None:
        try:
            if self._asker is not None and self._reading is not None and not self._reading.done():
                async with asyncio.timeout(CLOSE_S):
                    await self._asker.ask("close", CloseSession(session=self.id), SessionReply)
        except (TimeoutError, ConnectionLost, WireError):
            pass  # the other side's deadline ends what nobody closes
        finally:
            if self._placed:
                self._placed = False
                self.pool.places.release()
            await self._disconnect()
            await super().close()


async def _read(asker: Asker) -> None:
    with contextlib.suppress(BadFrame):  # who is waiting for an answer is told
        await asker.run()


def at(url: str) -> type[Remote]:
    """The class of environments at this URL. Raises SpecError if it is none that may be reached."""
    try:
        scheme = Egress.of_process().split(url).scheme
    except EgressRefused as error:
        raise SpecError([{"field": "environment.name", "value": url, "problem": str(error)}]) from None
    base = HttpRemote if scheme in ("http", "https") else WebSocketRemote
    return type(base.__name__, (base,), {"url": url, "pools": {}})


def reach(url: str) -> None:
    """Blocking: resolve its name. Raises SpecError if it leads where jobs may not go."""
    try:
        Egress.of_process().check_blocking(url)
    except EgressRefused as error:
        raise SpecError([{"field": "environment.name", "value": url, "problem": str(error)}]) from None
