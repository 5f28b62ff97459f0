"""Plays an episode of an environment behind a server, turn by turn, as an env worker does."""

from __future__ import annotations

import uuid
from typing import Any

from opentinker.envs.runtime.env_runner import LocalEnvRunner
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from opentinker.shared.types.core import StopReason, ToolCall
from opentinker.shared.types.env_protocol import CloseSession, OpenSession, SessionReply, StepSession


class Playing:
    """One session at an env worker's `Sessions`."""

    def __init__(
        self, url: str, *, name: str = "openenv", row: int = 3, seed: int = 5, deadline_s: float = 60.0, **config: Any
    ) -> None:
        self.sessions = Sessions("w", limit=8, resolver=Resolver(modules=False))
        self.id, self.turn = uuid.uuid4().hex, 0
        self.request = OpenSession(job="j", session=self.id, environment=name,
                                   config={"url": url, "patience_s": 0.5, **config}, row=row, seed=seed,
                                   deadline_s=deadline_s, answer_within_s=30.0)  # fmt: skip

    async def open(self) -> str:
        """The prompt."""
        self.opened = await self.sessions.open(self.request)
        assert self.opened.failure is None, self.opened.error
        return self.opened.messages[-1].text

    def hurry(self) -> None:
        """No answer is waited for any longer."""
        runner = self.sessions._sessions[self.id].runner
        assert isinstance(runner, LocalEnvRunner) and runner.environment is not None
        environment: Any = runner.environment
        environment.config = environment.config.model_copy(update={"request_timeout_s": 0.2})

    async def say(self, text: str, *calls: tuple[str, dict[str, Any]]) -> SessionReply:
        asked = [ToolCall(id=f"c{index}", name=name, arguments=given) for index, (name, given) in enumerate(calls)]
        request = StepSession(session=self.id, turn=self.turn, text=text, stop=StopReason.EOS, tool_calls=asked)
        self.turn += 1
        return await self.sessions.step(request)

    async def close(self) -> None:
        await self.sessions.close(CloseSession(session=self.id))
        assert await self.sessions.drain(10.0) == 0
