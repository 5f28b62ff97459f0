"""MCP servers that say more than they may, over stdio and over HTTP: bounded, and told to whoever asked."""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web

from opentinker.envs.runtime.tools import mcp_http
from opentinker.envs.runtime.tools.mcp_client import McpConnection
from opentinker.envs.runtime.tools.mcp_limits import MESSAGE_BYTES, UNASKED_BYTES, UNASKED_MESSAGES, Allowance, TooMuch
from opentinker.envs.tool_limits import bounded_tools, depth_beyond
from opentinker.envs.tools import RESULT_BYTES, NoTools, run_tool
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.types.core import Tool, ToolCall
from tests.conftest import soon
from tests.samples import mcp_hostile
from tests.support.http_server import http_server

TIMEOUT_S = 60.0


@asynccontextmanager
async def connected(**place: Any) -> AsyncIterator[McpConnection]:
    connection = await McpConnection.open(ToolSpec.model_validate({"type": "mcp", "timeout_s": TIMEOUT_S, **place}))
    try:
        yield connection
    finally:
        await connection.close()


def server(how: str) -> AbstractAsyncContextManager[McpConnection]:
    return connected(command=[sys.executable, "-I", str(Path(mcp_hostile.__file__)), how])


async def asked(connection: McpConnection) -> tuple[bool, str]:
    """Return whether the call failed, and what the policy is told."""
    offered = {one.tool.name: one for one in connection.offered}
    outcome = await soon(run_tool(offered, ToolCall(id="c", name="ask", arguments={})))
    return outcome.failed, outcome.text


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("many tools", "it has 65 tools; 1 to 64 can be offered"),
        ("endless pages", "its list of tools does not end"),
        ("long description", "the description of its tool 'ask' has 10,000 bytes; at most 8,192"),
        ("large schema", "the schema of its tool 'ask' has"),
        ("deep schema", "nested deeper than 32 levels"),
        ("same name", "two of its tools have the same name"),
        ("no tools", "it has 0 tools"),
    ],
)
async def test_tools_that_are_described_without_measure_are_refused(how: str, reason: str) -> None:
    with pytest.raises(NoTools, match="cannot be used") as refused:
        async with server(how):
            pass
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("long line", f"it said a message of more than {MESSAGE_BYTES:,} bytes"),
        ("line without end", f"it said a message of more than {MESSAGE_BYTES:,} bytes"),
        ("notifications", f"or {UNASKED_MESSAGES:,} messages to one request"),
        ("pings", f"it said more than {UNASKED_BYTES:,} bytes"),
    ],
)
async def test_a_program_that_says_too_much_to_a_call_is_gone_and_the_policy_hears_why(how: str, reason: str) -> None:
    async with server(how) as connection:
        for _ in range(2):
            failed, text = await asked(connection)
            assert failed and "the server of this tool is gone" in text and reason in text
        assert connection.broken


@pytest.mark.parametrize("how", ["silence", *mcp_hostile.LIES])
async def test_a_server_that_hangs_or_lies_costs_the_call_alone(how: str) -> None:
    async with server(how) as connection:
        hurried = [msgspec.structs.replace(one, timeout_s=1.0) for one in connection.offered]
        offered = {one.tool.name: one for one in hurried}
        lied = await soon(run_tool(offered, ToolCall(id="c", name="ask", arguments={})))
        assert lied.failed and len(lied.text) <= RESULT_BYTES and "theirs" not in lied.text
        assert await asked(connection) == (False, "a")
        assert not connection.broken


async def test_of_a_result_with_many_parts_some_are_shown() -> None:
    async with server("many parts") as connection:
        failed, text = await asked(connection)
        assert not failed and len(text) <= RESULT_BYTES and "744 more parts are left out" in text
        assert not connection.broken


def test_what_is_said_counts_until_something_is_asked_again() -> None:
    allowance = Allowance()
    for _ in range(UNASKED_BYTES // MESSAGE_BYTES):
        allowance.take(MESSAGE_BYTES)
    with pytest.raises(TooMuch):
        allowance.take(1)
    allowance.renew()
    allowance.take(1)
    with pytest.raises(TooMuch):
        allowance.take(MESSAGE_BYTES + 1)


def test_all_descriptions_together_are_bounded() -> None:
    tools = [Tool(name=f"t{number}", description="a" * 8000, parameters={}) for number in range(30)]
    assert bounded_tools(tools[:20]) == tools[:20]
    with pytest.raises(ValueError, match="are described in 240,"):
        bounded_tools(tools)


def test_depth_is_seen_without_descending() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert depth_beyond(deep, 32) and not depth_beyond([[1]], 2) and depth_beyond([[[1]]], 2)


# --- over HTTP ------------------------------------------------------------------------------------------------------


class Http:
    """Answers calls as `how` says; counts the streams that are asked for."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.streams: list[float] = []

    async def post(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        if "id" not in asked:
            return web.Response(status=202)
        answer = orjson.dumps(mcp_hostile.answer("", asked))
        headers = {"Content-Type": "application/json", "mcp-session-id": "s"}
        if asked["method"] != "tools/call":
            return web.Response(body=answer, headers=headers)
        if self.how == "compressed":
            bomb = gzip.compress(b'{"x": "' + b"a" * (64 << 20) + b'"}')
            return web.Response(body=bomb, headers={**headers, "Content-Encoding": "gzip"})
        if self.how == "large":
            return web.Response(body=b" " * (2 * MESSAGE_BYTES) + answer, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = b": nothing\n" * 100_000 if self.how == "comments" else b"data: " + b"a" * (1 << 20)
        try:
            for _ in range(64):
                await response.write(chunk)
        except ConnectionError:  # nobody listens any more
            pass
        return response

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.streams.append(asyncio.get_running_loop().time())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"retry: 0\n\n")
        return response


@asynccontextmanager
async def over_http(how: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Http, McpConnection]]:
    monkeypatch.setenv("OPENTINKER_ENV_EGRESS_ALLOW", "127.0.0.0/8")
    one = Http(how)
    async with (
        http_server(web.post("/mcp", one.post), web.get("/mcp", one.get)) as url,
        connected(url=f"{url}/mcp") as connection,
    ):
        yield one, connection


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("compressed", "it answered compressed (gzip), which it was asked not to"),
        ("large", f"it answered with more than {MESSAGE_BYTES:,} bytes"),
        ("comments", f"it answered with more than {UNASKED_BYTES:,} bytes"),
        ("event", "Server-sent event exceeded"),
    ],
)
async def test_http_answers_are_bounded(how: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with over_http(how, monkeypatch) as (_, connection):
        failed, text = await asked(connection)
        assert failed and reason in text


async def test_streams_that_end_immediately_are_reopened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            enough.set()
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)

    enough = asyncio.Event()
    monkeypatch.setattr(mcp_http, "sleep", paused)
    async with over_http("", monkeypatch) as (one, _):
        await soon(enough.wait())
        assert len(one.streams) <= len(pauses)
    first, *later = pauses[:4]
    assert first == 0.0 and all(seconds > 0 for seconds in later)
    assert later == sorted(later)
