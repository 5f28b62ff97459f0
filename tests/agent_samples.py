"""Agents for tests, well-behaved and not."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI

from opentinker.envs.agent import AgentEnvironment, Result
from opentinker.envs.base import EnvironmentConfig


def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)


class Echo(AgentEnvironment):
    """Asks `asks` times, each time with all that was said, and is worth the number of answers that are `yes`."""

    class Config(EnvironmentConfig):
        asks: int = 2
        how: str = "work"
        forgets: bool = False
        """Every time nothing but the newest words."""

    config: Config

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        await self._misbehave()
        messages: list[Any] = []
        right = 0
        async with client(base_url) as model:
            for turn in range(self.config.asks):
                messages = [] if self.config.forgets else messages
                messages.append({"role": "user", "content": f"row {row} seed {seed} turn {turn}="})
                answer = await model.chat.completions.create(model="any", messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                right += answer.choices[0].message.content == "yes"
                await self._misbehave(turn)
        return Result(reward=float(right), components={"right": float(right)}, metrics={"exact": 1.0})

    async def _misbehave(self, turn: int = -1) -> None:
        if self.config.how == f"raise {turn}":
            raise RuntimeError("the agent is tired")
        if self.config.how == f"exit {turn}":
            sys.exit(3)
        if self.config.how == f"hang {turn}":
            await asyncio.Event().wait()


class BlockingEcho(AgentEnvironment):
    """The same with a client that blocks, and `block_s` of other work."""

    blocking = True

    class Config(EnvironmentConfig):
        block_s: float = 0.0

    config: Config

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        model = OpenAI(base_url=base_url, api_key="-", max_retries=0)
        answer = model.chat.completions.create(model="any", messages=[{"role": "user", "content": f"row {row}="}])
        time.sleep(self.config.block_s)  # noqa: ASYNC251
        return Result(reward=float(answer.choices[0].message.content == "yes"))


class Nothing(AgentEnvironment):
    """Gives no Result."""

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        async with client(base_url) as model:
            await model.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
        return 1.0  # type: ignore[return-value]
