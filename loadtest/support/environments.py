"""Environments of load tests."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Opening, Step, user
from opentinker.shared.types.core import Message

PROMPT = "1234="
"""Of a table's seats, in every turn."""


class Sleeper(Environment):
    """Waits, as an environment does that asks something far away."""

    class Config(EnvironmentConfig):
        sleep_s: Annotated[float, Field(ge=0)] = 0.2
        turns: Annotated[int, Field(ge=1)] = 2

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        await asyncio.sleep(self.config.sleep_s)
        return [user("123=")]

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.config.sleep_s)
        return Step(messages=[user("123=")], reward=float(action.turn % 2), done=action.turn + 1 >= self.config.turns)


class Table(Environment):
    """Seats that all act in every round, or one after the other."""

    class Config(EnvironmentConfig):
        seats: int
        together: bool

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seats = tuple(f"seat_{number}" for number in range(config.seats))

    async def open(self, row: int, seed: int) -> Opening:
        if self.config.together:
            return Opening(acting={seat: [user(PROMPT)] for seat in self.seats})
        return Opening(messages=[user(PROMPT)], seat=self.seats[0])

    async def step(self, action: Action) -> Step:
        return Step(messages=[user(PROMPT)], seat=self.seats[(action.turn + 1) % len(self.seats)])

    async def step_all(self, actions: list[Action]) -> Step:
        return Step(acting={seat: [user(PROMPT)] for seat in self.seats})
