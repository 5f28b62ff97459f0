"""Agents for tests, well-behaved and not. Nothing heavy is imported: that would hold up a whole env worker."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from typing import Any

import aiohttp

from opentinker.envs.agent import AgentEnvironment, Result
from opentinker.envs.base import EnvironmentConfig


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
        async with aiohttp.ClientSession() as http:
            for turn in range(self.config.asks):
                messages = [] if self.config.forgets else messages
                messages.append({"role": "user", "content": f"row {row} seed {seed} turn {turn}="})
                async with http.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                    answer.raise_for_status()
                    said = (await answer.json())["choices"][0]["message"]
                messages.append(said)
                right += said["content"] == "yes"
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
        body = {"messages": [{"role": "user", "content": f"row {row}="}]}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request) as reply:  # noqa: ASYNC210
            said = json.load(reply)["choices"][0]["message"]["content"]
        time.sleep(self.config.block_s)  # noqa: ASYNC251
        return Result(reward=float(said == "yes"))


class Nothing(AgentEnvironment):
    """Gives no Result."""

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        async with aiohttp.ClientSession() as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": [{"role": "user", "content": "?"}]})
        return 1.0  # type: ignore[return-value]
