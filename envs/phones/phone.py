"""The base of environments that play on a phone: the goal, screens, actions as JSON, and the task's own check.

    open: _begin -> goal -> _look -> prompt        step: read -> _act -> (last action: _score) -> _look -> prompt

A policy ends its episode with `status` or `answer`; only then is the task checked, as in AndroidWorld.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from opentinker.envs.adapters.library import Illegal, IllegalConfig, refusal
from opentinker.envs.base import Action, Environment, Opening, Step, user
from opentinker.envs.phones.actions import LAST, PhoneAction, introduction, read_json
from opentinker.envs.phones.screen import Screen, message
from opentinker.shared.types.core import Message

TOLD = 12
"""Number of the newest actions that a fresh context tells."""


class PhoneConfig(IllegalConfig):
    """Settings of every phone."""

    observation: Literal["elements", "screenshot", "both"] = "elements"
    """`elements`: the screen as text, one line per element; `screenshot`: a picture, for vision models; or both."""
    positions: bool = False
    """Add the position of every element, so that actions may name points."""
    context: Literal["whole", "latest"] = "whole"
    """`latest`: every turn begins a new context with the goal, the actions so far and the newest screen, instead of all
    earlier screens."""
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of actions that ends the episode, with reward 0."""
    instruction: Annotated[str, Field(max_length=20_000)] | None = None
    """First words to the policy, instead of the description of actions; may be empty."""

    @property
    def shows_elements(self) -> bool:
        return self.observation != "screenshot"

    @property
    def shows_picture(self) -> bool:
        return self.observation != "elements"


class Phone(Environment):
    """One seat. Reward: the task's own check, once the policy says that it is done."""

    config: PhoneConfig
    possible: ClassVar[frozenset[str]]
    """Types of actions that this phone plays."""

    @abstractmethod
    async def _begin(self, row: int, seed: int) -> str:
        """Start a task and return its goal."""

    @abstractmethod
    async def _look(self) -> Screen: ...

    @abstractmethod
    async def _act(self, action: PhoneAction) -> None:
        """Play an action. Raise Illegal if the phone cannot."""

    @abstractmethod
    async def _score(self) -> float:
        """Return what the task's check gives, from 0 to 1."""

    @abstractmethod
    def _task_name(self) -> str:
        """Return the name of the task, for the metrics; empty if there is only one."""

    async def _is_over(self) -> bool:
        """Return whether the episode ends although the policy has not ended it."""
        return False

    async def open(self, row: int, seed: int) -> Opening:
        self._illegal = self._steps = 0
        self._told: list[str] = []
        """The actions so far, as JSON."""
        self._goal = await self._begin(row, seed)
        self._screen = await self._look()
        return Opening(messages=[self._message(self._introduction())], stream=self._stream())

    async def step(self, action: Action) -> Step:
        try:
            deed = self._read(action.text)
            await self._act(deed)
        except Illegal as error:
            return self._refuse(error)
        self._steps += 1
        self._told.append(deed.json())
        if deed.action_type in LAST or await self._is_over():
            reward = await self._score()
            solved = float(reward >= 1.0)
            return Step(reward=reward, components={"reward": reward}, done=True, metrics=self._metrics(solved))
        self._screen = await self._look()
        late = self._steps >= self.config.max_steps
        return self._next(Step(components={"reward": 0.0}, done=late, truncated=late), "")

    # --- what it says -------------------------------------------------------------------------------------------------

    def _read(self, text: str) -> PhoneAction:
        return read_json(text, self._screen, self.possible)

    def _refuse(self, why: Illegal) -> Step:
        self._illegal += 1
        return self._next(self.config.refuse(why, "", self._illegal, {}), refusal(why, ""))

    def _next(self, step: Step, words: str) -> Step:
        """Add what the policy sees next: the screen, or only words about an action that changed nothing."""
        step.metrics = self._metrics(0.0)
        step.stream = self._stream()
        if self.config.context == "latest":
            done = ["You did:", *self._told[-TOLD:]] if self._told else []
            words = "\n".join(filter(None, [self._introduction(), *done, words]))
            step.messages = [self._message(words)]
        else:
            step.messages = [user(words) if words else self._message("")]
        return step

    def _introduction(self) -> str:
        told = self.config.instruction
        if told is None:
            told = f"Do the task on the phone. {self._how()}"
        return "\n".join(filter(None, [told, f"Task: {self._goal}"]))

    def _how(self) -> str:
        """Return how actions are written."""
        how = introduction(self.possible, "index" if self.config.shows_elements else "x and y")
        return f"Each turn, say one action as JSON:\n{how}"

    def _message(self, before: str) -> Message:
        return message(before, self._screen, elements=self.config.shows_elements, positions=self.config.positions)

    def _stream(self) -> str:
        return f"turn {self._steps + self._illegal}" if self.config.context == "latest" else ""

    def _metrics(self, solved: float) -> dict[str, float]:
        ended = {"solved": solved, "actions": float(self._steps), "illegal": float(self._illegal)}
        name = self._task_name()
        return ended | ({f"task/{name}": 1.0} if name else {})
