"""Environments behind WebSocket URLs: our frames, imports, reconnections, and servers that are full or odd."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from aiohttp import web

from opentinker.envs import remote, remote_server
from opentinker.envs.base import Action, Environment, EnvironmentConfig, Opening, Step, user
from opentinker.envs.builtin.tictactoe import TicTacToe
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.serve.ws_server import listening
from opentinker.shared.messaging.websocket_frames import Hello, answer_calls, introduce
from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.types.core import Ending, Tool
from opentinker.shared.types.env_protocol import IMPORTED, OPEN, OpenSession, SessionReply
from tests.conftest import until
from tests.integration.rollout_worker.remote.remote_sessions import Game, Playing, server
from tests.samples.slow_imports import Gate, alive_importers
from tests.support.http_server import http_server

pytestmark = pytest.mark.usefixtures("loopback_allowed")


class Seats(Environment):
    """Two seats, tools, a new stream, rewards of others: whatever the protocol has."""

    class Config(EnvironmentConfig):
        greeting: str = "hello"

    config: Config
    seats = ("red", "blue")

    async def open(self, row: int, seed: int) -> Opening:
        tool = Tool(name="look", description="Look.", parameters={"type": "object"})
        return Opening(messages=[user(f"{self.config.greeting} {row} {seed}")], seat="blue", tools=[tool], max_tokens=7)

    async def step(self, action: Action) -> Step:
        if action.text == "raise":
            raise RuntimeError("planted")
        return Step(
            messages=[user("red's turn")],
            seat="red",
            stream="second",
            reward=0.5,
            rewards={"red": {"gift": 2.0}},
            done=action.turn == 1,
        )


async def test_everything_of_the_protocol_travels_over_a_websocket() -> None:
    async with listening(Seats, "127.0.0.1", 0, 8) as url:
        assert url.startswith("ws://127.0.0.1:")
        playing = Playing(url, config={"greeting": "good day"})
        opened = await playing.open()
        assert opened.failure is None, opened.error
        assert (opened.seat, opened.max_tokens, opened.tools[0].name) == ("blue", 7, "look")
        assert opened.messages == [user("good day 3 5")]
        reply = await playing.step(0, "a", seat="blue")
        assert (reply.seat, reply.stream, reply.rewards) == ("red", "second", {"red": {"gift": 2.0}})
        assert (await playing.step(1, "b", seat="red")).done
        await playing.close()


async def test_the_server_plays_the_bots_and_checks_them() -> None:
    async with listening(TicTacToe, "127.0.0.1", 0, 8) as url:
        playing = Playing(url)
        playing.request = msgspec.structs.replace(playing.request, bots={"first": "perfect"})
        opened = await playing.open()
        assert opened.failure is None, opened.error
        assert opened.seat == "second" and opened.messages[0].text.count("x") == 1, "the stone of the bot"
        await playing.close()
        playing = Playing(url)
        playing.request = msgspec.structs.replace(playing.request, bots={"first": "stockfish"})
        refused = await playing.open()
        assert refused.failure == Ending.ENV_ERROR and "TicTacToe has no bot 'stockfish'" in refused.error
        await playing.close()


async def test_websocket_import_is_no_episode_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    async with listening(gate.environment, "127.0.0.1", 0, 8) as url:
        playing, deadline_s = Playing(url, deadline_s=2.0), 2.0
        session = playing.request.session
        began = time.monotonic()
        await playing.sessions.open(msgspec.structs.replace(playing.request, answer_within_s=0.0))
        assert (await playing.step(IMPORTED, "")).importing_s == 0.0, "the env worker itself imports nothing"
        told = await playing.step(OPEN, "")
        assert told.opening and deadline_s < told.importing_s <= 120.0
        imported = asyncio.create_task(playing.step(IMPORTED, ""))
        await until(lambda: time.monotonic() > began + 2 * deadline_s)
        assert not imported.done()
        gate.file.touch()
        assert (await imported).failure is None
        opened = await playing.step(OPEN, "")
        assert opened.failure is None and opened.messages, opened.error
        assert (await playing.step(0, "x")).reward == 1.0
        await playing.close()
        assert session not in playing.sessions._sessions


async def test_websocket_import_after_a_wait_for_a_place_is_no_episode_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote(remote.WebSocketRemote):
        url = "ws://127.0.0.1:1"
        pools: ClassVar[dict[Any, Any]] = {}

    importing = SessionReply(worker="w", opening=True, importing_s=5.0)
    replies = [SessionReply(worker="w", busy=True), importing, importing, SessionReply(worker="w", opening=True)]
    asked: list[bool] = []  # whether the episode's clock stood still
    stopped = False

    @contextmanager
    def clock_stops() -> Iterator[None]:
        nonlocal stopped
        stopped = True
        yield
        stopped = False

    async def ask(self: Remote, method: str, request: OpenSession) -> SessionReply:
        asked.append(stopped)
        return replies.pop(0) if replies else SessionReply(worker="w", messages=[user("hello")])

    monkeypatch.setattr(Remote, "_ask", ask)
    environment = Remote(Remote.Config(config={}))
    environment.importing = clock_stops
    assert (await environment.open(0, 0)).messages == [user("hello")]
    assert asked == [False, False, True, True, False]
    await environment.close()


async def test_websocket_import_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(tmp_path, blocking=True, waits=f"os.getpid() != {os.getpid()}")
    async with listening(gate.environment, "127.0.0.1", 0, 8) as url:
        playing = Playing(url)
        playing.sessions = Sessions("w", limit=8, resolver=Resolver(modules=False), import_timeout_s=2.0)
        late = await playing.open()
        assert late.failure == Ending.ENV_TIMEOUT and "was not imported within 2 s" in late.error
        await until(lambda: gate.importers() and not alive_importers(gate))


async def test_failures_behind_a_websocket_keep_their_reason() -> None:
    async with listening(Seats, "127.0.0.1", 0, 8) as url:
        wrong = await Playing(url, config={"unknown": 1}).open()
        assert wrong.failure == Ending.ENV_ERROR and "environment.config.unknown" in wrong.error
        playing = Playing(url)
        await playing.open()
        reply = await playing.step(0, "raise", seat="blue")
        assert reply.failure == Ending.ENV_ERROR and "planted" in reply.error


async def test_an_episode_goes_on_after_its_websocket_broke() -> None:
    async with listening(Seats, "127.0.0.1", 0, 8) as url:
        playing = Playing(url)
        await playing.open()
        await playing.step(0, "a", seat="blue")
        session = playing.sessions._sessions[playing.request.session]
        transport = session.runner.environment._socket._response.connection.transport  # type: ignore[union-attr]
        transport.abort()
        assert (await playing.step(1, "b", seat="red")).done


async def test_a_full_server_is_waited_for() -> None:
    async with listening(Seats, "127.0.0.1", 0, 1) as url:
        first, second = Playing(url), Playing(url)
        await first.open()
        opening = asyncio.create_task(second.open())
        await until(lambda: second.sessions.active == 1)
        await first.close()
        assert (await opening).failure is None


async def test_a_server_that_is_none_of_ours_is_a_reason() -> None:
    async with server(Game()) as url:
        reply = await Playing(url.replace("http", "ws") + "/reset").open()
        assert reply.failure == Ending.ENV_ERROR and "ws://" in reply.error


async def test_a_websocket_does_not_follow_a_redirect() -> None:
    async def away(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(url.replace("ws", "http", 1))

    async with listening(Seats, "127.0.0.1", 0, 8) as url, http_server(web.get("/", away)) as there:
        reply = await Playing(f"{there.replace('http', 'ws')}/").open()
        assert reply.failure == Ending.ENV_ERROR and "a redirect to http://127.0.0.1" in reply.error
        async with Egress.of_process().session() as http:
            with pytest.raises(EgressRefused, match="not followed"):
                await http.get(f"{there}/")
            async with http.get(f"{there}/", allow_redirects=False) as response:
                assert response.status == 302


class Hasty:
    """A server that answers at once, and with what it likes."""

    def __init__(self, replies: list[SessionReply]) -> None:
        self.replies = replies
        self.asked: list[str] = []

    async def play(self, verb: str, noun: Any) -> Any:
        self.asked.append(verb)
        return self.replies[min(len(self.asked), len(self.replies)) - 1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await introduce(socket, Hello(process="p" * 32, capacity=4, environment="hasty"))
        await answer_calls(socket, self.play)
        return socket


@asynccontextmanager
async def hasty(*replies: SessionReply) -> AsyncIterator[tuple[Hasty, str]]:
    one = Hasty(list(replies))
    async with http_server(web.get("/", one.handle)) as there:
        yield one, f"{there.replace('http', 'ws')}/"


async def test_who_is_always_still_opening_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    pause = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await pause(0)

    replies = [*[SessionReply(worker="", opening=True)] * 12, SessionReply(worker="", messages=[user("x")])]
    async with hasty(*replies) as (one, url):
        playing = Playing(url)
        monkeypatch.setattr("opentinker.envs.remote.asyncio.sleep", noted)
        assert (await playing.open()).failure is None
        monkeypatch.undo()
        assert one.asked == ["open"] * 13
        assert len(pauses) == 12
        assert min(pauses) >= 0.5 * remote_server.PAUSE_S and max(pauses) <= 1.5 * remote_server.MAX_PAUSE_S
        assert min(pauses[-3:]) > max(pauses[:2])
        await playing.close()


@pytest.mark.parametrize("odd", [SessionReply(worker="", busy=True), SessionReply(worker="", opening=True)])
async def test_a_turn_that_is_answered_like_an_open_is_a_bad_reply(odd: SessionReply) -> None:
    async with hasty(SessionReply(worker="", messages=[user("x")]), odd) as (_, url):
        playing = Playing(url)
        assert (await playing.open()).failure is None
        assert (await playing.step(0, "a")).failure == Ending.ENV_BAD_REPLY
