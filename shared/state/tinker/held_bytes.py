"""Counts the bytes that the server keeps for a tenant until its clients go on: of requests without an answer, of the
large answers that those for samples may have, and of large answers that were not read. So they fill neither the streams
nor Redis.

Redis keys:
    tinker:sizes  hash: request without an answer, key of one for samples (of the answer that it may have), or key of a
                  large answer that was not read -> BYTES TENANT
    tinker:bytes  hash: tenant -> sum of its
    tinker:kept   sorted set: those of the first hash that count for a time alone, by the Unix time at which it ends
"""

from __future__ import annotations

from typing import Any

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.errors import OpenTinkerError

MAX_HELD_BYTES = 1 << 30
"""Of a tenant. The command that others of its model wait for is admitted even so."""
HELD_KEYS = ("tinker:sizes", "tinker:bytes", "tinker:kept")

HELD = """
local SIZES, HELD, KEPT = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local function release(name)
  local bytes, tenant = string.match(redis.call('HGET', SIZES, name) or '', '^(%d+) (.*)$')
  if not bytes then return nil end
  redis.call('HDEL', SIZES, name)
  redis.call('ZREM', KEPT, name)
  if redis.call('HINCRBY', HELD, tenant, '-' .. bytes) == 0 then redis.call('HDEL', HELD, tenant) end
  return tenant
end
local function hold(name, bytes, tenant, ends)
  release(name)
  if tonumber(bytes) == 0 then return end
  redis.call('HSET', SIZES, name, bytes .. ' ' .. tenant)
  redis.call('HINCRBY', HELD, tenant, bytes)
  if ends then redis.call('ZADD', KEPT, ends, name) end
end
local function is_full(bytes, tenant, most, now)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEPT, '-inf', now)) do release(name) end
  return tonumber(bytes) > 0 and tonumber(redis.call('HGET', HELD, tenant) or 0) + bytes > tonumber(most)
end
"""
"""Common beginning of scripts whose last keys are HELD_KEYS."""

# ARGV: name
_RELEASE = HELD + "release(ARGV[1])"

# KEYS names, model. ARGV: what precedes each of the names, 1 if the model's server has ended: no more are counted
_RELEASE_ALL = (
    HELD
    + """
if ARGV[2] == '1' and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'over', '1') end
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do release(ARGV[1] .. name) end
"""
)


class TooManyWaiting(OpenTinkerError):
    """As many requests as allowed have no answer yet, or as many bytes are kept for the tenant."""


class HeldBytes:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._release, self._release_all = Script(redis, _RELEASE), Script(redis, _RELEASE_ALL)

    async def release(self, name: str) -> None:
        """Count the bytes of a request, or of an answer by its key, no longer."""
        await self._release(keys=HELD_KEYS, args=[name])

    async def release_commands(self, model: str, *, over: bool = False) -> None:
        """Count the bytes of a model's commands without an answer no longer; if its server is `over`, not those of
        later ones either."""
        keys = [f"tinker:open:{model}", f"tinker:model:{model}", *HELD_KEYS]
        await self._release_all(keys=keys, args=[f"{model}#", "1" if over else ""])

    async def release_samples(self, job: str) -> None:
        """Count the bytes of requests for samples of a server that has ended no longer."""
        for tenant in await self._redis.hkeys("tinker:bytes"):
            for prefix in ("", "tinker:draw:"):
                await self._release_all(keys=[f"tinker:waiting:{job}:{tenant}", "", *HELD_KEYS], args=[prefix, ""])


def too_many_bytes(tenant: str) -> TooManyWaiting:
    return TooManyWaiting(
        f"requests of tenant {tenant} without an answer, and large answers that were not read, have {MAX_HELD_BYTES} "
        "bytes; send more when some are answered and read"
    )
