"""Episodes that people play on the page, by tenant: which env worker holds each, until it ends.

Redis keys:
    plays:{tenant}:{owner}      sorted set of the ids that a key or a user plays, by the time at which they began
    play:{tenant}:{id}          the Play as JSON; expires with its episode
    play_answer:{tenant}:{id}   the PlayAnswer to its last turn as JSON; outlives an episode that has ended by ENDED_S
"""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types import codec

PLAY_S = 1800
"""Seconds that an episode may take, and occupy a place on an env worker."""
MAX_PLAYS = 4
"""Concurrent plays of a key, or of a user without one."""
ENDED_S = 300
"""Seconds for which the answer that ended an episode can be asked for again."""

# KEYS play, its answer. ARGV: before, after, the answer, its seconds
_MOVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
return 1
"""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    environment: str
    worker: str
    """Where its steps go."""
    together: bool
    """Whether the seats of `seats` act at the same time."""
    seats: list[str]
    """Seats that act next, in order."""
    turn: int = 0
    """Number of the next turn."""

    @property
    def session(self) -> str:
        return f"play-{self.id}"


class PlayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    turn: int
    actions: str
    """Digest of what the person did in this turn."""
    answer: msgspec.Raw
    """What the person was answered, as JSON."""


class Plays:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._move = Script(redis, _MOVE)

    async def begin(self, tenant: str, owner: str, play: Play, now: float) -> list[Play]:
        """Save a play. Return those of the owner that are too many, the oldest, which are forgotten."""
        own = f"plays:{tenant}:{owner}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(own, 0, now - PLAY_S)
            pipe.zadd(own, {play.id: now})
            pipe.expire(own, PLAY_S)
            pipe.set(f"play:{tenant}:{play.id}", codec.to_json(play), ex=PLAY_S)
            pipe.zrange(own, 0, -MAX_PLAYS - 1)
            *_, many = await pipe.execute()
        ended = [one for id in map(str, many) if (one := await self.find(tenant, id))]
        for one in ended:
            await self.end(tenant, owner, one.id)
        return ended

    async def move(self, tenant: str, before: Play, after: Play, answer: PlayAnswer) -> bool:
        """Save a play and the answer after a turn. Return False, and change nothing, if the stored play has moved or
        ended."""
        keys = [f"play:{tenant}:{before.id}", f"play_answer:{tenant}:{before.id}"]
        texts = [codec.to_json(before), codec.to_json(after), codec.to_json(answer)]
        return bool(await self._move(keys=keys, args=[*texts, PLAY_S]))

    async def answered(self, tenant: str, id: str) -> PlayAnswer | None:
        """Return the answer to the last turn of a play."""
        text = await self._redis.get(f"play_answer:{tenant}:{id}")
        return codec.from_json(PlayAnswer, text) if text else None

    async def find(self, tenant: str, id: str) -> Play | None:
        text = await self._redis.get(f"play:{tenant}:{id}")
        return codec.from_json(Play, text) if text else None

    async def end(self, tenant: str, owner: str, id: str, answer: PlayAnswer | None = None) -> None:
        """Forget a play. `answer`: to the turn that ended it."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(f"plays:{tenant}:{owner}", id)
            pipe.delete(f"play:{tenant}:{id}")
            if answer is None:
                pipe.delete(f"play_answer:{tenant}:{id}")
            else:
                pipe.set(f"play_answer:{tenant}:{id}", codec.to_json(answer), ex=ENDED_S)
            await pipe.execute()
