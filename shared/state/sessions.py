"""Records in Redis of people's sign-in sessions on the page: a digest of the cookie's token, never the token.

    ot_session_<id>_<secret>    id: public; secret: 256 bits

Redis keys (`{id}` is the id of a session, `{tenant}` a tenant's name, `{owner}` a digest of who signed in):
    session:{id}              hash: the fields of Session; Redis forgets it when it ends
    sessions:of:{tenant}      sorted set of ids by the latest time at which they end
    sessions:by:{owner}       the same of one API key or one user, at most MAX_SESSIONS; a further one ends the oldest

A session ends when it was idle, after its longest life, when it is revoked (its record is removed), and with the API
key that it was made with."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Iterable
from typing import Any

import msgspec

from opentinker.shared.security.key_text import digest_of
from opentinker.shared.state.redis_script import Script, read_hashes
from opentinker.shared.types.errors import NotFound

MAX_SESSIONS = 50
"""That one API key, or one user, has at a time."""
USED_EVERY_S = 30.0
"""`used` is written so often."""
SLACK_S = 60
"""Allowance for Redis' clock; readers compare times with ours."""
FORM = re.compile(r"ot_session_([a-z0-9]{10})_[0-9a-f]{64}")
SESSION_ID = re.compile(r"[a-z0-9]{10}")

# KEYS session, sessions:of, sessions:by. ARGV: id, now, ends at the latest, most, forgotten at, names and values
_CREATE = """
for place = 2, 3 do
  redis.call('ZREMRANGEBYSCORE', KEYS[place], '-inf', ARGV[2])
  for _, id in ipairs(redis.call('ZRANGE', KEYS[place], 0, -1)) do
    if redis.call('EXISTS', 'session:' .. id) == 0 then redis.call('ZREM', KEYS[place], id) end
  end
end
while redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[4]) do
  local oldest = redis.call('ZPOPMIN', KEYS[3])[1]
  redis.call('DEL', 'session:' .. oldest)
  redis.call('ZREM', KEYS[2], oldest)
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('EXPIREAT', KEYS[1], ARGV[5])
for place = 2, 3 do
  redis.call('ZADD', KEYS[place], ARGV[3], ARGV[1])
  if tonumber(ARGV[5]) > tonumber(redis.call('EXPIRETIME', KEYS[place])) then
    redis.call('EXPIREAT', KEYS[place], ARGV[5])
  end
end
"""

# KEYS session. ARGV: now
_USED = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'used', ARGV[1]) end"


class SignIn(msgspec.Struct, frozen=True, kw_only=True):
    """A person who signs in, with an API key or as a user of the provider."""

    tenant: str
    key: str = ""
    """Id of the API key that it was made with; empty: a user whom the provider vouches for."""
    secret: str = ""
    """SHA-256 of the API key: one that is rotated ends the sessions that were made with the secret before."""
    user: str = ""
    """Name of the user, for owners of jobs and the audit log."""
    subject: str = ""
    """The provider's own, stable name of the user."""
    issuer: str = ""
    """The provider."""
    groups: list[str] = []
    """Those of the user's groups that had a role when the session began."""
    created: float
    expires: float
    """Unix seconds; the latest time at which the session ends."""


class Session(SignIn, frozen=True, kw_only=True):
    id: str
    digest: str
    """SHA-256 of the token in the cookie."""
    used: float
    """When it was last used, to USED_EVERY_S."""

    def ends(self, idle_s: float) -> float:
        """Return when the session ends unless it is used again."""
        return min(self.expires, self.used + idle_s)

    def fits(self, digest: str) -> bool:
        return hmac.compare_digest(digest, self.digest)


def session_id(token: str) -> str | None:
    """Return the id in the text of a cookie; None for text that cannot be a session's token."""
    match = FORM.fullmatch(token)
    return match[1] if match else None


def csrf_token(token: str) -> str:
    """Return the text that proves that a request was written by a page which may read our answers. It follows from the
    session's token, which no page can read, and does not tell it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


class SessionStore:
    """`now` everywhere: Unix seconds, of the scheduler's clock."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._create, self._used = Script(redis, _CREATE), Script(redis, _USED)

    async def create(self, login: SignIn) -> tuple[str, Session]:
        """Return the token, which is not stored, and its session."""
        id = "".join(secrets.choice(string.digits + string.ascii_lowercase) for _ in range(10))
        token = f"ot_session_{id}_{secrets.token_hex(32)}"
        made = Session(id=id, digest=digest_of(token), used=login.created, **msgspec.structs.asdict(login))
        fields = {**msgspec.structs.asdict(made), "groups": msgspec.json.encode(sorted(made.groups)).decode()}
        del fields["id"]
        await self._create(
            keys=[_of(id), _all_of(made.tenant), _all_by(made)],
            args=[
                *(id, made.created, made.expires, MAX_SESSIONS, int(made.expires) + SLACK_S),
                *(part for pair in fields.items() for part in pair),
            ],
        )
        return token, made

    async def find(self, id: str) -> Session | None:
        return (await self.several([id])).get(id)

    async def several(self, ids: Iterable[str]) -> dict[str, Session]:
        """Return the known sessions among these, by id, in their order."""
        asked = list(ids)
        found = zip(asked, await read_hashes(self._redis, map(_of, asked)), strict=True)
        return {id: _read(id, fields) for id, fields in found if "digest" in fields}

    async def of(self, tenant: str) -> list[Session]:
        """Return sessions, those that end first come first."""
        return [*(await self.several(await self._redis.zrange(_all_of(tenant), 0, -1))).values()]

    async def note_use(self, session: Session, now: float) -> None:
        """Does nothing if that was done within USED_EVERY_S."""
        if now - session.used >= USED_EVERY_S:
            await self._used(keys=[_of(session.id)], args=[now])

    async def end(self, session: Session) -> None:
        """Ending what has ended already is fine."""
        await self._redis.delete(_of(session.id))
        await self._redis.zrem(_all_of(session.tenant), session.id)
        await self._redis.zrem(_all_by(session), session.id)

    async def found(self, id: str) -> Session:
        """Raises NotFound."""
        session = await self.find(id) if SESSION_ID.fullmatch(id) else None
        if session is None:
            raise NotFound(f"you have no session {id[:100]!r}")
        return session


def _read(id: str, fields: dict[str, Any]) -> Session:
    return msgspec.convert({**fields, "id": id, "groups": msgspec.json.decode(fields["groups"])}, Session, strict=False)


def _of(id: str) -> str:
    return f"session:{id}"


def _all_of(tenant: str) -> str:
    return f"sessions:of:{tenant}"


def _all_by(session: Session) -> str:
    return f"sessions:by:{digest_of(session.key or f'{session.tenant}/{session.subject}')}"
