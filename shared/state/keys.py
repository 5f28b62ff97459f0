"""Records of API keys in Redis: a key's digest, never its secret (`key_text.py`).

Redis keys (`{id}` is the id of a key, `{tenant}` a tenant's name):
    key:{id}            hash: tenant, role, scopes, name, digest (SHA-256 of the whole key), created, by, expires, used,
                        revoked, old (the digest before the last rotation), old_until, jobs (of share links)
    keys:of:{tenant}    sorted set of ids by creation time
    tenants             sorted set of the tenants that have had a key, by the time of their first one

A revoked or expired key is remembered for KEPT_S, so that its users get a precise error; afterwards it is unknown.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from opentinker.shared.security.authorization import SCOPES, Action, Principal, Role
from opentinker.shared.security.key_text import digest_of, parse
from opentinker.shared.state.redis_script import Script, read_hashes
from opentinker.shared.types.errors import Conflict, NotFound

ALL = "*"
KEPT_S = 30 * 86400
USED_EVERY_S = 60.0
"""`used` is written so often."""

# A client that lost the connection sends its command again, so each of these may be run twice.
# KEYS key, keys:of, tenants. ARGV: id, now, most, tenant, digest, forgotten at (0: never), names and values of fields
_CREATE = """
local known = redis.call('HGET', KEYS[1], 'digest')
if known == ARGV[5] then return 'ok' end
if known then return 'known' end
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if redis.call('EXISTS', 'key:' .. id) == 0 then redis.call('ZREM', KEYS[2], id) end
end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('HSET', KEYS[1], unpack(ARGV, 7))
if tonumber(ARGV[6]) > 0 then redis.call('EXPIREAT', KEYS[1], ARGV[6]) end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], 'NX', ARGV[2], ARGV[4])
return 'ok'
"""

# KEYS key. ARGV: now, new digest, old one valid until
_ROTATE = """
local digest, revoked, expires = unpack(redis.call('HMGET', KEYS[1], 'digest', 'revoked', 'expires'))
if not digest then return 'missing' end
if digest == ARGV[2] then return 'ok' end
if tonumber(revoked) > 0 then return 'revoked' end
if tonumber(expires) > 0 and tonumber(expires) <= tonumber(ARGV[1]) then return 'expired' end
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'old', digest, 'old_until', ARGV[3])
return 'ok'
"""

# KEYS key. ARGV: now, seconds that it is remembered
_REVOKE = """
local revoked = redis.call('HGET', KEYS[1], 'revoked')
if not revoked then return 'missing' end
if tonumber(revoked) == 0 then
  redis.call('HSET', KEYS[1], 'revoked', ARGV[1])
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return 'ok'
"""

# KEYS key. ARGV: now
_USED = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'used', ARGV[1]) end"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a key."""

    id: str
    tenant: str
    role: Role
    scopes: str
    """Comma separated, sorted; ALL: everything that the role allows."""
    name: str
    digest: str
    created: float
    by: str
    """Id of the key that made it; `file`: it stood in `admin_key_file`."""
    expires: float
    """Unix seconds; 0: never."""
    used: float = 0.0
    """When it was last used, to the minute; 0: never."""
    revoked: float = 0.0
    old: str = ""
    old_until: float = 0.0
    jobs: str = ""
    """Comma separated ids of the jobs that a share link shows; empty: it is an ordinary key."""

    def state(self, now: float) -> str:
        """live | expired | revoked"""
        return "revoked" if self.revoked else "expired" if 0 < self.expires <= now else "live"

    @property
    def principal(self) -> Principal:
        named = (Action(scope) for scope in self.scopes.split(",") if scope)
        scopes = SCOPES if self.scopes == ALL else frozenset(named)
        return Principal(self.tenant, self.role, self.id, scopes, frozenset(filter(None, self.jobs.split(","))))

    def fits(self, digest: str, now: float) -> bool:
        """Return whether the secret is this key's: the present one, or the previous one for a while after a
        rotation."""
        old = hmac.compare_digest(digest, self.old) and now < self.old_until
        return hmac.compare_digest(digest, self.digest) or old


