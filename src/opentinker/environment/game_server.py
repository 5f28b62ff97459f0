"""A game behind a game server of the published make: POST /reset and POST /step, one instance per episode."""

from __future__ import annotations

import contextlib
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
    """Raises GameServerError unless somebody answers there, whatever the answer is."""
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


class RemoteEnvironmentClient:
    """One game of a game server. Its calls block, and raise GameServerError."""

    def __init__(self, env_endpoint: str, job_id: str = "default", instance_id: str | None = None) -> None:
        self.env_endpoint, self.job_id = env_endpoint, job_id
        self.instance_id = instance_id or uuid.uuid4().hex

    def reset(self, **kwargs: Any) -> dict[str, Any]:
        """observation, system_prompt, game_state."""
        return post(self.env_endpoint, "/reset", {**self._ids, **kwargs})

    def step(self, action: str) -> StepResult:
        answer = post(self.env_endpoint, "/step", {**self._ids, "action": action})
        return StepResult(
            str(answer.get("observation", "")), answer["reward"], bool(answer["done"]), answer.get("info") or {}
        )

    def finalize(self) -> None:
        """The game is over, whatever its state."""
        post(self.env_endpoint, "/finalize", self._ids)

    def health_check(self) -> bool:
        return GameStatsClient(self.env_endpoint, self.job_id).health_check()

    @property
    def _ids(self) -> dict[str, str]:
        return {"instance_id": self.instance_id, "job_id": self.job_id}


class GameServer(AbstractGame):
    """One episode of a game played by the server at `endpoint`, one of `shards`. `local` draws its start state."""

    concurrent = True

    def __init__(self, endpoint: str, job: str | None, local: AbstractGame, shards: int = 1) -> None:
        self._local = local
        instance = uuid.uuid4().hex
        place = shard_of(endpoint, zlib.crc32(instance.encode()) % shards)
        self._remote = RemoteEnvironmentClient(place, job or "default", instance)
        self._system: str | None = None

    def generate_initial_state(self) -> dict[str, Any]:
        return self._local.generate_initial_state()

    def reset(self, **kwargs: Any) -> str:
        answer = self._remote.reset(**kwargs)
        self._system = answer.get("system_prompt") or self._local.get_system_prompt()
        return str(answer["observation"])

    def step(self, action: str) -> StepResult:
        return self._remote.step(action)

    def get_system_prompt(self) -> str | None:
        return self._system

    def get_initial_user_message(self) -> str:
        return ""

    def close(self) -> None:
        """A server that has forgotten a finished instance says so, and need not be told."""
        with contextlib.suppress(GameServerError):
            self._remote.finalize()
