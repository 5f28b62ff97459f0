"""Environments behind URLs: the wire of environment servers over HTTP, and our frames over WebSockets."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
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
from opentinker.envs.registry import check, find
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.local.processes import free_port
from opentinker.serve.ws_server import listening
from opentinker.shared.messaging.websocket_frames import Hello, answer_calls, introduce
from opentinker.shared.security.egress import LOOPBACK, VARIABLE, Egress, EgressRefused
from opentinker.shared.types.core import Ending, Message, Tool
from opentinker.shared.types.env_protocol import IMPORTED, OPEN, CloseSession, OpenSession, SessionReply
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.samples.slow_imports import Gate, alive_importers
from tests.support.http_server import http_server
from tests.support.playing import opening, step


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(LOOPBACK))


class Game:
    """An environment server as the published wire has it: guess the parity of a number."""

    def __init__(self) -> None:
        self.instances: dict[str, int] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Any] = []
        """Instead of the right ones, oldest first: a body, a status, or None for the right one."""
        self.hang = asyncio.Event()
        self.hang.set()
        self.takes_s = 0.0
        """For each answer."""

    async def reset(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("reset", body))
        self.instances[body["instance_id"]] = random.Random(body["seed"]).randint(0, 99)
        number = self.instances[body["instance_id"]]
        return await self._answer({"observation": f"Is {number} odd?", "system_prompt": "Say yes or no."})

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("step", body))
        if body["instance_id"] not in self.instances:
            return web.json_response({"detail": "unknown instance"}, status=404)
        right = (body["action"] == "yes") == bool(self.instances[body["instance_id"]] % 2)
        info = {"right": right, "tries": 1, "why": "text"}
        return await self._answer({"observation": "", "reward": float(right), "done": True, "info": info})

    async def finalize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(("finalize", body))
        return web.json_response({"removed": self.instances.pop(body["instance_id"])})

    async def _answer(self, right: dict[str, Any]) -> web.Response:
        await self.hang.wait()
        await asyncio.sleep(self.takes_s)
        planned = self.answers.pop(0) if self.answers else None
        if isinstance(planned, int):
            return web.Response(status=planned, text="planned")
        if isinstance(planned, bytes):
            return web.Response(body=planned)
        return web.json_response(right if planned is None else right | planned)


@asynccontextmanager
async def server(game: Game, port: int = 0) -> AsyncIterator[str]:
    routes = web.post("/reset", game.reset), web.post("/step", game.step), web.post("/finalize", game.finalize)
    async with http_server(*routes, port=port) as url:
        try:
            yield url
        finally:
            game.hang.set()


class Playing:
    """One session at an env worker's `Sessions`."""

    def __init__(self, url: str, deadline_s: float = 20.0, **config: Any) -> None:
        self.sessions = Sessions("w", limit=8, resolver=Resolver(modules=False))
        options: dict[str, Any] = {"patience_s": 0.5, **config}
        request = opening(url, uuid.uuid4().hex, row=3, seed=5, deadline_s=deadline_s, **options)
        self.request = msgspec.structs.replace(request, answer_within_s=10.0)

    async def open(self) -> SessionReply:
        return await self.sessions.open(self.request)

    async def step(self, turn: int, text: str, **more: Any) -> SessionReply:
        return await self.sessions.step(step(turn, text, self.request.session, **more))

    async def close(self) -> None:
        await self.sessions.close(CloseSession(session=self.request.session))
        assert await self.sessions.drain(5.0) == 0


@asynccontextmanager
async def played(game: Game, **config: Any) -> AsyncIterator[Playing]:
    """An episode that has begun."""
    async with server(game) as url:
        playing = Playing(url, **config)
        await playing.open()
        yield playing


NUMBER = random.Random(5).randint(0, 99)
GOLD = "yes" if NUMBER % 2 else "no"


async def test_an_environment_server_is_played_over_http() -> None:
    game = Game()
    async with server(game) as url:
        playing = Playing(url, config={"difficulty": "easy"}, job_id="mine")
        opened = await playing.open()
        assert opened.messages == [Message(role="system", content="Say yes or no."), user(f"Is {NUMBER} odd?")]
        last = await playing.step(0, GOLD)
        assert (last.reward, last.done, last.metrics) == (1.0, True, {"right": 1.0, "tries": 1.0})
        await playing.close()
    (_, reset), (_, step) = game.requests
    assert reset == {"difficulty": "easy", "row": 3, "seed": 5, "instance_id": step["instance_id"], "job_id": "mine"}
    assert step == {"action": GOLD, "instance_id": reset["instance_id"], "job_id": "mine"}


async def test_siblings_begin_alike_and_are_not_told_what_they_should_not_be() -> None:
    game = Game()
    async with server(game) as url:
        opened = [await Playing(url, row_key="").open() for _ in range(3)]
    assert len({reply.messages[1].text for reply in opened}) == 1
    assert all("row" not in body for _, body in game.requests)
    assert len(game.instances) == 3


