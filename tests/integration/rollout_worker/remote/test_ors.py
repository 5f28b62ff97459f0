"""Episodes on a planned server of the Open Reward Standard; tests/nightly/test_ors.py has real ones."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from opentinker.envs.registry import check
from opentinker.envs.remote_server import REPLY_BYTES
from opentinker.shared.security.egress import VARIABLE
from opentinker.shared.types.core import Ending, Image, Text
from opentinker.shared.types.errors import SpecError
from tests.conftest import until
from tests.samples.session_player import Playing
from tests.support.http_server import http_server

SUBMIT = {"name": "submit", "description": "Hand in.", "input_schema": {"type": "object", "properties": {}}}
PNG = b"\x89PNG\r\n\x1a\n and more"
pytestmark = pytest.mark.usefixtures("loopback_allowed")


def done(reward: float | None = 1.0, *blocks: dict[str, Any], finished: bool = True) -> dict[str, Any]:
    return {"ok": True, "output": {"blocks": list(blocks), "metadata": None, "reward": reward, "finished": finished}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "detail": None}


class Planned:
    """Answers calls with what is planned, oldest first: an object, raw text, a status, or `hang up` after its name."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.prompt: Any = [text("What is 2+2?")]
        self.tools: Any = {"tools": [SUBMIT]}
        self.names: Any = ["sums", "other"]
        self.tasks: Any = 3
        self.by_task = True
        self.calls: list[dict[str, Any]] = []
        self.made: list[dict[str, Any]] = []
        self.sessions: set[str] = set()
        self.starting = 0
        """Requests that are still answered that the episode is being set up."""
        self.lost_creates = 0
        self.waiting: dict[str, Any] = {}

    async def create_session(self, _: web.Request) -> web.Response:
        sid = f"s{len(self.made)}"
        return web.Response(text=f": ping\r\n\r\nevent: task_id\r\ndata: {sid}\r\n\r\nevent: end\r\ndata: \r\n\r\n")

    async def create(self, request: web.Request) -> web.Response:
        self.made.append(await request.json())
        self.sessions.add(request.headers["X-Session-ID"])
        if self.lost_creates:
            self.lost_creates -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"sid": request.headers["X-Session-ID"]})

    async def delete(self, request: web.Request) -> web.Response:
        self.sessions.discard(request.headers["X-Session-ID"])
        return web.json_response({})

    async def get(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/list_environments":
            return web.json_response(self.names)
        assert path.startswith("/sums/") and request.headers["X-Session-ID"] in self.sessions
        if self.starting:
            self.starting -= 1
            return web.Response(status=503, headers={"X-Backend-State": "starting", "Retry-After": "2"})
        if path == "/sums/task_tools" and not self.by_task:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.prompt if path == "/sums/prompt" else self.tools)

    async def num_tasks(self, request: web.Request) -> web.Response:
        if (await request.json())["split"] != "train":
            return web.json_response({"detail": "Invalid split"}, status=400)
        return web.json_response({"num_tasks": self.tasks})

    async def call(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.calls.append(asked)
        task = asked.get("task_id")
        answer = self.waiting.pop(task, "event: error\ndata: unknown task_id\n\n") if task else self.answers.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no luck")
        response = web.StreamResponse()
        await response.prepare(request)
        if answer == "hang up":
            assert request.transport is not None
            request.transport.close()
            return response
        task = task or f"t{len(self.calls)}"
        await response.write(f"event: task_id\ndata: {task}\n\n".encode())
        if answer in ("break off", "restart"):
            if answer == "break off":
                self.waiting[task] = self.answers.pop(0)
            assert request.transport is not None
            request.transport.close()
            return response
        said = answer if isinstance(answer, str) else json.dumps(answer)
        if said.startswith("event:"):
            await response.write(said.encode())
            return response
        middle = len(said) // 2
        await response.write(f"event: chunk\ndata: {said[:middle]}\n\n".encode())
        await response.write(f"event: end\ndata: {said[middle:]}\n\n".encode())
        return response


@asynccontextmanager
async def planned(*answers: Any) -> AsyncIterator[tuple[Planned, str]]:
    server = Planned(*answers)
    routes = [
        web.post("/create_session", server.create_session),
        web.post("/create", server.create),
        web.post("/delete", server.delete),
        web.post("/delete_session", server.delete),
        web.post("/sums/num_tasks", server.num_tasks),
        web.post("/sums/call", server.call),
        web.get("/{path:.*}", server.get),
    ]
    async with http_server(*routes) as url:
        yield server, url


@asynccontextmanager
async def played(
    *answers: Any, config: dict[str, Any] | None = None, **server_has: Any
) -> AsyncIterator[tuple[Planned, Playing]]:
    """An episode that has begun, on a server that has these instead of what is usual."""
    async with planned(*answers) as (server, url):
        vars(server).update(server_has)
        playing = Playing(url, name="ors", **(config or {}))
        await playing.open()
        yield server, playing
        await playing.close()


async def test_an_episode_is_a_session_whose_tool_calls_earn_what_they_say() -> None:
    async with planned(done(0.25, text("go on"), finished=False), done(1.0, text("right"))) as (server, url):
        playing = Playing(url, name="ors", row=7, instruction="Answer by a tool.")
        assert await playing.open() == "Answer by a tool.\n\nWhat is 2+2?"
        assert [tool.name for tool in playing.opened.tools] == ["submit"]
        first = await playing.say("", ("submit", {"answer": "5"}))
        assert (first.reward, first.done, first.messages[0].text) == (0.25, False, "go on")
        (result,) = first.messages
        assert (result.role, result.tool_call_id, result.name) == ("tool", "c0", "submit")
        last = await playing.say("", ("submit", {"answer": "4"}))
        assert (last.reward, last.done) == (1.0, True)
        assert last.metrics == {"return": 1.25, "illegal": 0.0}
        await playing.close()
        await until(lambda: not server.sessions)
    assert server.made == [{"env_name": "sums", "split": "train", "index": 1}]
    assert server.calls[1] == {"name": "submit", "input": {"answer": "4"}}


async def test_a_refused_call_and_a_turn_without_one_cost_and_say_why() -> None:
    answers = {"ok": False, "error": "submit needs an answer"}, done(None)
    async with played(*answers, config={"max_illegal": 2}, by_task=False) as (_, playing):
        refused = await playing.say("", ("submit", {}))
        assert (refused.reward, refused.done) == (-0.1, False)
        assert refused.messages[0].role == "tool" and "submit needs an answer" in refused.messages[0].text
        silent = await playing.say("4")
        assert (silent.done, silent.components) == (True, {"illegal": -0.1})


async def test_a_turn_without_a_call_goes_to_the_terminal_tool() -> None:
    tools = {"tools": [], "terminal_tool": {"name": "grade", "arg": "answer", "description": ""}}
    async with played(done(0.5), tools=tools) as (server, playing):
        last = await playing.say("It is 4.")
        assert (last.reward, last.done, playing.opened.tools) == (0.5, True, [])
        assert server.calls == [{"name": "grade", "input": {"answer": "It is 4."}}]


async def test_pictures_are_shown() -> None:
    picture = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(PNG).decode()}
    async with played(prompt=[text("Look:"), picture]) as (_, playing):
        assert playing.opened.messages[0].content == [Text("Look:"), Image(PNG)]


