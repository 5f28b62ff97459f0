"""Reports of `opentinker env check` that were saved, by tenant and environment; the newest of each.

Redis keys:
    checks:{tenant}             sorted set of report ids by the time they were saved
    check:{tenant}:{id}         hash: summary, report, both JSON
"""

from __future__ import annotations

import hashlib

import msgspec
from redis.asyncio import Redis

from opentinker.shared.state.redis_script import Script, read_field
from opentinker.shared.types import codec

MAX_REPORTS = 100
"""Limit of a tenant; the oldest reports are removed."""

# KEYS checks, check. ARGV: id, time, most, prefix of the others, summary, report
_SAVE = """
redis.call('HSET', KEYS[2], 'summary', ARGV[5], 'report', ARGV[6])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
for _, old in ipairs(redis.call('ZRANGE', KEYS[1], 0, -tonumber(ARGV[3]) - 1)) do
  redis.call('ZREM', KEYS[1], old)
  redis.call('DEL', ARGV[4] .. old)
end
"""


class CheckSummary(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The same for every report on this environment."""
    environment: str
    verdict: str
    errors: int
    at: float
    """Unix seconds."""


class CheckReports:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._save = Script(redis, _SAVE)

    async def save(
        self, tenant: str, environment: str, verdict: str, errors: int, report: bytes, now: float
    ) -> CheckSummary:
        """Keep a report in place of the last one on this environment. `report` is JSON."""
        id = hashlib.sha256(environment.encode()).hexdigest()[:12]
        summary = CheckSummary(id=id, environment=environment, verdict=verdict, errors=errors, at=now)
        await self._save(
            keys=[f"checks:{tenant}", f"check:{tenant}:{id}"],
            args=[id, now, MAX_REPORTS, f"check:{tenant}:", codec.to_json(summary), report],
        )
        return summary

    async def of(self, tenant: str) -> list[CheckSummary]:
        """Newest first."""
        ids = await self._redis.zrange(f"checks:{tenant}", 0, -1, desc=True)
        found = await read_field(self._redis, [f"check:{tenant}:{id}" for id in map(str, ids)], "summary")
        return [codec.from_json(CheckSummary, text) for text in found if text]

    async def find(self, tenant: str, id: str) -> tuple[CheckSummary, str] | None:
        """Return summary and report, which is JSON, or None."""
        summary, report = await self._redis.hmget(f"check:{tenant}:{id}", "summary", "report")
        return (codec.from_json(CheckSummary, summary), str(report)) if summary else None

    async def delete(self, tenant: str, id: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(f"checks:{tenant}", id)
            pipe.delete(f"check:{tenant}:{id}")
            await pipe.execute()
