"""Notifications that are to be sent: kept in Redis until they are, or have failed too often.

Redis keys:
    notify:jobs             sorted set of jobs that notify, by the time they were submitted
    notify:seen:{job}       hash: after (id of the last event that was looked at), cursor (of metrics), target:{n}; of a
                            sweep that runs target:{n}
    notify:tenants          set of tenants that ever had a message
    notify:due:{tenant}     sorted set of ids of messages by the time of the next try
    notify:mails:{tenant}   e-mails within the hour; expires with it
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

from opentinker.shared.state.redis_script import Script, read_hashes
from opentinker.shared.types import codec

PREFIX = "whsec_"
"""Defined by https://www.standardwebhooks.com."""
SECRET_BYTES = 32
HOUR_S = 3600
_TAKE = """
redis.call('EXPIRE', KEYS[1], ARGV[2], 'NX')
if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then
  return math.max(1, redis.call('PTTL', KEYS[1]))
end
redis.call('INCR', KEYS[1])
redis.call('EXPIRE', KEYS[1], ARGV[2], 'NX')
return 0
"""
_GIVE_BACK = "if tonumber(redis.call('GET', KEYS[1]) or '0') > 0 then redis.call('DECR', KEYS[1]) end"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """JOB/EVENT/ENTRY: the same for every try."""
    job: str
    """Id of the job, or of the sweep."""
    tenant: str
    entry: int
    """Place in its `notify`."""
    occasion: str
    body: dict[str, Any]
    tries: int = 0


class Notifications:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._take, self._give_back = Script(redis, _TAKE), Script(redis, _GIVE_BACK)

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
        await self._redis.delete(seen_key(job))

    async def seen(self, jobs: Sequence[str]) -> list[dict[str, str]]:
        """Return what of each job was looked at."""
        return await read_hashes(self._redis, [seen_key(job) for job in jobs])

    async def add(self, job: str, messages: Sequence[Message], seen: Mapping[str, str], now: float) -> None:
        """Store messages, and the values of the job that caused them, in one transaction. A message that is stored
        already stays."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for message in messages:
                pipe.hsetnx("notify:messages", message.id, codec.to_json(message))
                pipe.sadd("notify:tenants", message.tenant)
                pipe.zadd(_due(message.tenant), {message.id: now}, nx=True)
            for name, value in seen.items():
                pipe.hset(seen_key(job), name, value)
            await pipe.execute()

    async def due(self, now: float, each: int) -> list[Message]:
        """Return what is to be sent now, the longest due first; of each tenant so much at most."""
        pipe = self._redis.pipeline(transaction=False)
        for tenant in sorted(await self._redis.smembers("notify:tenants")):
            pipe.zrangebyscore(_due(str(tenant)), "-inf", now, start=0, num=each)
        ids = [str(id) for found in await pipe.execute() for id in found]
        texts = await self._redis.hmget("notify:messages", ids) if ids else []
        return [codec.from_json(Message, text) for text in texts if text]

    async def again(self, message: Message, at: float) -> None:
        """The message failed; it is tried again at that time."""
        more = msgspec.structs.replace(message, tries=message.tries + 1)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset("notify:messages", message.id, codec.to_json(more))
            pipe.zadd(_due(message.tenant), {message.id: at})
            await pipe.execute()

    async def postpone(self, message: Message, at: float) -> None:
        """The message waits until that time; this is no try."""
        await self._redis.zadd(_due(message.tenant), {message.id: at}, xx=True)

    async def done(self, message: Message) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(_due(message.tenant), message.id)
            pipe.hdel("notify:messages", message.id)
            await pipe.execute()

    async def take_mail(self, tenant: str, limit: int) -> float:
        """Count an e-mail, unless there were `limit` within the hour. Return the seconds until the next hour begins; 0:
        it is counted."""
        return int(await self._take(keys=[_mails(tenant)], args=[limit, HOUR_S])) / 1000

    async def give_back_mail(self, tenant: str) -> None:
        """An e-mail that was counted is not sent."""
        await self._give_back(keys=[_mails(tenant)])

    async def secret(self, tenant: str, *, renew: bool = False) -> str:
        """Return the key that signs the tenant's webhooks. The first call creates it; `renew` replaces it."""
        fresh = PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        await self._redis.set(f"notify:secret:{tenant}", fresh, nx=not renew)
        return str(await self._redis.get(f"notify:secret:{tenant}"))


def seen_key(id: str) -> str:
    """Return the key of what of a job or sweep was looked at."""
    return f"notify:seen:{id}"


def _mails(tenant: str) -> str:
    return f"notify:mails:{tenant}"


def _due(tenant: str) -> str:
    return f"notify:due:{tenant}"
