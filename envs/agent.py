"""Environments that own the loop: an agent calls the model over HTTP as it needs, and reports its reward at the end.
Any program with a `base_url` becomes an environment.

    class Twice(AgentEnvironment):
        '''Asks for a number, and then whether it is sure.'''

        async def run(self, base_url: str, row: int, seed: int) -> Result:
            async with AsyncOpenAI(base_url=base_url, api_key="-") as client:
                ...
            return Result(reward=1.0, metrics={"exact": 1.0})

It is an ordinary environment with the control flow inverted: the agent's request is the next observation, the policy's
turn is the response, and the end of `run` is the end of the episode. Sampled tokens are recorded one by one;
`agents/contexts.py` maps requests to token streams. Requests of one episode are answered one after the other, in order
of arrival. The endpoint cannot be reached from outside (`agents/endpoint.py`).

`run` must end when it is cancelled and must not block the event loop. With `blocking = True` it may block: it then runs
in a thread of a child process that also serves the endpoint.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
from pydantic import BaseModel

from opentinker.envs.agents.contexts import Contexts
from opentinker.envs.agents.endpoint import Endpoint, PendingRequest
from opentinker.envs.base import Action, Environment, Opening, Prompt, Step, fields_of
from opentinker.envs.threads import in_daemon_thread
from opentinker.shared.openai.fields import InvalidField
from opentinker.shared.types import codec
from opentinker.shared.types.core import Message

OBSERVED_BYTES = 256 * 1024
"""Largest new part of one request, without what the policy already knows: the limit of an env worker's reply."""


class AgentError(Exception):
    """The agent failed and its episode has no reward."""


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Outcome of an agent's episode."""

    reward: float
    components: dict[str, float] = {}
    """Named parts of `reward`, plotted as separate curves."""
    metrics: dict[str, float] = {}
    """See Step."""


class AgentEnvironment(Environment):
    """Subclasses implement `run`. `self.config` and `self.policy` (the model's name, its context length) are set
    before it is called."""

    wants_tokens = True

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._contexts = Contexts()
        self._endpoint: Endpoint | None = None
        self._agent: asyncio.Future[Result] | None = None
        self._pending: PendingRequest
        self.has_asked = False
        """Whether the agent has asked the model anything yet."""

    @abstractmethod
    async def run(self, base_url: str, row: int, seed: int) -> Result:
        """Play the agent's whole episode. `base_url` is that of an OpenAI-compatible server and ends in /v1.

        As in `open`, `row` and `seed` alone decide the start state. Raising fails the episode.
        """

    async def serve(self, endpoint: Endpoint) -> str:
        """Start the endpoint where the agent can reach it. Return its URL for OpenAI clients, which ends in /v1."""
        return await endpoint.start()

    async def open(self, row: int, seed: int) -> Opening:
        self._endpoint = Endpoint(self.policy)
        base_url = await self.serve(self._endpoint)
        agent = _without_exit(self.run(base_url, row, seed))
        self._agent = (  # in a thread it has its own event loop, which it may block
            in_daemon_thread(partial(asyncio.run, agent), "agent") if self.blocking else asyncio.ensure_future(agent)
        )
        opening = await self._next()
        if opening is None:
            raise AgentError("the agent ended without having asked the model anything")
        return opening

    async def step(self, action: Action) -> Step:
        self._contexts.add_answer(self._pending.asked, action)
        if not self._pending.gone:
            self._pending.answer.set_result(action)
        asked = await self._next()
        if asked is not None:
            return Step(**fields_of(Prompt, asked))
        assert self._agent is not None
        result = self._agent.result()
        return Step(reward=result.reward, components=result.components, metrics=result.metrics, done=True)

    async def close(self) -> None:
        """Stop the agent. One in a thread cannot be stopped, only cut off from the model; if that is not enough, its
        process is killed."""
        if self._agent is not None and not self.blocking:
            self._agent.cancel()
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._agent is not None:
            await asyncio.wait([self._agent])
            if not self._agent.cancelled():
                self._agent.exception()  # retrieved, so that asyncio does not log it

    async def _next(self) -> Opening | None:
        """Return the agent's next request, None at its end. Raise the agent's errors, and AgentError if it returns no
        Result."""
        assert self._agent is not None and self._endpoint is not None
        while True:
            asking = asyncio.ensure_future(self._endpoint.next())
            either: list[asyncio.Future[Any]] = [asking, self._agent]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not asking.done():
                    asking.cancel()
            if self._agent.done():
                _check_result(self._agent)
                return None
            self._pending, self.has_asked = asking.result(), True
            placed = self._contexts.place(self._pending.asked)
            if _bytes_of(placed) <= OBSERVED_BYTES:
                return placed
            problem = f"what is new in the request has more than {OBSERVED_BYTES:,} bytes"
            self._pending.answer.set_exception(InvalidField(problem, code="context_length_exceeded"))


def _check_result(agent: asyncio.Future[Result]) -> None:
    if agent.cancelled():
        raise AgentError("the agent was cancelled")
    result = agent.result()
    if not isinstance(result, Result):
        raise AgentError(f"run() must return a Result, not {type(result).__name__}")


async def _without_exit(agent: Coroutine[Any, Any, Result]) -> Result:
    """Turn exceptions that would end the process into AgentError, which ends the episode."""
    try:
        return await agent
    except (SystemExit, KeyboardInterrupt, StopIteration) as error:
        raise AgentError(f"the agent raised {error!r}") from error


def _bytes_of(placed: Opening) -> int:
    forced = len(codec.encode([placed.tools, placed.guide])) if placed.tools or placed.guide else 0
    return sum(map(_message_bytes, placed.messages)) + len((placed.prompt_text or "").encode()) + forced


def _message_bytes(message: Message) -> int:
    return len(message.text.encode()) + sum(len(image.data) for image in message.images)
