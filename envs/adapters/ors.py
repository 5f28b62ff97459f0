"""Plays environments of any ORS server (Open Reward Standard): `environment.name = "ors"`, its URL in the config.

The policy acts by tool calls, and each call says what it earns. Neither `ors-sdk` nor `openreward` is needed here.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar

import aiohttp
from pydantic import BaseModel, Field

from opentinker.envs.adapters.library import Illegal, shortened
from opentinker.envs.adapters.ors_client import Block, OrsSession, OrsTools, TerminalTool, ToolOutput
from opentinker.envs.base import Action, BadReply, Opening, Step
from opentinker.envs.data import images_of
from opentinker.envs.remote_server import CallResult, Missing, RemoteFailed, UrlConfig, UrlRemote
from opentinker.envs.tool_limits import bounded_tools
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.types.core import Image, Message, Text, Tool, ToolCall

LOST = (aiohttp.ClientError, OSError, TimeoutError)
NAME = r"^[A-Za-z0-9_.-]{0,200}$"
REFUSAL = 4096
"""Characters of a refusal that the policy reads."""


class Ors(UrlRemote):
    """One seat, one session of the server per episode. Reward: the sum of what its tool calls earned.

    A call that the server refuses, and a turn without one, is answered with the reason and costs `penalty`. If the
    server has a terminal tool, a turn without a call goes to it instead and ends the episode.
    """

    class Config(UrlConfig):
        environment: Annotated[str, Field(pattern=NAME)] = ""
        """Name of the environment; default: the server's first."""
        split: Annotated[str, Field(min_length=1, max_length=200)] = "train"
        """Split whose tasks are played: the row of an episode, modulo their number, selects one."""
        instruction: str = ""
        """First message to the policy, before the task's prompt."""

    config: Config
    pools: ClassVar[dict[Any, Any]] = {}

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._session: OrsSession | None = None
        self._name, self._terminal = "", None

    async def open(self, row: int, seed: int) -> Opening:
        config = self.config
        await self.take_place()
        self._session = session = OrsSession(self.pool.session, self.url, config.request_timeout_s)
        self._name = await self._find_name()
        path = f"/{self._name}/num_tasks"
        answer = await self._ask("POST", path, dict[str, Any], {"split": config.split})
        number = answer.get("num_tasks")
        if not isinstance(number, int) or number < 1:
            raise BadReply(f"{self.url}{path}: {number!r} tasks in split {config.split!r}")
        task = {"env_name": self._name, "split": config.split, "index": row % number}
        await self.with_retries(lambda: session.begin(task), LOST)
        tools = await self._tools()
        prompt = self._content(await self._ask("GET", f"/{self._name}/prompt", list[Block]))
        if config.instruction:
            prompt = [Text(f"{config.instruction}\n"), *prompt]
        return Opening(messages=[Message(role="user", content=_plain(prompt) if prompt else "Begin.")], tools=tools)

    async def step(self, action: Action) -> Step:
        if not action.tool_calls and not action.problem and self._terminal is not None:
            return await self._hand_in(self._terminal, action.text)
        return await self._play_calls(action, self._play)

    async def _play(self, call: ToolCall) -> CallResult:
        output = await self._call(call.name, call.arguments)
        content = "" if output.finished else _plain(self._content(output.blocks))
        return CallResult(content=content, reward=output.reward or 0.0, done=output.finished)

    async def close(self) -> None:
        session, self._session = self._session, None
        try:
            if session is not None:
                await session.close()
        finally:
            await super().close()

    # --- the server -------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, reply: Any, body: dict[str, Any] | None = None) -> Any:
        session = self._session
        assert session is not None
        return await self.with_retries(lambda: session.ask(method, path, reply, body), LOST)

    async def _find_name(self) -> str:
        """Return the name of the config, or the server's first. Raise RemoteFailed if the server has none such."""
        names = [name.lower() for name in await self._ask("GET", "/list_environments", list[str])]
        if not names or not all(name.isascii() and re.fullmatch(NAME, name) and name for name in names):
            raise BadReply(f"{self.url}/list_environments: not the names of environments: {str(names)[:200]}")
        wanted = self.config.environment.lower() or names[0]
        if wanted not in names:
            raise RemoteFailed(
                f"{self.url} has no environment {wanted!r}; there are: {shortened(', '.join(names), 200)}"
            )
        return wanted

    async def _tools(self) -> list[Tool]:
        """Return the tools of the task, or of the environment where the server has none by task."""
        try:
            listed = await self._ask("GET", f"/{self._name}/task_tools", OrsTools)
        except Missing:
            listed = await self._ask("GET", f"/{self._name}/tools", OrsTools)
        self._terminal = listed.terminal_tool
        if not listed.tools and self._terminal is not None:
            return []
        nothing = {"type": "object", "properties": {}}
        try:
            return bounded_tools(
                [
                    Tool(name=tool.name, description=tool.description, parameters=tool.input_schema or nothing)
                    for tool in listed.tools
                ]
            )
        except ValueError as error:
            raise BadReply(f"{self.url}: the server's tools cannot be offered: {error}") from None

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Raise Illegal if the server refuses the call, or as `with_retries`."""
        session, body = self._session, {"name": name, "input": arguments}
        assert session is not None
        reply = await self.with_retries(lambda: session.call(self._name, body), LOST)
        if not reply.ok:
            raise Illegal(shortened(reply.error, REFUSAL) or "the server refuses it without a reason")
        if reply.output is None or not math.isfinite(reply.output.reward or 0.0):
            raise BadReply(f"{self.url}: {name} has no output, or its reward is no number")
        return reply.output

    async def _hand_in(self, tool: TerminalTool, text: str) -> Step:
        try:
            output = await self._call(tool.name, {tool.arg: text} if tool.arg else {})
        except Illegal as error:
            raise RemoteFailed(f"{self.url}: {tool.name}: {error}") from None
        return self._step([], output.reward or 0.0, done=True)

    # --- what it says -----------------------------------------------------------------------------------------------

    def _content(self, blocks: list[Block]) -> list[Text | Image]:
        """Return the text and the images. Raise BadReply."""
        parts: list[Text | Image] = []
        for block in blocks:
            if block.type == "image":
                row = (self.url, {"image": f"data:image/;base64,{block.data}"})
                try:
                    parts += images_of(row, "image")
                except RowError as error:
                    raise BadReply(str(error)) from None
            elif block.text:
                parts.append(Text(block.text))
        return parts


def _plain(parts: list[Text | Image]) -> str | list[Text | Image]:
    """Return the content of a message; text alone is not in parts, as most templates want it."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "\n".join(texts) if len(texts) == len(parts) else parts
