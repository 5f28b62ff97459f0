"""Repeat digits. No data, one turn: a model of a few million parameters learns it from scratch."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message, StopReason

ROWS = 1000


class CopyDigits(Environment):
    """Prompt `472=`, right answer `472` and then the end of the turn.

    Reward: share of right tokens by position over max(len(answer) + 1, len(completion)), where the end-of-turn token
    counts as one and a token is a character. `exact` is 1 for the whole answer and nothing else.
    """

    class Config(EnvironmentConfig):
        digits: Annotated[int, Field(ge=1, le=32)] = 3
        """Number of digits to copy."""

    config: Config
    can_fork = True

    async def open(self, row: int, seed: int) -> list[Message]:
        draw = random.Random(f"copy_digits/{seed}/{row % ROWS}")
        self.answer = "".join(draw.choices("0123456789", k=self.config.digits))
        return [user(f"{self.answer}=")]

    async def step(self, action: Action) -> Step:
        text, ended = action.text, action.stop == StopReason.EOS
        right = sum(said == wanted for said, wanted in zip(text, self.answer, strict=False))
        right += ended and len(text) == len(self.answer)
        reward = right / max(len(self.answer) + 1, len(text) + ended)
        return Step(reward=reward, done=True, metrics={"exact": float(ended and text == self.answer)})

    def gold(self) -> str:
        return self.answer
