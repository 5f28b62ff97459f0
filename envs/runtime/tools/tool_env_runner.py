"""Tools of the job around any environment, wherever it runs: they answer the turns that call them. (Tools that an
environment has itself: `WithTools` in envs/tools.py, on environments in place of sessions, by the same `ToolTurns`.)

A turn that calls nothing goes to the environment, whose turns are counted without those of the tools. One that calls
tools of the environment's own as well is answered by both. In a round, the seats that call tools are asked again with
the results, and the environment gets all actions when the last of them has acted.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from opentinker.envs.runtime.env_runner import EnvRunner, actions_in_turn, guard_user_code
from opentinker.envs.runtime.tools.tool_factory import ToolFactory, Tools
from opentinker.envs.tools import NoTools, Outcome, ToolTurns
from opentinker.shared.messaging.reply_validation import failure
from opentinker.shared.runtime.telemetry import JobMeter
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.types.core import Ending, Message
from opentinker.shared.types.env_protocol import OpenSession, SeatAction, SeatPrompt, SessionReply, StepSession

Meter = Callable[[], JobMeter]


class ToolEnvRunner:
    """Plays `inner` with the tools named in the open request."""

    def __init__(self, worker: str, inner: EnvRunner, factory: ToolFactory, meter: Meter) -> None:
        self._worker, self._inner, self._factory, self._meter = worker, inner, factory, meter
        self._tools: Tools | None = None
        self._turns = ToolTurns[SeatAction]([])
        self._seen: set[tuple[str, str]] = set()
        self._asked = SessionReply(worker=worker)
        """Last reply of the environment."""
        self._pending = self._asked
        """Last reply to the caller: the same, or tool results for some of its seats."""
        self._others = False
        """The environment offers tools itself."""
        self._played = 0

    async def open(self, request: OpenSession) -> SessionReply:
        reply = await self._inner.open(msgspec.structs.replace(request, tools=[]))
        if reply.failure is not None or reply.busy:
            return reply
        return await guard_user_code(self._worker, self._add_tools(request, reply))

    async def _add_tools(self, request: OpenSession, reply: SessionReply) -> SessionReply:
        try:
            self._tools = await self._factory.open(request.job, request.tools)
        except (NoTools, Unavailable) as error:
            return failure(self._worker, Ending.ENV_ERROR, str(error))
        self._turns = ToolTurns[SeatAction](self._tools.offered, request.tool_turns)
        return self._offer(reply)

    async def step(self, request: StepSession) -> SessionReply:
        return await guard_user_code(self._worker, self._step(request))

    async def _step(self, request: StepSession) -> SessionReply:
        if request.candidates:
            return failure(self._worker, Ending.ENV_ERROR, "tools of a job have state and cannot fork")
        actions = actions_in_turn(self._pending, request.turn, request.actions, together=bool(request.round))
        again = await self._turns.take(actions, self._others, self._note)
        if again:
            return self._ask_again(again)
        held = self._turns.release([prompt.seat for prompt in self._asked.prompts])
        own = self._asked.step(request.session, self._played, [action for action, _ in held])
        reply = await self._inner.step(own)
        if reply.failure is not None:
            return reply
        self._played += 1
        for asked, (action, results) in zip(self._asked.prompts, held, strict=True):
            self._turns.owe(action.seat, asked.stream, results)
        return self._offer(reply)

    def _ask_again(self, again: dict[str, list[Message]]) -> SessionReply:
        """Return tool results within the same turn of the environment."""
        shown = [
            SeatPrompt(
                seat=asked.seat,
                stream=asked.stream,
                messages=again[asked.seat],
                max_tokens=asked.max_tokens,
                stop=asked.stop,
            )
            for asked in self._asked.prompts
            if asked.seat in again
        ]
        self._pending = SessionReply(worker=self._worker, metrics=self._with_counts(self._asked.metrics))
        self._pending = self._pending.with_prompts(shown, together=bool(self._asked.round))
        return self._pending

    def _offer(self, reply: SessionReply) -> SessionReply:
        """Add the tools to the first prompt of each stream, results that a seat is owed to its next one, and the tools'
        counts to every reply. Raise ValueError if the environment has a tool of the same name."""
        self._asked = reply
        if not reply.done:
            shown = [self._offered(prompt) for prompt in reply.prompts]
            reply = reply.with_prompts(shown, together=bool(reply.round))
        self._pending = msgspec.structs.replace(reply, metrics=self._with_counts(reply.metrics))
        return self._pending

    def _offered(self, prompt: SeatPrompt) -> SeatPrompt:
        messages, tools = [*self._turns.due(prompt.seat, prompt.stream), *prompt.messages], prompt.tools
        if (prompt.seat, prompt.stream) not in self._seen:
            self._seen.add((prompt.seat, prompt.stream))
            self._others = self._others or bool(tools)
            if taken := sorted({tool.name for tool in tools} & self._turns.offered.keys()):
                raise ValueError(f"the environment and environment.tools both have a tool {taken[0]!r}")
            tools = [*tools, *self._turns.tools]
        return msgspec.structs.replace(prompt, messages=messages, tools=tools)

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
