"""The other side of a sample that a model plays: a game in this process, or one of a game server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from opentinker.environment.game_server import GameServerError, RemoteEnvironmentClient, result_of
from opentinker.envs.adapters.library import Randomness
from opentinker.envs.game import AbstractGame, StepResult, opening_of, run_exclusively, run_in_turn

T = TypeVar("T")
Chat = list[dict[str, Any]]


class Play(Protocol):
    """One episode."""

    async def open(self) -> Chat:
        """Return the first messages for the model."""

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...


class LocalGame:
    """Played in threads; games that share state play one call at a time (`turn`), with exclusive use of the global
    random numbers."""

    def __init__(
        self, make: Callable[[], AbstractGame], state: dict[str, Any], seed: int | None, turn: asyncio.Lock
    ) -> None:
        self._make, self._state, self._turn = make, state, turn
        self._randomness = Randomness(random.SystemRandom().getrandbits(32) if seed is None else seed)
        self._game: AbstractGame | None = None

    async def open(self) -> Chat:
        self._game = await run_exclusively(self._make, self._turn, self._randomness)
        return _chat(*await self._call(partial(opening_of, self._game, self._state)))

    async def _call(self, function: Callable[[], T]) -> T:
        assert self._game is not None
        return await run_in_turn(type(self._game), function, self._turn, self._randomness)

    async def step(self, action: str) -> StepResult:
        assert self._game is not None
        result = await self._call(partial(self._game.step, action))
        if not isinstance(result, StepResult):
            raise TypeError(f"{type(self._game).__name__}.step must return a StepResult, not {type(result).__name__}")
        return result

    async def close(self) -> None:
        if self._game is not None:
            await self._call(self._game.close)


class RemoteGame:
    """Played by a game server."""

    def __init__(self, client: RemoteEnvironmentClient, state: dict[str, Any]) -> None:
        self._client, self._state = client, state
        self._instance = uuid.uuid4().hex
        self._done = True

    async def open(self) -> Chat:
        answer = await self._client.reset(self._instance, **self._state)
        self._done = False
        return _chat(answer.get("system_prompt"), str(answer["observation"]))

    async def step(self, action: str) -> StepResult:
        result = result_of(await self._client.step(self._instance, action))
        self._done = result.done
        return result

    async def close(self) -> None:
        """A server forgets a finished game by itself; one that does not answer cannot be told."""
        if not self._done:
            with contextlib.suppress(GameServerError):
                await self._client.finalize(self._instance)


def _chat(system: str | None, first: str) -> Chat:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": first}]
