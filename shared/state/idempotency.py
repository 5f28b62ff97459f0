"""Keys in Redis by which a request is made once. Jobs and sweeps have one each, and a key makes one of either."""

from __future__ import annotations

from opentinker.shared.types.errors import Conflict

KEPT_S = 86_400

MADE_BEFORE = """
local function made_before(own, kind, other, other_kind, id, body, ttl)
  if body == '' then return nil end
  local seen = redis.call('HMGET', own, kind, 'body')
  if seen[1] then
    if seen[2] == body then return {'same', seen[1]} end
    return {'differs', kind .. ' ' .. seen[1]}
  end
  local theirs = redis.call('HGET', other, other_kind)
  if theirs then return {'differs', other_kind .. ' ' .. theirs} end
  redis.call('HSET', own, kind, id, 'body', body)
  redis.call('EXPIRE', own, ttl)
  return nil
end
"""
"""A Lua function for scripts: answers what the key has made, or nil after noting that it makes `id`, of kind `job` or
`sweep`. `body` is the hash of the request's body; empty: it has no such key."""


def job_key(tenant: str, idempotency: str) -> str:
    """Return the key of a hash: job that was made, and hash of its body."""
    return f"idem:{tenant}:{idempotency}"


def sweep_key(tenant: str, idempotency: str) -> str:
    """Return the key of a hash: sweep that was made, and hash of its body."""
    return f"sweeps:idem:{tenant}:{idempotency}"


def other_body(made: str) -> Conflict:
    """`made`: what the key has made, e.g. `job j-0123456789`."""
    return Conflict(f"the Idempotency-Key was used for {made} with another body; use a new key")
