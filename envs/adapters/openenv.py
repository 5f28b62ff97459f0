"""Plays environments of any OpenEnv server: `environment.name = "openenv"`, its URL in the config.

Connects through the egress guard by the server's WebSocket protocol; OpenEnv is not installed here.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from pydantic import BaseModel, Field, model_validator

from opentinker.envs.adapters.library import Illegal, episode_seed
from opentinker.envs.adapters.openenv_client import Observation, OpenEnvSession, ServerError
from opentinker.envs.adapters.openenv_schema import Form, form_of, result_of, tools_of, view
from opentinker.envs.base import Action, BadReply, Opening, Step, Unreachable, user
from opentinker.envs.remote_server import (
    PAUSE_S,
    UNAVAILABLE,
    CallResult,
    RemoteFailed,
    UrlConfig,
    UrlRemote,
    object_of,
    read_limited,
)
from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.websocket_frames import ConnectionLost
from opentinker.shared.types.core import ToolCall

PLAIN = {"ws": "http", "wss": "https"}
LOST = (aiohttp.ClientError, OSError, TimeoutError, ConnectionLost)
NUMBERS = 40
"""Metrics taken from an observation's metadata."""


class _Full(Exception):
    """The server is full."""


class OpenEnv(UrlRemote):
    """One seat, one session of the server per episode. Reward: the environment's.

    An action that cannot be read, or that the server's schema refuses, is answered with the reason and costs `penalty`.
    If actions are tool calls (OpenEnv's MCP environments), they are offered to the policy as tools.
    """

    class Config(UrlConfig):
        url: Annotated[str, Field(min_length=1)]
        """URL of the server, http(s):// or ws(s)://, without the `/ws` path of its sessions."""
        sessions_path: ClassVar[str] = "/ws"

        reset: dict[str, Any] = {}
        """Sent with every reset, in addition to `seed`, `episode_id` and the row: a split, a difficulty."""
        row_key: Annotated[str, Field(max_length=100)] = ""
        """Field of a reset that holds the episode's row, e.g. `index` of OpenEnv's task API. Empty: only the seed is
        sent."""
        rows: Annotated[int, Field(ge=1)] | None = None
        """Number of rows: the row is sent modulo this."""
        actions: Literal["auto", "text", "json", "tools"] = "auto"
        """`text`: the policy's text is one field of the action; `json`: it writes the fields; `tools`: it calls tools.
        `auto` decides by the server's schema: tools if its actions are tool calls, text if the only required field is a
        string, else JSON."""
        action_field: str = ""
        """text: field of the action; default: the only one."""
        action: dict[str, Any] = {}
        """Fixed fields of every action."""
        show: list[Annotated[str, Field(min_length=1)]] = []
        """Fields of the observation that the policy sees (`a.b`: b of a); default: all non-empty ones except metadata.
        A single field is shown as is, several as `name: value`."""
        instruction: str = ""
        """First message to the policy."""
        hint: bool = True
        """Explain in the prompt how actions are written."""
        forgive: bool = False
        """Treat an action that makes the environment raise as invalid; otherwise it fails the episode."""

        @model_validator(mode="after")
        def _nothing_is_ignored(self) -> Self:
            if self.action_field and self.actions not in ("auto", "text"):
                raise ValueError(f"action_field is for actions = 'text', not {self.actions!r}")
            if self.rows is not None and not self.row_key:
                raise ValueError("rows needs row_key")
            if ours := sorted({"seed", "episode_id", self.row_key} & self.reset.keys()):
                raise ValueError(f"reset: {', '.join(ours)} is said of each episode, leave it out")
            return self

    config: Config
    pools: ClassVar[dict[Any, Any]] = {}

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._line: OpenEnvSession | None = None
        self._form = Form(kind="json")

    # --- the episode ------------------------------------------------------------------------------------------------

    async def open(self, row: int, seed: int) -> Opening:
        config = self.config
        told = {"seed": episode_seed(row, seed), "episode_id": self.id}
        if config.row_key:
            told[config.row_key] = row % config.rows if config.rows else row
        await self.take_place()
        self._form = await self._learn_form()
        seen = await self._reset(config.reset | told)
        if seen.done:
            raise BadReply(f"{self.url}: the episode is over before anybody has acted")
        hint = self._form.hint() if config.hint else ""
        prompt = "\n".join(filter(None, [config.instruction, hint, view(seen, config.show)]))
        tools = []
        if self._form.kind == "tools":
            tools = tools_of((await self._play({"type": "list_tools"})).observation)
        return Opening(messages=[user(prompt or "Begin.")], tools=tools)

    async def step(self, action: Action) -> Step:
        if self._form.kind == "tools":
            return await self._play_calls(action, self._call)
        try:
            seen = await self._try(self._form.read(action.text))
        except Illegal as error:
            return self._refuse(error)
        messages = [] if seen.done else [user(view(seen, self.config.show) or "(Nothing is to be seen.)")]
        return self._step(messages, seen.reward, done=seen.done, metrics=_numbers(seen.metadata))

    async def _call(self, call: ToolCall) -> CallResult:
        """Play a tool call as an action. Raise as `_try`."""
        data = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments, **self.config.action}
        seen = await self._try(data)
        return CallResult(
            content=result_of(seen.observation), reward=seen.reward, done=seen.done, metrics=_numbers(seen.metadata)
        )

    async def close(self) -> None:
        try:
            await self._disconnect()
        finally:
            await super().close()

    # --- the server -------------------------------------------------------------------------------------------------

    async def _learn_form(self) -> Form:
        """Return the form of actions, from the server's schema unless the config sets it. Raise as `with_retries`, or
        BadReply."""
        config = self.config
        wanted = None if config.actions == "auto" else config.actions
        if wanted == "tools" or (wanted == "text" and config.action_field and not config.hint):
            return Form(kind=wanted, field=config.action_field, fixed=config.action)
        schema = (await self.with_retries(self._schema, LOST)).get("action")
        if not isinstance(schema, dict):
            raise BadReply(f"{self.url}/schema must give the schema of an action")
        try:
            return form_of(schema, wanted, config.action_field, config.action)
        except ValueError as error:
            raise RemoteFailed(f"{self.url}: {error}") from None

    async def _schema(self) -> dict[str, Any]:
        parts = urlsplit(self.url)
        url = urlunsplit(parts._replace(scheme=PLAIN.get(parts.scheme, parts.scheme), path=f"{parts.path}/schema"))
        timeout = aiohttp.ClientTimeout(total=self.config.request_timeout_s, sock_connect=10.0)
        async with self.pool.session.get(url, timeout=timeout, allow_redirects=False) as response:
            raw = await read_limited(response)
            if response.status in UNAVAILABLE:
                raise Unreachable(f"{url} answered {response.status}")
            if response.status != 200:
                raise RemoteFailed(f"{url} answered {response.status}: is there an OpenEnv server?")
        return object_of(raw, url)

    async def _reset(self, told: dict[str, Any]) -> Observation:
        """Reset on a new connection; retry while the server is unavailable or full. Raise as `with_retries`, or
        BadReply."""

        async def once() -> Observation:
            await self._disconnect()
            async with asyncio.timeout(self.config.request_timeout_s):
                self._line = await OpenEnvSession.connect(self.pool.session, f"{self.url}/ws")
                try:
                    return await self._line.ask("reset", told)
                except ServerError as error:
                    if error.code == "CAPACITY_REACHED":
                        raise _Full from None
                    raise RemoteFailed(f"{self.url}: reset: {error}") from None

        backoff = Backoff(PAUSE_S, 2.0)
        while True:
            try:
                return await self.with_retries(once, LOST)
            except _Full:  # until the episode's deadline
                await self._disconnect()
                await backoff.sleep()

    async def _try(self, data: dict[str, Any]) -> Observation:
        """Play an action of the policy. Raise Illegal if it is invalid, or as `_play`."""
        try:
            return await self._play(data)
        except ServerError as error:
            if error.code == "VALIDATION_ERROR" or (self.config.forgive and error.code == "EXECUTION_ERROR"):
                raise Illegal(error.message) from None
            raise RemoteFailed(f"{self.url}: step: {error}") from None
        except TypeError as error:
            raise Illegal(f"it cannot be sent ({error})") from None

    async def _play(self, data: dict[str, Any]) -> Observation:
        """Send an action once, because a repeated one might be played twice. Raise Unreachable, RemoteFailed, BadReply,
        ServerError."""
        assert self._line is not None
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await self._line.ask("step", data)
        except ConnectionLost as error:
            raise Unreachable(f"{self.url}: step: {error}") from None
        except TimeoutError:
            raise RemoteFailed(f"{self.url}: step: no answer within {self.config.request_timeout_s:g} s") from None

    async def _disconnect(self) -> None:
        if self._line is not None:
            line, self._line = self._line, None
            await line.close()


def _numbers(metadata: dict[str, Any]) -> dict[str, float]:
    found = {
        name: float(value)
        for name, value in metadata.items()
        if isinstance(value, int | float) and name.isascii() and len(name) <= 100 and abs(value) < 1e30
    }
    return dict(list(found.items())[:NUMBERS])
