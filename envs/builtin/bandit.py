"""A contextual bandit: which arm pays in which context is found out by trying. Data-free, one token, one turn."""

from __future__ import annotations

import random
import string
from typing import Annotated

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message


class Bandit(Environment):
    """Prompt `c3=`: context 3. The arms are the letters from `a` on; the first character of the action is the pull.

    In each context one arm is right, by a table that is hidden and always the same. Reward: 1 for the right arm, else
    0, turned round with probability `noise`; anything that is no arm pays 0. Whether an arm's pay is turned round
    depends on row, seed and arm alone. `exact` is 1 for the right arm, noise or not.
    """

    class Config(EnvironmentConfig):
        contexts: Annotated[int, Field(ge=1, le=1000)] = 8
        """How many contexts there are."""
        arms: Annotated[int, Field(ge=2, le=26)] = 4
        """How many letters are arms."""
        noise: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
        """Share of pulls of an arm that pay the opposite of what they should."""
        table: Annotated[int, Field(ge=0)] = 0
        """Which hidden table."""

    config: Config

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        self.episode = f"{seed}/{row}"
        context = random.Random(f"bandit/{self.episode}").randrange(config.contexts)
        self.arms = string.ascii_lowercase[: config.arms]
        self.right = random.Random(f"bandit/table/{config.table}/{context}").choice(self.arms)
        return [user(f"c{context}=")]

    async def step(self, action: Action) -> Step:
        pull = action.text[:1]
        hit = pull == self.right
        luck = random.Random(f"bandit/noise/{self.episode}/{pull}").random()
        turned = bool(pull) and pull in self.arms and luck < self.config.noise
        return Step(reward=float(hit != turned), done=True, metrics={"exact": float(hit)})

    def gold(self) -> str:
        return self.right
