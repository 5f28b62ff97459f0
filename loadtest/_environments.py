"""Environments of load tests."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message


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
