"""Counts what the requests of the Tinker API have cost, by tenant and hour, for `tinker billing`.

Redis keys:
    spent:tinker:{tenant}:{hour}   hash: KIND|SESSION|BASE -> tokens, of checkpoints their number; expires. Beyond
                                   MAX_OF_HOUR entries SESSION is empty, for all further sessions together

`hour` counts from 1970. The service that keeps an answer adds to it afterwards: a request counts at most once, and is
missing if the service was killed in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opentinker.shared.state.redis_script import Script, read_hashes

HOUR_S = 3600
KEPT_S = 40 * 24 * HOUR_S
MAX_OF_HOUR = 2000
"""Entries of a tenant's hour that have a session."""

# KEYS hash. ARGV: seconds, MAX_OF_HOUR, and for each amount: kind, session, base, amount
_ADD = """
for at = 3, #ARGV, 4 do
  local kind, session, base, amount = unpack(ARGV, at, at + 3)
  local entry = kind .. '|' .. session .. '|' .. base
  if not redis.call('HGET', KEYS[1], entry) and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then
    entry = kind .. '||' .. base
  end
  redis.call('HINCRBY', KEYS[1], entry, amount)
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


class Spent(NamedTuple):
    hour: int
    kind: str
    session: str
    """Empty: of several sessions."""
    base: str
    amount: int
    """Tokens, or checkpoints."""


class TinkerSpent:
    def __init__(self, redis: Any) -> None:
        self._redis, self._add = redis, Script(redis, _ADD)

    async def add(self, tenant: str, session: str, base: str, amounts: Mapping[str, int]) -> None:
        """Add to this hour's amounts, by kind."""
        args = [part for kind, amount in amounts.items() for part in (kind, session, base, amount)]
        await self._add(keys=[_key(tenant, int(time.time()) // HOUR_S)], args=[KEPT_S, MAX_OF_HOUR, *args])

    async def entries(self, tenant: str, first: int, end: int) -> int:
        """Return how many amounts `between` would return."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for hour in range(first, end):
                pipe.hlen(_key(tenant, hour))
            return sum(await pipe.execute())

    async def between(self, tenant: str, first: int, end: int) -> list[Spent]:
        """Return the amounts of hours from `first` up to `end`, that one left out: by hour, then the largest first."""
        hours = range(first, end)
        hashes: Sequence[Mapping[str, str]] = await read_hashes(self._redis, [_key(tenant, hour) for hour in hours])
        found = []
        for hour, amounts in zip(hours, hashes, strict=True):
            for field, amount in amounts.items():
                kind, session, base = field.split("|", 2)
                found.append(Spent(hour, kind, session, base, int(amount)))
        return sorted(found, key=lambda one: (one.hour, -one.amount, one))


def _key(tenant: str, hour: int) -> str:
    return f"spent:tinker:{tenant}:{hour}"
