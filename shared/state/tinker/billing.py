"""Counts what the requests of the Tinker API have cost, by tenant and hour, for `tinker billing`.

Redis keys:
    spent:tinker:{tenant}:{hour}   hash: KIND|SESSION|BASE -> tokens, of checkpoints their number; expires

`hour` counts from 1970. The service that keeps an answer adds to it afterwards: a request counts at most once, and is
missing if the service was killed in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opentinker.shared.state.redis_script import read_hashes

HOUR_S = 3600
KEPT_S = 40 * 24 * HOUR_S


class Spent(NamedTuple):
    hour: int
    kind: str
    session: str
    base: str
    amount: int
    """Tokens, or checkpoints."""


class TinkerSpent:
    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def add(self, tenant: str, session: str, base: str, amounts: Mapping[str, int]) -> None:
        """Add to this hour's amounts, by kind."""
        key = _key(tenant, int(time.time()) // HOUR_S)
        async with self._redis.pipeline(transaction=False) as pipe:
            for kind, amount in amounts.items():
                pipe.hincrby(key, f"{kind}|{session}|{base}", amount)
            pipe.expire(key, KEPT_S)
            await pipe.execute()

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
