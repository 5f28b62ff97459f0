"""Episodes that people play on the page, by tenant: which env worker holds each, until it ends.

Redis keys:
    plays:{tenant}:{owner}      sorted set of the ids that a key or a user plays, by the time at which they began
    play:{tenant}:{id}          the Play as JSON; expires with its episode
"""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from opentinker.shared.types import codec

PLAY_S = 1800
"""Seconds that an episode may take. Its place on an env worker is taken so long at most."""
MAX_PLAYS = 4
"""Of a key, or a user without one, at the same time."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    environment: str
    worker: str
    """Where its steps go."""
    together: bool
    """Whether the seats of `seats` act at the same time."""
    seats: list[str]
    """Who acts next, in order."""
    turn: int = 0
    """Number of the next turn."""

    @property
    def session(self) -> str:
        return f"play-{self.id}"


class Plays:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def save(self, tenant: str, owner: str, play: Play, now: float) -> list[Play]:
        """Save a play after each of its turns. Return those of the owner that are too many, the oldest, which are
        forgotten."""
        own = f"plays:{tenant}:{owner}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(own, 0, now - PLAY_S)
            pipe.zadd(own, {play.id: now}, nx=True)
            pipe.expire(own, PLAY_S)
            pipe.set(f"play:{tenant}:{play.id}", codec.to_json(play), ex=PLAY_S)
            pipe.zrange(own, 0, -MAX_PLAYS - 1)
            *_, many = await pipe.execute()
        ended = [one for id in map(str, many) if (one := await self.find(tenant, id))]
        for one in ended:
            await self.end(tenant, owner, one.id)
        return ended

    async def find(self, tenant: str, id: str) -> Play | None:
        text = await self._redis.get(f"play:{tenant}:{id}")
        return codec.from_json(Play, text) if text else None

    async def end(self, tenant: str, owner: str, id: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(f"plays:{tenant}:{owner}", id)
            pipe.delete(f"play:{tenant}:{id}")
            await pipe.execute()