@pytest.mark.parametrize(
    ("answer", "ending", "reason"),
    [
        (500, Ending.ENV_ERROR, "answered 500: planned"),
        (503, Ending.ENV_LOST, "answered 503: planned"),
        (302, Ending.ENV_ERROR, "answered 302"),
        (b"not json", Ending.ENV_BAD_REPLY, "JSON object"),
        (b"[]", Ending.ENV_BAD_REPLY, "JSON object"),
        (b"x" * 2_000_000, Ending.ENV_BAD_REPLY, "more than"),
        ({"reward": "much"}, Ending.ENV_BAD_REPLY, "reward must be a number"),
        (b'{"observation": "", "reward": 1e999, "done": true}', Ending.ENV_BAD_REPLY, ""),
        ({"done": "yes"}, Ending.ENV_BAD_REPLY, "done must be True or False"),
        ({"observation": 5}, Ending.ENV_BAD_REPLY, "observation"),
        ({"observation": "x" * 300_000, "done": False}, Ending.ENV_BAD_REPLY, "bytes of messages"),
        ({"info": 5}, Ending.ENV_BAD_REPLY, "info"),
    ],
)
async def test_what_a_server_answers_is_checked(answer: Any, ending: Ending, reason: str) -> None:
    async with played(game := Game()) as playing:
        game.answers = [answer]
        reply = await playing.step(0, GOLD)
        assert reply.failure == ending and reason in reply.error
        assert "Traceback" not in reply.error


async def test_a_forgotten_instance_ends_the_episode_with_its_reason() -> None:
    async with played(game := Game()) as playing:
        game.instances.clear()
        reply = await playing.step(0, GOLD)
        assert reply.failure == Ending.ENV_LOST and "does not know this instance" in reply.error


async def test_a_step_is_never_sent_twice_and_hanging_ends_at_the_deadline() -> None:
    game = Game()
    async with server(game) as url:
        playing = Playing(url, deadline_s=2.0)
        await playing.open()
        game.hang.clear()
        reply = await playing.step(0, GOLD)
        assert reply.failure == Ending.ENV_TIMEOUT
        slow = Playing(url, request_timeout_s=1.0)
        game.hang.set()
        await slow.open()
        game.hang.clear()
        reply = await slow.step(0, GOLD)
        assert reply.failure == Ending.ENV_ERROR
    assert [route for route, _ in game.requests if route != "finalize"] == ["reset", "step", "reset", "step"]


async def test_a_server_that_is_away_is_waited_for_at_the_reset_and_then_given_up() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    gone = await Playing(url, patience_s=0.2).open()
    assert gone.failure == Ending.ENV_LOST and "Cannot connect" in gone.error
    opening = asyncio.create_task(Playing(url, patience_s=10.0).open())
    await asyncio.sleep(0)
    async with server(Game(), port):
        assert (await opening).failure is None


async def test_an_open_that_found_nobody_may_be_asked_for_again_under_the_same_id() -> None:
    port = free_port()
    playing = Playing(f"http://127.0.0.1:{port}", patience_s=0.0)
    assert (await playing.open()).failure == Ending.ENV_LOST
    async with server(Game(), port):
        assert (await playing.open()).failure is None
        await playing.close()


async def test_forbidden_urls_are_refused_at_submission_and_play(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game()
    async with server(game) as url:
        resolver = Resolver(modules=False)
        await resolver.check(url, {})
        monkeypatch.setenv(VARIABLE, "")
        with pytest.raises(SpecError, match="loopback"):
            await resolver.check(url, {})
        reply = await Playing(url).open()
        assert reply.failure == Ending.ENV_ERROR and "env_egress_allow" in reply.error
    assert game.requests == []
    for wrong, problem in (("http://user@h/", "user name"), ("http://h:22/", "port 22"), ("ws://", "form")):
        with pytest.raises(SpecError, match=problem):
            find(wrong)
    with pytest.raises(SpecError, match=r"environment\.config\.concurrency"):
        check("http://example.org/", {"concurrency": 0})


async def test_requests_at_once_are_limited_per_url_and_connections_end_with_the_episodes() -> None:
    game = Game()
    async with server(game) as url:
        playing = [Playing(url, concurrency=2) for _ in range(4)]
        for one in playing:
            await one.open()
        game.hang.clear()
        steps = [asyncio.create_task(one.step(0, GOLD)) for one in playing]
        await until(lambda: len(game.requests) == 6)
        assert len(game.requests) == 6
        game.hang.set()
        assert all(reply.done for reply in await asyncio.gather(*steps))
        pools = find(url).pools  # type: ignore[attr-defined]
        (pool,) = pools.values()
        for one in playing:
            await one.close()
        assert (pool.users, pool._session, pools) == (0, None, {})


async def test_who_waits_for_a_place_has_its_whole_time_for_the_answer() -> None:
    game = Game()
    game.takes_s = 0.25
    async with server(game) as url:
        playing = [Playing(url, concurrency=1, request_timeout_s=2.0, patience_s=0.0) for _ in range(12)]
        opened = await asyncio.gather(*(one.open() for one in playing))
        assert [reply.failure for reply in opened] == [None] * 12
        game.takes_s = 0.0
        for one in playing:
            await one.close()


async def test_a_server_is_told_of_games_that_were_cut_off() -> None:
    game = Game()
    async with server(game) as url:
        for answers in (0, 1):
            playing = Playing(url)
            await playing.open()
            for turn in range(answers):
                await playing.step(turn, GOLD)
            await playing.close()
    assert [route for route, _ in game.requests] == ["reset", "finalize", "reset", "step"]


# --- WebSockets -----------------------------------------------------------------------------------------------------


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
