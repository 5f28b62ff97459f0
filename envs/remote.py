"""Environments behind a URL: `environment.name = "http://..."` or `"ws://..."`, connected through the egress guard.

http(s)://  The protocol of OpenTinker's environment servers, which any language can implement: POST /reset
            {instance_id, job_id, ...} returns {observation, system_prompt}, POST /step {instance_id, job_id, action}
            returns {observation, reward, done, info}; an unknown instance is a 404. Numbers in `info` become metrics.
ws(s)://    Our frames (shared/messaging/websocket_frames.py), as served by `opentinker env serve --listen`; they carry
            seats and tools too.

The episode's deadline covers everything but the import of an environment whose WebSocket server reports that it is
being imported; HTTP has no way to say so. A reset, and any call in frames, is idempotent and is retried while the
server is unavailable. A step over HTTP might be played twice, so it is retried only if no connection was made. A
server that stays unavailable is not a failure of the environment: the session is lost and its episode is played
again. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import aiohttp
import msgspec
import orjson
from pydantic import BaseModel, Field

from opentinker.envs.base import (
    Action,
    BadReply,
    Opening,
    Prompt,
    Step,
    Unreachable,
    fields_of,
    is_truncation,
    user,
)
from opentinker.envs.import_clock import ImportClock
from opentinker.envs.remote_server import (
    CLOSE_S,
    MAX_PAUSE_S,
    PAUSE_S,
    Remote,
    RemoteFailed,
    ServerConfig,
    check_status,
    object_of,
    read_limited,
)
from opentinker.shared.backoff import Backoff
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
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, SeatAction, SessionReply, StepSession
from opentinker.shared.types.errors import SpecError

MAX_INFO_METRICS = 64
SESSION_S = 3600.0
"""Deadline on the server's side, for sessions that are never closed; the episode's deadline here is shorter."""
ANSWER_S = 5.0
IMPORT_POLL_S = 0.25
"""Between questions whether the other side has imported its environment."""


class RemoteConfig(ServerConfig):
    config: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Config of the environment: sent with every reset over HTTP, as the environment's config over WebSockets."""
    job_id: Annotated[str, Field(min_length=1, max_length=200)] = "default"
    """HTTP only: the key of the server's statistics."""
    row_key: Annotated[str, Field(max_length=100)] = "row"
    """HTTP only: the field of a reset that holds the episode's row; empty: the row is not sent."""
    seed_key: Annotated[str, Field(max_length=100)] = "seed"
    """HTTP only: likewise for the seed. Episodes of a group have the same row and seed, and must start alike."""


