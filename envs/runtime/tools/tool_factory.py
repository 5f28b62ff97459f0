"""Checks the tools of jobs (`environment.tools`) and opens them for episodes, in one env worker.

kind                   shared by
python, monty          interpreters: all episodes, one at a time; variables: one episode
python, sandbox        sandboxes: the episodes of a job; nothing remains from one program to the next
mcp                    one episode; with `shared` the episodes of a job
functions              imported once; calls that do not return are counted over all episodes
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Any

import msgspec
from pydantic import ValidationError

from opentinker.envs.runtime.tools.functions import Functions
from opentinker.envs.runtime.tools.mcp_client import McpConnection
from opentinker.envs.runtime.tools.python_monty import MontyInterpreters, MontySession
from opentinker.envs.runtime.tools.python_sandbox import Programs
from opentinker.envs.runtime.tools.refcounted_pool import RefcountedPool
from opentinker.envs.tools import NoTools, OfferedTool
from opentinker.shared.config import Settings
from opentinker.shared.sandbox.sandbox import Sandbox, Unavailable
from opentinker.shared.security.egress import Egress, EgressRefused
from opentinker.shared.spec.tools import ToolSpec
from opentinker.shared.types.env_protocol import EnvRows, EnvRowsReply
from opentinker.shared.types.mistakes import mistakes_of

NAME = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")
NEEDS = {"python": ("pydantic_monty", "pydantic-monty"), "mcp": ("mcp", "mcp")}
Mistakes = list[dict[str, Any]]


class ToolFactory:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._interpreters: RefcountedPool[MontyInterpreters] = RefcountedPool()
        self._programs: RefcountedPool[Programs] = RefcountedPool()
        self._connections: RefcountedPool[McpConnection] = RefcountedPool()
        self._functions = Functions()

    async def close(self) -> None:
        await asyncio.gather(self._interpreters.close(), self._programs.close(), self._connections.close())

    # --- before a job ---------------------------------------------------------------------------------------------

    async def check(self, tools: Sequence[dict[str, Any]]) -> Mistakes:
        """Return the mistakes in the tools of a job spec, by field. Servers are not contacted."""
        mistakes: Mistakes = []
        names: dict[str, int] = {}
        for place, plain in enumerate(tools):
            field = f"environment.tools.{place}"
            try:
                spec = ToolSpec.model_validate(plain)
            except ValidationError as error:  # the scheduler has found the same
                found = [m for item in error.errors(include_url=False) for m in mistakes_of(item)]
                mistakes += [{**mistake, "field": f"{field}.{mistake['field']}"} for mistake in found]
                continue
            try:
                offered = await self._tried(spec)
                for name in offered:
                    if names.setdefault(name, place) != place:
                        raise NoTools(f"tool {name!r} is there twice")
            except (NoTools, EgressRefused, Unavailable) as error:
                named = {"mcp": "url" if spec.url else "command", "functions": "module"}.get(spec.type, "backend")
                mistakes.append({"field": f"{field}.{named}", "value": plain.get(named), "problem": str(error)})
        return mistakes

    async def _tried(self, spec: ToolSpec) -> list[str]:
        """Return the names of its tools, as far as known without connecting."""
        self._check_allowed(spec)
        if spec.type == "functions":
            loaded = await asyncio.to_thread(self._functions.load, spec)
            return [_check_name(one).tool.name for one in loaded]
        if spec.url is not None:
            await Egress.of_process().check(spec.url)
        if spec.type == "python" and spec.backend == "sandbox":
            await Sandbox.open(self._settings)
        return ["python"] if spec.type == "python" else []

    def _check_allowed(self, spec: ToolSpec) -> None:
        """Raises NoTools."""
        if spec.command and not self._settings.env_tool_commands:
            raise NoTools("programs as MCP servers are switched off here (operator setting env_tool_commands)")
        if spec.type == "functions" and not self._settings.env_modules:
            raise NoTools("functions of modules are switched off here (operator setting env_modules)")
        most = self._settings.sandbox_memory_mb
        if spec.type == "python" and spec.memory > most:
            raise NoTools(f"memory_mb = {spec.memory}: at most {most} here (operator setting sandbox_memory_mb)")
        module, package = NEEDS.get(spec.type, ("", ""))
        if module and spec.backend == "monty" and find_spec(module) is None:
            raise NoTools(f"{package} is not installed on the env worker: pip install 'opentinker[tools]'")

    # --- for an episode -------------------------------------------------------------------------------------------

    async def open(self, job: str, tools: Sequence[dict[str, Any]]) -> Tools:
        """Open all tools or none. Raise NoTools, Unavailable."""
        async with AsyncExitStack() as held:
            offered: list[OfferedTool] = []
            for plain in tools:
                spec = ToolSpec.model_validate(plain)
                self._check_allowed(spec)
                offered += [_check_name(one) for one in await self._open_tool(job, spec, held)]
            return Tools(offered, held.pop_all())

    async def offer(self, request: EnvRows, reply: EnvRowsReply) -> EnvRowsReply:
        """Return the reply with the job's tools, which are opened for a moment to know them."""
        if not request.tools:
            return reply
        try:
            opened = await self.open(request.job, request.tools)
        except (NoTools, Unavailable, EgressRefused) as error:
            return EnvRowsReply(problem=f"the tools of the job cannot be opened: {error}")
        await opened.close()
        return msgspec.structs.replace(reply, tools=[*reply.tools, *(one.tool for one in opened.offered)])

    async def _open_tool(self, job: str, spec: ToolSpec, held: AsyncExitStack) -> list[OfferedTool]:
        if spec.type == "functions":
            return await asyncio.to_thread(self._functions.load, spec)
        if spec.type == "mcp":
            if spec.shared:
                key = (job, spec.model_dump_json())
                connection, back = await self._connections.borrow(key, lambda: McpConnection.open(spec))
                held.callback(back)
            else:
                connection = await McpConnection.open(spec)
                held.push_async_callback(connection.close)
            return connection.offered
        if spec.backend == "monty":
            interpreters, back = await self._interpreters.borrow("monty", MontyInterpreters.open)
            held.callback(back)
            session = MontySession(interpreters, spec)
            held.push_async_callback(session.close)
            return [session.offered]
        programs, back = await self._programs.borrow((job, spec.model_dump_json()), lambda: self._open_sandboxes(spec))
        held.callback(back)
        return [programs.offered]

    async def _open_sandboxes(self, spec: ToolSpec) -> Programs:
        return await Programs.open(await Sandbox.open(self._settings), spec)


class Tools:
    """The tools of one episode."""

    def __init__(self, offered: list[OfferedTool], held: AsyncExitStack) -> None:
        self.offered = offered
        self.close: Callable[[], Any] = held.aclose


def _check_name(one: OfferedTool) -> OfferedTool:
    """Raises NoTools for a name that a metric or a chat template could not hold."""
    if not NAME.match(one.tool.name):
        raise NoTools(f"tool {one.tool.name!r:.80} has a name that is not made of 1 to 64 letters, digits and _.-")
    return one
