"""An environment that runs in this process and is played by jobs elsewhere: one outgoing WebSocket to the scheduler.

    import opentinker

    with opentinker.serve_environment(Parity, name="parity") as served:          # in a separate thread
        client.submit({..., "environment": {"name": served.environment}})        # served:parity

    async with opentinker.AsyncServing(Parity, name="parity") as served:         # in this event loop
        ...

This machine needs no open port. A broken connection is re-established, with jitter, and running episodes continue.
Several processes that serve the same name share its episodes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp

from opentinker.envs.base import Environment
from opentinker.envs.game import AbstractGame
from opentinker.envs.runtime.in_process_server import InProcessServer
from opentinker.sdk.http import ApiError, Http, resource
from opentinker.sdk.loop_thread import LoopThread
from opentinker.sdk.wait_notice import Waiting, why
from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.websocket_frames import (
    FRAME_BYTES,
    GOODBYE,
    HEARTBEAT_S,
    BadFrame,
    ConnectionLost,
    answer_calls,
    hello_of,
    introduce,
)
from opentinker.shared.types.env_protocol import SERVED

if TYPE_CHECKING:
    from types import TracebackType

CONCURRENCY = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
DRAIN_S = 5.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
TRANSIENT = (408, 425, 429)
"""Statuses below 500 after which the same request may be accepted later."""
GOODBYE_S = 2.0


class AsyncServing:
    """Serves while the block runs. `environment`: a subclass of Environment or AbstractGame, or `module:Class`.

    `name` is the name for jobs, `served:NAME`; default: that of the class. `concurrency`: concurrent episodes; further
    ones wait or go to another process. `url` as for Client. Raises SpecError, or what importing the module raises.
    """

    def __init__(
        self,
        environment: type[Environment] | type[AbstractGame] | str,
        *,
        name: str | None = None,
        concurrency: int = CONCURRENCY,
        url: str | None = None,
        drain_s: float = DRAIN_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        if concurrency < 1:
            raise ApiError("concurrency must be at least 1")
        self._stage = InProcessServer(environment, concurrency)
        self.name = name or self._stage.kind.__name__
        if not NAME.fullmatch(self.name):
            raise ApiError(
                f"name {self.name!r} must be up to 64 letters, digits and -_. and begin with one of the former"
            )
        self.environment = SERVED + self.name
        """Value of environment.name in jobs."""
        self.connected = asyncio.Event()
        self.connections = 0
        """Made so far."""
        self._http = Http(url, 0.0, 0.0, on_wait)
        self.url = self._http.url
        self._drain_s = drain_s
        self._hello = hello_of(self._stage.title, concurrency)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._stopping = False
        self._running: asyncio.Task[None] | None = None

    @property
    def active(self) -> int:
        """Episodes that are being played."""
        return self._stage.sessions.active

    async def __aenter__(self) -> AsyncServing:
        """Returns when the first connection is made; waits for a server that is away. Raises ApiError if it refuses."""
        self._running = asyncio.get_running_loop().create_task(self._run(), name="serving")
        there = asyncio.get_running_loop().create_task(self.connected.wait())
        try:
            await asyncio.wait([self._running, there], return_when=asyncio.FIRST_COMPLETED)
            if self._running.done():
                self._running.result()
        except BaseException:
            await self.close(drain_s=0.0)
            raise
        finally:
            there.cancel()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await self.close(drain_s=self._drain_s if kind is None else 0.0)

    async def wait(self) -> None:
        """Wait until it is closed. Raises ApiError when the server refuses."""
        assert self._running is not None, "not begun: use `async with`"
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    async def close(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no new episodes, let the running ones finish within the time, say goodbye."""
        self._stopping = True
        await self._stage.close(drain_s)
        if self._socket is not None:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._socket.close(code=GOODBYE)
            except TimeoutError:
                pass
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self._http.close()

    # --- the connection -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Consumes calls of the scheduler, produces answers; reconnects until it is closed or refused."""
        backoff, waiting = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), self._http.waiting()
        while not self._stopping:
            try:
                ended, lasted = await self._connection(waiting)
            except (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost, BadFrame) as error:
                ended, lasted = why(error), False
            if self._stopping:
                return
            if lasted:
                backoff.reset()
                waiting.answered()
            waiting.failed(ended)
            await backoff.sleep()

    async def _connection(self, waiting: Waiting) -> tuple[str, bool]:
        """One, from its beginning to its end: why it ended, and whether it was one. Raises ApiError if refused."""
        path = resource("served", self.name)
        try:
            made = await self._http.websocket(path, waiting, heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES)
        except aiohttp.WSServerHandshakeError as error:
            if error.status < 500 and error.status not in TRANSIENT:
                raise ApiError(_refused(self.url, error.status), error.status) from None
            raise
        async with made as socket:
            try:
                await introduce(socket, self._hello)
            except ConnectionLost as error:
                if socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    raise ApiError(f"{self.url} refuses to have it served: {error}") from None
                raise
            self._socket = socket
            self.connections += 1
            self.connected.set()
            try:
                await answer_calls(socket, self._stage.play)
                return f"the connection ended, code {socket.close_code}", True
            except BadFrame as error:
                return str(error), True
            finally:
                self._socket = None
                self.connected.clear()


def _refused(url: str, status: int) -> str:
    hints = {
        401: "it asks for a key, or this one is over: set OPENTINKER_API_KEY or OPENTINKER_API_KEY_FILE",
        403: "the key lacks the scope environments:serve",
        404: "it knows no served environments: is it an OpenTinker server of this version?",
    }
    return f"{url} answered {status}: {hints.get(status, 'see its log')}"


class Serving:
    """`AsyncServing` in a separate thread; made by `serve_environment`."""

    def __init__(self, core: Callable[[], AsyncServing]) -> None:
        self._thread = LoopThread("opentinker-serving")
        try:
            self._core: AsyncServing = self._thread.call(_made(core))
        except BaseException:
            self._end_thread()
            raise
        self.name, self.environment, self.url = self._core.name, self._core.environment, self._core.url

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        self.close(drain_s=DRAIN_S if kind is None else 0.0)

    @property
    def connected(self) -> bool:
        return self._core.connected.is_set()

    @property
    def active(self) -> int:
        """Episodes that are being played."""
        return self._core.active

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is closed. Raises TimeoutError, or ApiError when the server refuses."""
        self._thread.call(asyncio.wait_for(self._core.wait(), timeout_s))

    def close(self, *, drain_s: float = DRAIN_S) -> None:
        """Take no new episodes, let the running ones finish within the time, say goodbye. May be called twice."""
        if self._thread.is_running:
            self._thread.call(self._core.close(drain_s=drain_s))
            self._end_thread()

    def _end_thread(self) -> None:
        self._thread.call(_settled())
        self._thread.end()


async def _made(core: Callable[[], AsyncServing]) -> AsyncServing:
    return await core().__aenter__()


async def _settled() -> None:
    """Wait until cancelled tasks have cleaned up."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=GOODBYE_S)


def serve_environment(
    environment: type[Environment] | type[AbstractGame] | str,
    *,
    name: str | None = None,
    concurrency: int = CONCURRENCY,
    url: str | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Serving:
    """Serve an environment from a thread of this process until it is closed; returns when the server has it.

    Arguments as for AsyncServing. Raises ApiError if the server refuses, SpecError if there is no such environment.
    """
    return Serving(lambda: AsyncServing(environment, name=name, concurrency=concurrency, url=url, on_wait=on_wait))
