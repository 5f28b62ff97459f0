"""Notifications that are to be sent: kept in Redis until they are, or have failed too often.

Redis keys:
    notify:jobs             sorted set of jobs that notify, by the time they were submitted
    notify:seen:{job}       hash: after (id of the last event that was looked at), cursor (of metrics), target:{n}
    notify:due              sorted set of ids of messages by the time of the next try
    notify:messages         hash of messages by id, JSON
    notify:secret:{tenant}  what webhooks are signed with
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from opentinker.shared.types import codec

PREFIX = "whsec_"
"""As of https://www.standardwebhooks.com."""
SECRET_BYTES = 32


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """JOB/EVENT/ENTRY: the same for every try."""
    job: str
    tenant: str
    entry: int
    """Place in the job's `notify`."""
    occasion: str
    body: dict[str, Any]
    tries: int = 0


class Notifications:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def follow(self, job: str, now: float) -> None:
        """The job is to be looked at from now on."""
        await self._redis.zadd("notify:jobs", {job: now})

    async def followed(self) -> dict[str, float]:
        """Return jobs and when they were submitted."""
        pairs = cast(list[tuple[str, float]], await self._redis.zrange("notify:jobs", 0, -1, withscores=True))
        return dict(pairs)

    async def forget(self, job: str) -> None:
        """The job has ended and its messages are made."""
        await self._redis.zrem("notify:jobs", job)
        await self._redis.delete(f"notify:seen:{job}")

    async def seen(self, job: str) -> dict[str, str]:
        return cast(dict[str, str], await self._redis.hgetall(f"notify:seen:{job}"))

    async def add(self, job: str, messages: Sequence[Message], seen: Mapping[str, str], now: float) -> None:
        """Keep messages, and what of the job was looked at for them, at once. One that is kept already stays."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for message in messages:
                pipe.hsetnx("notify:messages", message.id, codec.to_json(message))
                pipe.zadd("notify:due", {message.id: now}, nx=True)
            for name, value in seen.items():
                pipe.hset(f"notify:seen:{job}", name, value)
            await pipe.execute()

    async def due(self, now: float, most: int) -> list[Message]:
        ids = await self._redis.zrangebyscore("notify:due", "-inf", now, start=0, num=most)
        texts = await self._redis.hmget("notify:messages", [str(id) for id in ids]) if ids else []
        return [codec.from_json(Message, text) for text in texts if text]

    async def again(self, message: Message, at: float) -> None:
        """The message failed; it is tried again at that time."""
        more = msgspec.structs.replace(message, tries=message.tries + 1)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset("notify:messages", message.id, codec.to_json(more))
            pipe.zadd("notify:due", {message.id: at})
            await pipe.execute()

    async def done(self, message: Message) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem("notify:due", message.id)
            pipe.hdel("notify:messages", message.id)
            await pipe.execute()

    async def secret(self, tenant: str, *, renew: bool = False) -> str:
        """Return what the tenant's webhooks are signed with; made at the first call, and anew if `renew`."""
        fresh = PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        await self._redis.set(f"notify:secret:{tenant}", fresh, nx=not renew)
        return str(await self._redis.get(f"notify:secret:{tenant}"))
