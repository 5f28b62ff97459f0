"""Counts the bytes of a tenant's commands that have no answer yet, so that they do not fill the stream.

Redis keys:
    tinker:sizes:{model}  hash: number of a command without an answer -> its bytes, and `tenant`
    tinker:held           hash: tenant -> bytes of these commands of all its models
"""

from __future__ import annotations

from typing import Any

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types.errors import OpenTinkerError

MAX_OPEN_BYTES = 1 << 30
"""Of a tenant. The command that others of its model wait for is admitted even so."""

# KEYS sizes, held, asked, model, open. ARGV: number, bytes, tenant, MAX_OPEN_BYTES. Returns 2: they count now; 1: they
# did before, the command is known, or its server has ended; 0: there is no room
_HOLD = """
local number, bytes = ARGV[1], tonumber(ARGV[2])
if redis.call('HEXISTS', KEYS[1], number) == 1 or redis.call('HEXISTS', KEYS[3], number) == 1 then return 1 end
if redis.call('HEXISTS', KEYS[4], 'over') == 1 then return 1 end
if tonumber(redis.call('HGET', KEYS[2], ARGV[3]) or 0) + bytes > tonumber(ARGV[4]) then
  local missing = tonumber(redis.call('HGET', KEYS[4], 'next') or 0)
  local lowest = redis.call('ZRANGE', KEYS[5], 0, 0)[1]
  if not lowest or tonumber(number) ~= missing or tonumber(lowest) < missing then return 0 end
end
redis.call('HSET', KEYS[1], number, ARGV[2], 'tenant', ARGV[3])
redis.call('HINCRBY', KEYS[2], ARGV[3], ARGV[2])
return 2
"""

# KEYS sizes, held, model. ARGV: number; empty: all of the model, 1 if its server has ended: no more are counted
_RELEASE = """
if ARGV[2] == '1' and redis.call('EXISTS', KEYS[3]) == 1 then redis.call('HSET', KEYS[3], 'over', '1') end
local numbers, tenant = {ARGV[1]}, redis.call('HGET', KEYS[1], 'tenant')
if ARGV[1] == '' then numbers = redis.call('HKEYS', KEYS[1]) end
for _, number in ipairs(numbers) do
  local bytes = number ~= 'tenant' and redis.call('HGET', KEYS[1], number)
  if bytes then redis.call('HINCRBY', KEYS[2], tenant, -tonumber(bytes)) end
end
if ARGV[1] == '' then redis.call('DEL', KEYS[1]) else redis.call('HDEL', KEYS[1], ARGV[1]) end
"""


class TooManyWaiting(OpenTinkerError):
    """As many requests as allowed have no answer yet, or as many bytes of them."""


class CommandBytes:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._hold, self._release = Script(redis, _HOLD), Script(redis, _RELEASE)

    async def hold_bytes(self, model: str, seq: int, tenant: str, size: int) -> bool:
        """Count the bytes of a command until it has its answer, or `release_bytes`; return whether they count anew.
        Raises TooManyWaiting if the tenant's commands without an answer have MAX_OPEN_BYTES with it, unless commands of
        the model wait for this one."""
        held = await self._hold(
            keys=[f"tinker:sizes:{model}", "tinker:held", f"tinker:asked:{model}", f"tinker:model:{model}",
                  f"tinker:open:{model}"],
            args=[str(seq), size, tenant, MAX_OPEN_BYTES],
        )  # fmt: skip
        if not held:
            raise TooManyWaiting(
                f"requests of tenant {tenant} without an answer have {MAX_OPEN_BYTES} bytes; send more when some have "
                "an answer"
            )
        return bool(held == 2)

    async def release_bytes(self, model: str, seq: int | None = None, *, over: bool = False) -> None:
        """Count the bytes of a command, or of all of a model, no longer; if its server is `over`, not those of later
        ones either."""
        await self._release(
            keys=[f"tinker:sizes:{model}", "tinker:held", f"tinker:model:{model}"],
            args=["" if seq is None else str(seq), "1" if over else ""],
        )