async def test_a_call_whose_connection_breaks_is_made_once() -> None:
    async with played("break off", done(1.0)) as (server, playing):
        assert (await playing.say("", ("submit", {"answer": "4"}))).reward == 1.0
        assert [call.get("task_id") for call in server.calls] == [None, "t1"]
    async with played("hang up") as (server, playing):
        lost = await playing.say("", ("submit", {"answer": "4"}))
        assert lost.failure == Ending.ENV_LOST and len(server.calls) == 1, "it may have been made"


async def test_a_server_that_has_forgotten_a_call_loses_the_episode() -> None:
    async with played("restart") as (server, playing):
        lost = await playing.say("", ("submit", {"answer": "4"}))
        assert lost.failure == Ending.ENV_LOST and "unknown task_id" in (lost.error or ""), lost.error
        assert [call.get("task_id") for call in server.calls] == [None, "t1"]


async def test_an_episode_that_is_being_set_up_is_waited_for() -> None:
    async with planned() as (server, url):
        server.starting = 2
        playing = Playing(url, name="ors")
        assert await playing.open() == "What is 2+2?"
        await playing.close()
        server.starting = 10_000
        late = Playing(url, name="ors", request_timeout_s=0.3)
        opened = await late.sessions.open(late.request)
        assert opened.failure == Ending.ENV_LOST and "still being set up" in (opened.error or ""), opened.error
        await late.close()


