"""Circuit breakers of environments: one that is down for everybody is not played until a group for trial succeeds.

    closed --OPENS_AFTER failed groups in a row--> open --wait--> one group for trial --succeeds--> closed
                                                    ^------- otherwise, and the wait doubles ------'

All jobs of a tenant that play the same environment with the same config share a circuit. What opens it is an
environment that cannot be reached at any time, or does not answer or raises before a policy has acted (later it may be
the policy that breaks it), and only if it has worked before: otherwise it is more likely wrong than down, and
`rollout.max_failed_share` ends the job. A group that fails in another way, but has been opened since, closes it too.

Redis key `circuit:{tenant}:{environment}`, a hash: worked (1 once a group has succeeded), failures (groups in a row),
opened (absent: closed), error and failed_at (of the last one), wait_s, retry_at.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from redis.asyncio import Redis

from opentinker.shared.state.redis_script import Script
from opentinker.shared.types import codec
from opentinker.shared.types.core import Ending

OPENS_AFTER = 5
FIRST_WAIT_S, MAX_WAIT_S = 5.0, 300.0
KEPT_S = 7 * 86400
"""After the last group."""
OUTAGES = (Ending.ENV_LOST, Ending.ENV_TIMEOUT, Ending.ENV_ERROR)
DOWN = "env_down"
"""Reason for which groups fail while the circuit is open, in the ledger."""

# KEYS circuit. ARGV: kept, now, error, opens after, first wait
_FAILED = """
redis.call('EXPIRE', KEYS[1], ARGV[1])
if not redis.call('HGET', KEYS[1], 'worked') then return 0 end
redis.call('HSET', KEYS[1], 'error', ARGV[3], 'failed_at', ARGV[2])
if redis.call('HGET', KEYS[1], 'opened') then return 1 end
local failures = redis.call('HINCRBY', KEYS[1], 'failures', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
if failures < tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], 'opened', ARGV[2], 'wait_s', ARGV[5], 'retry_at', ARGV[2] + ARGV[5])
return 1
"""
# ARGV: kept
_SUCCEEDED = """
redis.call('HSET', KEYS[1], 'worked', 1)
redis.call('HDEL', KEYS[1], 'failures', 'opened', 'error', 'failed_at', 'wait_s', 'retry_at')
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
# ARGV: now, longest wait
_TRIED = """
if not redis.call('HGET', KEYS[1], 'opened') then return end
local wait = math.min(2 * redis.call('HGET', KEYS[1], 'wait_s'), tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], 'wait_s', wait, 'retry_at', ARGV[1] + wait)
"""


class Circuit(msgspec.Struct, frozen=True, kw_only=True):
    failures: int = 0
    """Groups that have failed in a row until it opened."""
    opened: float = 0.0
    """Unix seconds; 0: it is closed."""
    error: str = ""
    failed_at: float = 0.0
    """When the last group failed."""
    retry_at: float = 0.0
    """When the next group is played for trial."""

    @property
    def is_open(self) -> bool:
        return self.opened > 0


def circuit_key(tenant: str, environment: dict[str, Any]) -> str:
    """`environment`: as a spec has it."""
    played = codec.to_json([environment.get("name"), environment.get("config")])
    return f"circuit:{tenant}:{hashlib.sha256(played).hexdigest()[:20]}"


class Circuits:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._failed, self._succeeded, self._tried = (Script(redis, text) for text in (_FAILED, _SUCCEEDED, _TRIED))

    async def find(self, key: str) -> Circuit:
        return msgspec.convert(await self._redis.hgetall(key), Circuit, strict=False)

    async def failed(self, key: str, ending: Ending, error: str, now: float, *, opened_at: float = 0.0) -> bool:
        """Note a failed group. Return whether it belongs to an outage: the circuit is open. `opened_at`: Unix seconds
        when the environment had opened its episode; 0: it has not."""
        if ending in OUTAGES and (not opened_at or ending is Ending.ENV_LOST):
            args = [KEPT_S, now, error[:1000], OPENS_AFTER, FIRST_WAIT_S]
            return bool(await self._failed(keys=[key], args=args))
        circuit = await self.find(key)
        if circuit.is_open and opened_at > circuit.opened:
            await self.succeeded(key)
            return False
        return circuit.is_open and ending in OUTAGES

    async def succeeded(self, key: str) -> None:
        """Note a group that was played to its end."""
        await self._succeeded(keys=[key], args=[KEPT_S])

    async def tried(self, key: str, now: float) -> None:
        """Note that a group is played for trial; the next one waits twice as long."""
        await self._tried(keys=[key], args=[now, MAX_WAIT_S])