class KeyStore:
    """`now` everywhere: Unix seconds, of the scheduler's clock."""

    def __init__(self, redis: Any, max_keys: int = 1000) -> None:
        """`max_keys`: of each tenant."""
        self._redis, self._max_keys = redis, max_keys
        self._create = Script(redis, _CREATE)
        self._rotate = Script(redis, _ROTATE)
        self._revoke = Script(redis, _REVOKE)
        self._used = Script(redis, _USED)

    async def create(
        self,
        text: str,
        *,
        now: float,
        tenant: str,
        role: Role,
        scopes: Sequence[Action] | None,
        name: str,
        by: str,
        expires: float = 0.0,
        jobs: Sequence[str] = (),
    ) -> Key:
        """`scopes` None: all that the role allows, now and later; `jobs`: all that a share link shows. The key that has
        this id: another one, if its digest is another. Raises Conflict if the tenant has too many."""
        parsed = parse(text)
        assert parsed is not None
        id, digest = parsed[1], digest_of(text)
        named = ALL if scopes is None else ",".join(sorted(scope.value for scope in scopes))
        made = Key(
            id=id, tenant=tenant, role=role, scopes=named, name=name, digest=digest, created=now, by=by,
            expires=expires, jobs=",".join(jobs),
        )  # fmt: skip
        fields = msgspec.to_builtins(made)
        del fields["id"]
        gone = int(expires + KEPT_S) if expires else 0
        answer = await self._create(
            keys=[_of(id), _all_of(tenant), "tenants"],
            args=[id, now, self._max_keys, tenant, digest, gone, *(part for pair in fields.items() for part in pair)],
        )
        if answer == "full":
            most = f"tenant {tenant} has {self._max_keys} keys, which is the most"
            raise Conflict(f"{most}; revoked ones count for a month")
        found = await self.find(id)
        if found is None:
            raise NotFound(f"key {id!r} is gone")
        return found

    async def find(self, id: str) -> Key | None:
        return (await self.several([id])).get(id)

    async def several(self, ids: Iterable[str]) -> dict[str, Key]:
        """Return the known keys among these, by id, in their order."""
        asked = list(ids)
        found = zip(asked, await read_hashes(self._redis, map(_of, asked)), strict=True)
        return {id: msgspec.convert({**fields, "id": id}, Key, strict=False) for id, fields in found if fields}

    async def of(self, tenant: str) -> list[Key]:
        """Oldest first."""
        return [*(await self.several(await self._redis.zrange(_all_of(tenant), 0, -1))).values()]

    async def tenants(self) -> dict[str, float]:
        """Return the tenants with the time of their first key."""
        return dict(await self._redis.zrange("tenants", 0, -1, withscores=True))

    async def rotate(self, id: str, text: str, *, now: float, grace_s: float) -> None:
        """Replace the key's secret with `text`; the previous secret stays valid for `grace_s`. Raises NotFound,
        Conflict."""
        answer = await self._rotate(keys=[_of(id)], args=[now, digest_of(text), now + grace_s])
        if answer == "missing":
            raise NotFound(f"no key {id!r}")
        if answer != "ok":
            raise Conflict(f"key {id} is {answer}: create another one")

    async def revoke(self, id: str, *, now: float) -> None:
        """Revoking what is revoked already is fine. Raises NotFound."""
        if await self._revoke(keys=[_of(id)], args=[now, KEPT_S]) == "missing":
            raise NotFound(f"no key {id!r}")

    async def note_use(self, key: Key, now: float) -> None:
        """Does nothing if that was done within USED_EVERY_S."""
        if now - key.used >= USED_EVERY_S:
            await self._used(keys=[_of(key.id)], args=[now])


def _of(id: str) -> str:
    return f"key:{id}"


def _all_of(tenant: str) -> str:
    return f"keys:of:{tenant}"
