"""Agents as functions of a test, and the policy that answers them in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from opentinker.envs.agent import AgentEnvironment, Result
from opentinker.envs.base import Action, EnvironmentConfig, Opening, Step, fields_of
from opentinker.envs.runtime.env_replies import opening_reply, step_reply
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, Policy, SeatAction, SessionReply, StepSession

Talk = Callable[[AsyncOpenAI], Awaitable[Any]]


def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)


class Scripted(AgentEnvironment):
    """Runs a function of the test's own, and keeps what it gives."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(EnvironmentConfig())
        self.talk, self.policy = talk, Policy(model="m", context_length=100)
        self.base_url, self.given = "", None

    async def run(self, base_url: str, row: int, seed: int) -> Result:
        self.base_url = base_url
        async with client(base_url) as model:
            self.given = await self.talk(model)
        return Result(reward=1.0)


def action(text: str, turn: int = 0, stop: StopReason = StopReason.EOS, **changes: Any) -> Action:
    ids = [ord(c) for c in text]
    logprobs = [-0.5 * n for n in range(len(ids))]
    return Action(text=text, stop=stop, turn=turn, ids=ids, logprobs=logprobs, prompt_tokens=7, **changes)


async def play(talk: Talk, *answers: str | Action) -> tuple[Any, list[Opening | Step]]:
    """Return the result of the agent's function, and all prompts of the policy."""
    environment = Scripted(talk)
    asked: list[Opening | Step] = []
    try:
        asked.append(await environment.open(0, 0))
        for turn, answer in enumerate(answers):
            step = await environment.step(answer if isinstance(answer, Action) else action(answer, turn))
            asked.append(step)
        assert isinstance(asked[-1], Step) and asked[-1].done, "it wants more answers"
    finally:
        await environment.close()
    return environment.given, asked[:-1]


def texts(asked: Opening | Step) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in asked.messages]


def chat(*texts: str, **options: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)], **options}


@asynccontextmanager
async def root(model: AsyncOpenAI) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with aiohttp.ClientSession() as http:
        yield http, root_of(model)


def root_of(model: AsyncOpenAI) -> str:
    return str(model.base_url).rstrip("/").removesuffix("/v1")


async def generate(model: AsyncOpenAI, ids: list[int], session: str = "s", **params: Any) -> dict[str, Any]:
    async with root(model) as (http, url):
        body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, **params}}
        async with http.post(f"{url}/inference/v1/generate", json=body, headers={"X-Session-ID": session}) as reply:
            found: dict[str, Any] = await reply.json()
            return found


class Direct:
    """The rollout worker's side of an environment that is in this process."""

    def __init__(self, environment: AgentEnvironment) -> None:
        self.environment = environment

    async def open(self, request: OpenSession, importing: object = None) -> SessionReply:
        return opening_reply("w", self.environment, await self.environment.open(request.row, request.seed))

    async def step(self, worker: str, request: StepSession) -> SessionReply:
        said = Action(turn=request.turn, **fields_of(SeatAction, request))
        reply = step_reply(worker, self.environment, await self.environment.step(said))
        if reply.done:
            await self.environment.close()
        return reply

    async def close(self, **_: object) -> None:
        await self.environment.close()
