"""Say whether a number is even or odd: an environment to be pushed, with its description and its lock beside it."""

from __future__ import annotations

import random

from opentinker import Action, Environment, Step
from opentinker.envs.base import EnvironmentConfig, user
from opentinker.shared.types.core import Message


class Parity(Environment):
    class Config(EnvironmentConfig):
        largest: int = 99
        """Numbers are drawn from 0 to here."""

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        self.number = random.Random(f"{seed}/{row}").randint(0, self.config.largest)
        return [user(f"Is {self.number} even or odd?")]

    async def step(self, action: Action) -> Step:
        right = float(self.gold() in action.text.lower())
        return Step(reward=right, done=True, metrics={"exact": right})

    def gold(self) -> str:
        return "odd" if self.number % 2 else "even"
