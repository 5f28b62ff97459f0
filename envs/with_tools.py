"""An environment together with its own tools: turns that call them are answered here, the others by its `step`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opentinker.envs.base import Action, Environment, Opening, Prompt, Step, fields_of
from opentinker.envs.rounds import as_opening, play_actions, prompts_of
from opentinker.envs.tools import TOOL_TURNS, OfferedTool, ToolTurns, tools_of
from opentinker.envs.wrapper import Wrapper
from opentinker.shared.types.core import Message


class WithTools(Wrapper):
    """Wraps an environment and its tools as one environment. All seats may call the tools.

    In a round, the seats that call tools are asked again with the results; the actions of the others are held until
    all have acted. Tools of a round run one after the other, in the order of the seats.
    """

    def __init__(self, environment: Environment, offered: Sequence[OfferedTool], most: int = TOOL_TURNS) -> None:
        super().__init__(environment)
        self._turns = ToolTurns[Action](offered, most)
        self._seen: set[tuple[str, str]] = set()
        self._asked: Opening | Step = Opening()
        self._prompts: dict[str, Prompt] = {}
        """Prompts of the seats that the environment asked last."""
        self._metrics: dict[str, float] = {}
        self._answers_itself = False
        """The environment also offers tools that its own `step` answers."""
        self._played = 0
        """Turns that reached the environment's own `step`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WithTools:
        """A copy whose tools are those of the copied environment."""
        environment = copy.deepcopy(self.environment, memo)
        other = WithTools(environment, tools_of(environment), self._turns.most)
        turns = self._turns.copy(list(other._turns.offered.values()))
        state = {name: value for name, value in vars(self).items() if name not in ("environment", "_turns")}
        other.__dict__.update({**copy.deepcopy(state, memo), "_turns": turns})
        return other

    async def open(self, row: int, seed: int) -> Opening:
        opened = as_opening(self.environment, await self.environment.open(row, seed))
        self._offer(opened, "open")
        return opened

    async def step(self, action: Action) -> Step:
        return await self._take([action])

    async def step_all(self, actions: list[Action]) -> Step:
        return await self._take(actions)

    async def _take(self, actions: Sequence[Action]) -> Step:
        again = await self._turns.take(actions, self._answers_itself)
        if again:
            return self._continue_turn(again)
        together, held = self._asked.acting is not None, self._turns.release(list(self._prompts))
        own = [msgspec.structs.replace(action, turn=self._played) for action, _ in held]
        self._played += 1
        step = await play_actions(self.environment, self._asked, own)
        if isinstance(step, Step):  # otherwise the caller reports the wrong type
            self._metrics = dict(step.metrics)
            step.metrics = self._metrics | self._turns.metrics
            for action, results in held:
                self._turns.owe(action.seat, self._prompts[action.seat].stream, results)
            if not step.done:
                self._offer(step, "step_all" if together else "step")
        return step

    def _continue_turn(self, again: Mapping[str, list[Message]]) -> Step:
        """Return tool results to the seats that called, within the same turn of the environment."""
        shown = {
            seat: Prompt(messages=results, stream=asked.stream, max_tokens=asked.max_tokens, stop=asked.stop)
            for seat, results in again.items()
            for asked in [self._prompts[seat]]
        }
        metrics = self._metrics | self._turns.metrics
        if self._asked.acting is not None:
            return Step(acting=shown, metrics=metrics)
        ((seat, prompt),) = shown.items()
        return Step(**fields_of(Prompt, prompt), seat=seat, metrics=metrics)

    def _offer(self, said: Opening | Step, method: str) -> None:
        """Add the tools to the first messages of each stream, and results that a seat is still owed to its next."""
        self._asked, self._prompts = said, prompts_of(self.environment, said, method)
        if said.acting is not None:
            said.acting = self._prompts
        for seat, prompt in self._prompts.items():
            if due := self._turns.due(seat, prompt.stream):
                prompt.messages = [*due, *prompt.messages]
            if (seat, prompt.stream) not in self._seen:
                self._seen.add((seat, prompt.stream))
                self._answers_itself = self._answers_itself or bool(prompt.tools)
                prompt.tools = [*prompt.tools, *self._turns.tools]


def with_tools(environment: Environment, most: int = TOOL_TURNS) -> Environment:
    """Wrap the environment if it has tools, else return it unchanged. Raise TypeError if a tool method
    cannot be one."""
    offered = tools_of(environment)
    return WithTools(environment, offered, most) if offered else environment
