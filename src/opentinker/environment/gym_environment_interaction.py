"""Episodes on a game server, or of a game in this process, by id: for programs that play them themselves.

Training does not go this way: a job plays what `fit` serves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentinker.environment.base_game_environment import OBSERVATION, check_template, endpoints_of
from opentinker.environment.game_server import GameServer
from opentinker.envs.game import AbstractGame, opening_of


class GymEnvironmentInteraction:
    """`config`: env_endpoint (with env_shards, bind_worker_to_endpoint) of game servers, or env_factory, which makes a
    game; job_id, max_steps, observation_template. Blocking calls are made in threads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(self.config.get("name", "gym"))
        self.max_steps = int(self.config.get("max_steps", 100))
        self._template = str(self.config.get("observation_template", OBSERVATION))
        self._endpoints = endpoints_of({"interaction": {"config": self.config}})
        check_template(self._template)
        if bool(self.config.get("env_endpoint")) == bool(self.config.get("env_factory")):
            raise ValueError("config: give env_endpoint or env_factory, one of them")
        self._games: dict[str, AbstractGame] = {}
        self._rewards: dict[str, list[float]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins an episode; `kwargs` are those of `reset`. Gives its id."""
        id = instance_id or uuid.uuid4().hex
        self._games[id] = game = self._make()
        self._rewards[id] = []
        await asyncio.to_thread(opening_of, game, kwargs)
        return id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return the game's reply to the last message of the assistant: done, text, reward, info."""
        said = next((str(m["content"]) for m in reversed(messages) if m.get("role") == "assistant"), "")
        result = await asyncio.to_thread(self._game(instance_id).step, said)
        rewards = self._rewards[instance_id]
        rewards.append(float(result.reward))
        done = result.done or len(rewards) >= self.max_steps
        text = self._template.replace(OBSERVATION, result.observation)
        return done, text, float(result.reward), dict(result.info)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The sum of the rewards so far."""
        self._game(instance_id)
        return sum(self._rewards[instance_id])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        game = self._games.pop(instance_id, None)
        self._rewards.pop(instance_id, None)
        if game is not None:
            await asyncio.to_thread(game.close)

    def _make(self) -> AbstractGame:
        factory: Callable[[], AbstractGame] | None = self.config.get("env_factory")
        if factory is not None:
            return factory()
        assert self._endpoints is not None
        return GameServer(self._endpoints, self.config.get("job_id"))

    def _game(self, instance_id: str) -> AbstractGame:
        if instance_id not in self._games:
            raise KeyError(f"no episode {instance_id!r}: start_interaction begins one")
        return self._games[instance_id]


class SimpleTextEnvironmentInteraction(GymEnvironmentInteraction):
    """The same: games read and write text here."""