async def test_a_session_that_is_made_again_leaves_none_behind() -> None:
    async with played(config={"patience_s": 10.0}, lost_creates=1) as (server, _):
        assert len(server.made) == 2 and len(server.sessions) == 1
    await until(lambda: not server.sessions)


async def test_calls_after_a_refused_one_are_answered_and_not_played() -> None:
    async with played(done(0.5, finished=False), {"ok": False, "error": "no " * 100_000}) as (server, playing):
        reply = await playing.say("", ("submit", {"n": 1}), ("submit", {"n": 2}), ("submit", {"n": 3}))
        assert [message.tool_call_id for message in reply.messages] == ["c0", "c1", "c2"]
        assert len(reply.messages[1].text) < 5000 and reply.messages[2].text.startswith("not played")
        assert len(server.calls) == 2 and reply.components == {"illegal": -0.1, "reward": 0.5}


@pytest.mark.parametrize(
    ("answer", "ending", "reason"),
    [
        ("not json", Ending.ENV_BAD_REPLY, "/sums/call: not a ToolReply"),
        ({"ok": True}, Ending.ENV_BAD_REPLY, "has no output"),
        (done(1e400), Ending.ENV_BAD_REPLY, "not a ToolReply"),
        ("x" * (REPLY_BYTES + 1), Ending.ENV_BAD_REPLY, "more than 1,048,576 bytes"),
        ("event: error\ndata: out of luck\n\n", Ending.ENV_ERROR, "submit: out of luck"),
        (410, Ending.ENV_ERROR, "answered 410: no luck"),
        (503, Ending.ENV_LOST, "answered 503"),
        (done(0.0, {"type": "image", "data": "?"}, finished=False), Ending.ENV_BAD_REPLY, "is not valid base64"),
    ],
)
async def test_answers_that_are_none_end_the_episode(answer: Any, ending: Ending, reason: str) -> None:
    async with played(answer) as (_, playing):
        reply = await playing.say("", ("submit", {"answer": "4"}))
        assert reply.failure == ending and reason in (reply.error or ""), reply.error


@pytest.mark.parametrize(
    ("settings", "server_has", "reason"),
    [
        ({"split": "test"}, {}, 'answered 400: {"detail": "Invalid split"}'),
        ({}, {"tasks": 0}, "0 tasks in split 'train'"),
        ({"environment": "smus"}, {}, "has no environment 'smus'; there are: sums, other"),
        ({}, {"tools": {"tools": [{**SUBMIT, "name": "a b"}]}}, "no blanks"),
        ({}, {"names": []}, "not the names of environments"),
        ({}, {"names": ["../create"]}, "not the names of environments"),
        ({}, {"tools": {"tools": []}}, "1 to 64 can be offered"),
        ({}, {"tools": {"tools": [SUBMIT, SUBMIT]}}, "the same name"),
        ({}, {"prompt": "text"}, "/sums/prompt: not a"),
    ],
)
async def test_a_server_that_cannot_be_played_is_said_so(
    settings: dict[str, Any], server_has: dict[str, Any], reason: str
) -> None:
    async with planned() as (server, url):
        vars(server).update(server_has)
        playing = Playing(url, name="ors", **settings)
        opened = await playing.sessions.open(playing.request)
        assert opened.failure in (Ending.ENV_ERROR, Ending.ENV_BAD_REPLY)
        assert reason in (opened.error or ""), opened.error
        await playing.close()


def test_addresses_that_may_not_be_reached_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    for url, reason in {
        "http://127.0.0.1:1": "127.0.0.1",
        "http://x.test/?a=1": "query",
        "ftp://x.test": "ftp",
    }.items():
        with pytest.raises(SpecError, match=reason):
            check("ors", {"url": url})