class HttpRemote(Remote):
    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._begun = self._done = False

    async def open(self, row: int, seed: int) -> list[Message]:
        start = {self.config.row_key: row, self.config.seed_key: seed}
        body = {**self.config.config, **{key: value for key, value in start.items() if key}}
        self._begun = True
        answer = await self._post("reset", body, (aiohttp.ClientError, OSError, TimeoutError))
        observation, system = answer.get("observation"), answer.get("system_prompt")
        if type(observation) is not str or not isinstance(system, str | None):
            raise BadReply(f"{self.url}/reset must return observation, a string, and system_prompt, a string or null")
        return [*([Message(role="system", content=system)] if system else []), user(observation)]

    async def step(self, action: Action) -> Step:
        answer = await self._post("step", {"action": action.text}, (aiohttp.ClientConnectorError,))
        missing = {"observation", "reward", "done"} - answer.keys()
        observation, info = answer.get("observation"), answer.get("info") or {}
        if missing or type(observation) is not str or not isinstance(info, dict):
            raise BadReply(f"{self.url}/step must return observation (a string), reward, done, and info (an object)")
        self._done = bool(answer["done"])
        numbers = {name: value for name, value in info.items() if isinstance(value, int | float) and name.isascii()}
        return Step(
            messages=[user(observation)],
            reward=answer["reward"],
            done=answer["done"],
            truncated=self._done and is_truncation(info),
            metrics=dict(list(numbers.items())[:MAX_INFO_METRICS]),
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
                return self._answer(route, response.status, await read_limited(response))

        async with self.pool.places:
            return await self.with_retries(once, repeats)

    async def close(self) -> None:
        """Finalize an episode that was cut off, for servers that keep games until then."""
        try:
            if self._begun and not self._done:
                async with asyncio.timeout(CLOSE_S):
                    await self._post("finalize", {}, ())
        except (TimeoutError, RemoteFailed, Unreachable, BadReply):
            pass  # it has no such route, or is gone
        finally:
            await super().close()

    def _answer(self, route: str, status: int, raw: bytes) -> dict[str, Any]:
        if status == 404 and route == "step":
            raise Unreachable(f"{self.url}/step does not know this instance (404); was the server restarted?")
        check_status(f"{self.url}/{route}", status, raw)
        return object_of(raw, f"{self.url}/{route}")


class WebSocketRemote(ImportClock, Remote):
    """One connection per episode. A broken connection is replaced and its pending request is sent again."""

    Config = RemoteConfig
    config: RemoteConfig
    bots = None

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._asker: Asker | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked = SessionReply(worker="")

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
            bots=dict(self.bot_seats),
        )
        await self.take_place()
        soon = msgspec.structs.replace(request, answer_within_s=IMPORT_POLL_S)
        reply, backoff = await self._ask("open", soon), Backoff(PAUSE_S, MAX_PAUSE_S, factor=1.5)
        while reply.busy or reply.opening:  # `opening` comes after `answer_within_s`, or sooner
            if reply.importing_s > 0.0:
                with self.importing():
                    while reply.opening and reply.importing_s > 0.0:
                        await asyncio.sleep(IMPORT_POLL_S)
                        reply = await self._ask("open", soon)
            else:
                await backoff.sleep()
                reply = await self._ask("open", soon if reply.busy else request)
        self.wants_tokens = reply.wants_tokens
        self._asked = reply
        return Opening(**_next_turn(reply))

    async def step(self, action: Action) -> Step:
        return await self.step_all([action])

    async def step_all(self, actions: list[Action]) -> Step:
        seats = [SeatAction(**fields_of(SeatAction, one)) for one in actions]
        reply = await self._ask("step", self._asked.step(self.id, actions[0].turn, seats))
        if reply.busy or reply.opening:
            raise BadReply(f"{self.url} answered a turn as if it were an open: busy, or still opening")
        self._asked = reply
        return Step(
            reward=reply.reward,
            done=reply.done,
            truncated=reply.truncated,
            components=reply.components,
            rewards=reply.rewards,
            metrics=reply.metrics,
            **_next_turn(reply),
        )

    async def _ask(self, verb: str, noun: OpenSession | StepSession) -> SessionReply:
        """Send a request and return its reply. Raise RemoteFailed, Unreachable or BadReply."""

        async def once() -> SessionReply:
            asker = await self._connect()
            async with asyncio.timeout(self.config.request_timeout_s):
                return sound(await asker.ask(verb, noun, SessionReply), "")

        try:
            reply = await self.with_retries(once, (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost))
        except (WireError, BadFrame) as error:
            raise BadReply(f"{self.url}: {error}") from None
        if reply.failure == Ending.ENV_BAD_REPLY:
            raise BadReply(f"{self.url}: {reply.error}")
        if reply.failure == Ending.ENV_LOST:
            raise Unreachable(f"{self.url}: {reply.error}")
        if reply.failure is not None:
            raise RemoteFailed(f"{self.url}: {reply.error}")
        named = (*(prompt.seat for prompt in reply.prompts), *reply.rewards)
        self.seats = tuple(dict.fromkeys((*self.seats, *named)))  # the other side is the referee
        return reply

    async def _connect(self) -> Asker:
        """Return the connection, a new one if the last has ended. Raise aiohttp.ClientError, ConnectionLost or
        BadFrame."""
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
            pass  # the server's own deadline ends the session
        finally:
            await self._disconnect()
            await super().close()


def _next_turn(reply: SessionReply) -> dict[str, Any]:
    """Return the fields of an Opening or Step that say who acts next, and what each sees."""
    if reply.round:
        return {"acting": {prompt.seat: Prompt(**fields_of(Prompt, prompt)) for prompt in reply.round}}
    return {"seat": reply.seat, **fields_of(Prompt, reply)}


async def _read(asker: Asker) -> None:
    with contextlib.suppress(BadFrame):  # pending requests fail with ConnectionLost
        await asker.run()


def environment_at(url: str) -> type[Remote]:
    """Return the environment class of this URL. Raise SpecError if the egress guard refuses the URL."""
    try:
        scheme = Egress.of_process().split(url).scheme
    except EgressRefused as error:
        raise SpecError.of("environment.name", url, str(error)) from None
    base = HttpRemote if scheme in ("http", "https") else WebSocketRemote
    return type(base.__name__, (base,), {"url": url, "pools": {}})


def check_reachable(url: str) -> None:
    """Resolve the URL's host (blocking). Raise SpecError if jobs may not connect to it."""
    try:
        Egress.of_process().check_blocking(url)
    except EgressRefused as error:
        raise SpecError.of("environment.name", url, str(error)) from None
