"""A game behind a game server of the published make: POST /reset and POST /step, one instance per episode."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import urllib.error
import urllib.request
import uuid
import zlib
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from opentinker.environment.game_stats_client import GameStatsClient
from opentinker.envs.game import AbstractGame, StepResult

TIMEOUT_S = 60.0


class GameServerError(Exception):
    """The server was not reached, or its answer is not one."""


def post(endpoint: str, route: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Raises GameServerError."""
    url = f"{endpoint.rstrip('/')}{route}"
    request = urllib.request.Request(url, orjson.dumps(body), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = orjson.loads(response.read())
    except (OSError, ValueError) as error:
        detail = error.read()[:500].decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        raise GameServerError(f"game server {url}: {error} {detail}".rstrip()) from None
    if not isinstance(answer, dict):
        raise GameServerError(f"game server {url} answered {type(answer).__name__} instead of an object")
    return answer


def look_for(endpoint: str) -> None:
    """Raise GameServerError unless the server answers, with any answer."""
    try:
        urllib.request.urlopen(f"{endpoint.rstrip('/')}/health", timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError) as error:
        raise GameServerError(
            f"no game server at {endpoint} ({error}): start it, or leave env_endpoint out of the config; the game is "
            "then played in this program"
        ) from None


def shard_of(endpoint: str, shard: int) -> str:
    """Servers of one game stand at consecutive ports."""
    if not shard:
        return endpoint
    parts = urlsplit(endpoint)
    if parts.port is None:
        raise ValueError(f"env_shards: the endpoint {endpoint} must name the port of the first")
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{parts.port + shard}"))


class Endpoints:
    """Game servers of one game: `shards` of them at consecutive ports, from `first` on. `exclusive` ones have one
    episode at a time each: behind them stands something that cannot be shared, such as an emulated phone."""

    def __init__(self, first: str, shards: int = 1, *, exclusive: bool = False) -> None:
        self.places = [shard_of(first, shard) for shard in range(shards)]
        self._free: queue.SimpleQueue[str] | None = queue.SimpleQueue() if exclusive else None
        for place in self.places if exclusive else ():
            self.give_back(place)

    def take(self, instance: str) -> str:
        """Return a place for this episode. Blocks while all are taken. Raises GameServerError after TIMEOUT_S."""
        if self._free is None:
            return self.places[zlib.crc32(instance.encode()) % len(self.places)]
        try:
            return self._free.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise GameServerError(f"all {len(self.places)} game servers from {self.places[0]} on are taken") from None

    def give_back(self, place: str) -> None:
        if self._free is not None:
            self._free.put(place)


class RemoteEnvironmentClient:
    """Asks a game server, about any number of games. Raises GameServerError."""

    def __init__(self, env_endpoint: str, job_id: str = "default", timeout: float = TIMEOUT_S) -> None:
        self.env_endpoint, self.job_id, self.timeout = env_endpoint, job_id, timeout

    async def reset(self, instance_id: str, **kwargs: Any) -> dict[str, Any]:
        """observation, system_prompt, game_state."""
        return await self._ask("/reset", instance_id, **kwargs)

    async def step(self, instance_id: str, action: str) -> dict[str, Any]:
        """observation, reward, done, info."""
        return await self._ask("/step", instance_id, action=action)

    async def finalize(self, instance_id: str) -> None:
        """End the game in any state."""
        await self._ask("/finalize", instance_id)

    async def health_check(self) -> bool:
        return await asyncio.to_thread(GameStatsClient(self.env_endpoint, self.job_id).health_check)

    async def _ask(self, route: str, instance_id: str, **more: Any) -> dict[str, Any]:
        body = {"instance_id": instance_id, "job_id": self.job_id, **more}
        return await asyncio.to_thread(post, self.env_endpoint, route, body, self.timeout)


def result_of(answer: dict[str, Any]) -> StepResult:
    """Parse a server's answer to /step."""
    info = answer.get("info") or {}
    return StepResult(str(answer.get("observation", "")), answer["reward"], bool(answer["done"]), info)


class GameServer(AbstractGame):
    """One episode of a game played by one of the servers at `endpoints`. `local` draws its start state, and says the
    system prompt where the server does not."""

    concurrent = True

    def __init__(self, endpoints: Endpoints, job: str | None, local: AbstractGame | None = None) -> None:
        self._endpoints, self._local = endpoints, local
        self._ids = {"instance_id": uuid.uuid4().hex, "job_id": job or "default"}
        self._place: str | None = None
        self._closed = False
        self._placing = threading.Lock()
        self._system: str | None = None

    def generate_initial_state(self) -> dict[str, Any]:
        return {} if self._local is None else self._local.generate_initial_state()

    def reset(self, **kwargs: Any) -> str:
        answer = post(self._taken(), "/reset", {**self._ids, **kwargs})
        self._system = answer.get("system_prompt") or (self._local.get_system_prompt() if self._local else None)
        return str(answer["observation"])

    def _taken(self) -> str:
        if self._place is None:
            place = self._endpoints.take(self._ids["instance_id"])
            with self._placing:
                if self._closed:  # closed since, by a caller that no longer waited for it
                    self._endpoints.give_back(place)
                    raise GameServerError("the episode was closed before a game server was free")
                self._place = place
        return self._place

    def step(self, action: str) -> StepResult:
        return result_of(post(self._taken(), "/step", {**self._ids, "action": action}))

    def get_system_prompt(self) -> str | None:
        return self._system

    def get_initial_user_message(self) -> str:
        return ""

    def close(self) -> None:
        """A server that has forgotten a finished instance says so, and need not be told."""
        with self._placing:
            place, self._place, self._closed = self._place, None, True
        if place is None:
            return
        try:
            with contextlib.suppress(GameServerError):
                post(place, "/finalize", self._ids)
        finally:
            self._endpoints.give_back(place)
