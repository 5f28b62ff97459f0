"""Plays a served environment: an env worker of one class, without a transport.

Used by `opentinker env serve` and `serve_environment` in a user's process, which connects to a scheduler
(opentinker/serve/ws_client.py), and by `opentinker env serve --listen`, to which env workers connect.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from opentinker.envs import registry
from opentinker.envs.base import Environment
from opentinker.envs.game import AbstractGame, PlayedGame, environment_of
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.env_runner import EnvRunner, LocalEnvRunner
from opentinker.envs.runtime.preflight import check_request
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.env_protocol import (
    MAX_IMPORT_S,
    EnvCheck,
    EnvCheckReply,
    OpenSession,
    SessionReply,
    StepSession,
)

T = TypeVar("T")
THREADS = 64
"""Threads for calls of concurrent games."""


class InProcessServer:
    """Plays up to `capacity` concurrent sessions of a class of this process, or of `module:Class`.

    A class that blocks is played in child processes if they can import it (`module:Class`), otherwise in threads; calls
    of a game run one at a time.
    """

    def __init__(self, environment: type[Environment] | type[AbstractGame] | str, capacity: int) -> None:
        """Raises SpecError, or what the module raises."""
        if isinstance(environment, str):
            self.kind, self.title = registry.find(environment, modules=True), environment
            self._name = environment
        else:
            self.kind, self.title = _playable(environment), f"{environment.__module__}:{environment.__qualname__}"
            self._name = f"served:{uuid.uuid4().hex}"
            registry.lend(self._name, self.kind)
        self._resolver = Resolver(modules=True)
        self._host: ChildPool | None = None
        if self.kind.blocking and isinstance(environment, str):
            children = min(capacity, os.cpu_count() or 1)
            self._host = ChildPool(children=children, per_child=-(-capacity // children), modules=True)
        # the env worker enforces the operator's env_import_timeout_s and closes late sessions
        self.sessions = _Served(
            "", limit=capacity, resolver=self._resolver, host=self._host, import_timeout_s=MAX_IMPORT_S
        )

    async def play(self, verb: str, noun: Any) -> Any:
        """Answer one call (shared/messaging/websocket_frames.py)."""
        match verb:
            case "open":
                return await self.sessions.open(msgspec.structs.replace(noun, environment=self._name))
            case "step":
                return await self.sessions.step(noun)
            case "close":
                return await self.sessions.close(noun)
        return await self._check(noun)

    async def _check(self, request: EnvCheck) -> EnvCheckReply:
        ours = msgspec.structs.replace(request, name=self._name)
        return await check_request(self._resolver.check, self._resolver.find, ours)

    async def close(self, drain_s: float) -> int:
        """Let the running sessions finish within the time. Return the number of abandoned ones."""
        left = await self.sessions.drain(drain_s)
        if self._host is not None:
            await self._host.close()
        return left


def _playable(given: type[Environment] | type[AbstractGame]) -> type[Environment]:
    """Return the class to play. Games use the global random numbers of their process, so their calls run one at a time
    in a thread, except those of concurrent games."""
    kind = environment_of(given) if issubclass(given, AbstractGame) else given
    if not (issubclass(kind, PlayedGame) and kind.blocking):
        return kind
    lock = asyncio.Lock()

    async def call(_: PlayedGame, function: Callable[[], T]) -> T:
        await lock.acquire()
        running = asyncio.get_running_loop().run_in_executor(None, function)
        running.add_done_callback(ended)
        return await asyncio.shield(running)  # after a cancellation the thread still uses the random numbers

    def ended(running: asyncio.Future[Any]) -> None:
        lock.release()
        if not running.cancelled():
            running.exception()  # retrieved, because the caller may be gone

    pool = ThreadPoolExecutor(THREADS, "game")

    async def call_concurrently(_: PlayedGame, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    own = {"blocking": False, "call": call, "call_concurrently": call_concurrently, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


class _Served(Sessions):
    """Sessions that play what blocks in threads where there are no child processes."""

    def _runner(self, request: OpenSession, blocking: bool) -> EnvRunner | None:
        return ThreadEnvRunner() if blocking and self._host is None else super()._runner(request, blocking)


class ThreadEnvRunner:
    """Plays an environment that may block in a separate thread with its own event loop.

    A thread cannot be killed: one that hangs beyond its episode's deadline stays until the process ends.
    """

    def __init__(self) -> None:
        self._runner = LocalEnvRunner("", modules=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def open(self, request: OpenSession) -> SessionReply:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._runner.open(request), self._loop))

    async def step(self, request: StepSession) -> SessionReply:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._runner.step(request), self._loop))

    async def close(self) -> None:
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._runner.close(), self._loop))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
