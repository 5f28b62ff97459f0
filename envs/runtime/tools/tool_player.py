"""Tools of the job around any environment, wherever it runs: they answer the turns that call them. (Tools that an
environment has itself: `WithTools` in envs/tools.py, on environments in place of sessions, by the same `ToolTurns`.)

A turn that calls nothing goes to the environment, whose turns are counted without those of the tools. One that calls
tools of the environment's own as well is answered by both.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from opentinker.envs.runtime.player import Player, guard_user_code
from opentinker.envs.runtime.tools.errors import NoTools
from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import Outcome, ToolTurns
from opentinker.shared.messaging.reply_validation import failure
from opentinker.shared.runtime.telemetry import JobMeter
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import OpenSession, SessionReply, StepSession

Meter = Callable[[], JobMeter]


class ToolPlayer:
    """Plays `inner`, which is open afterwards or has failed, with the tools that the request to open names."""

    def __init__(self, worker: str, inner: Player, shop: ToolFactory, meter: Meter) -> None:
        self._worker, self._inner, self._shop, self._meter = worker, inner, shop, meter
        self._tools: Tools | None = None
        self._turns = ToolTurns([])
        self._seen: set[tuple[str, str]] = set()
        self._asked = SessionReply(worker=worker)
        """Last reply of the environment."""
        self._others = False
        """The environment offers tools itself."""
        self._played = 0

    async def open(self, request: OpenSession) -> SessionReply:
        reply = await self._inner.open(msgspec.structs.replace(request, tools=[]))
        if reply.failure is not None or reply.busy:
            return reply
        return await guard_user_code(self._worker, self._opened(request, reply))

    async def _opened(self, request: OpenSession, reply: SessionReply) -> SessionReply:
        try:
            self._tools = await self._shop.open(request.job, request.tools)
        except (NoTools, Unavailable) as error:
            return failure(self._worker, Ending.ENV_ERROR, str(error))
        self._turns = ToolTurns(self._tools.offered, request.tool_turns)
        return self._offer(reply)

    async def step(self, request: StepSession) -> SessionReply:
        return await guard_user_code(self._worker, self._step(request))

    async def _step(self, request: StepSession) -> SessionReply:
        mine, theirs = self._turns.split(request.tool_calls, self._others)
        said: list[Message] = []
        if request.seat == self._asked.seat and (mine or request.problem) and self._turns.takes(request.seat):
            said = await self._turns.answer(request.seat, mine, request.problem, self._note)
            if not theirs:
                return self._again(said)
        own = msgspec.structs.replace(request, turn=self._played, tool_calls=theirs, problem="")
        reply = await self._inner.step(own)
        if reply.failure is not None:
            return reply
        self._played += 1
        self._turns.owe(request.seat, self._asked.stream, said)
        if not reply.done:
            due = self._turns.due(reply.seat, reply.stream)
            reply = msgspec.structs.replace(reply, messages=[*due, *reply.messages])
        return self._offer(reply)

    def _again(self, said: list[Message]) -> SessionReply:
        """Return tool results within the same turn of the environment."""
        asked = self._asked
        return SessionReply(
            worker=self._worker,
            seat=asked.seat,
            stream=asked.stream,
            messages=said,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            metrics=self._with_counts(asked.metrics),
        )

    def _offer(self, reply: SessionReply) -> SessionReply:
        """With the tools in the first reply to each stream, and what they have come to in every one. Raises ValueError
        if the environment has a tool of the same name."""
        self._asked = reply
        changes: dict[str, object] = {"metrics": self._with_counts(reply.metrics)}
        if not reply.done and (reply.seat, reply.stream) not in self._seen:
            self._seen.add((reply.seat, reply.stream))
            self._others = self._others or bool(reply.tools)
            if taken := sorted({tool.name for tool in reply.tools} & self._turns.offered.keys()):
                raise ValueError(f"the environment and environment.tools both have a tool {taken[0]!r}")
            changes["tools"] = [*reply.tools, *self._turns.tools]
        return msgspec.structs.replace(reply, **changes)

    def _with_counts(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the counts of these tools to those of an environment that has tools too."""
        counts = {name: metrics.get(name, 0.0) * self._others + n for name, n in self._turns.metrics.items()}
        return metrics | counts

    def _note(self, name: str, outcome: Outcome) -> None:
        counts = self._meter().counts
        counts[f"env/tool_calls/{name}"] += 1
        counts[f"env/tool_ms/{name}"] += round(1000 * outcome.seconds)
        if outcome.failed:
            counts[f"env/tool_errors/{name}"] += 1

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            if self._tools is not None:
                await self._tools.close()
