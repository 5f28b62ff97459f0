"""Contextual bandit: learn by trial which arm pays in which context. No data, one token, one turn."""

from __future__ import annotations

import random
import string
from typing import Annotated

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message


class Bandit(Environment):
    """Prompt `c3=`: context 3. Arms are letters from `a` on; the first character of the action selects one. A hidden,
    fixed table defines the right arm of each context.

    Reward: 1 for the right arm, otherwise 0, inverted with probability `noise`; anything else pays 0. Whether an arm's
    pay is inverted depends only on row, seed and arm. `exact` is 1 for the right arm regardless of noise.
    """

    class Config(EnvironmentConfig):
        contexts: Annotated[int, Field(ge=1, le=1000)] = 8
        """Number of contexts."""
        arms: Annotated[int, Field(ge=2, le=26)] = 4
        """Number of arms."""
        noise: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
        """Share of pulls that pay the opposite."""
        table: Annotated[int, Field(ge=0)] = 0
        """Number of the hidden table."""

    config: Config
    can_fork = True

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
