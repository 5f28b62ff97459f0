"""Credentials with which a page or a program hears one job live on NATS: what Redis knows of them, never the token.

    ot_stream_<id>_<secret>    id: public, names the inbox; secret: 256 bits

Redis keys (`{digest}` is the SHA-256 of a token, `{key}` the id of an API key, or `session:` and a session's id):
    stream:{digest}     hash: id, key (of who asked for it), secret (SHA-256 of what was shown as that key), tenant,
                        job, expires
    streams:of:{key}    sorted set of digests by expiry

They are given by `services/scheduler/streams/credentials_api.py` and looked at by
`services/scheduler/streams/nats_auth.py` when somebody connects with one."""

from __future__ import annotations

import secrets

import msgspec
from redis.asyncio import Redis

from opentinker.shared.security.authorization import Principal
from opentinker.shared.security.key_text import digest_of
from opentinker.shared.state.redis_script import Script

PREFIX = "ot_stream_"
SESSION = "session:"
"""Begins the name of a holder that is a session, not an API key."""
MAX_CREDENTIALS = 500
"""That one API key has at a time."""
SLACK_S = 60
"""Allowance for Redis' clock; readers compare `expires` with ours."""

# KEYS stream, streams:of. ARGV: now, expires, most, digest, forgotten at, names and values of fields
_GIVE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then
  return redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('EXPIREAT', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[4])
if tonumber(ARGV[5]) > tonumber(redis.call('EXPIRETIME', KEYS[2])) then
  redis.call('EXPIREAT', KEYS[2], ARGV[5])
end
return 0
"""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    key: str
    """See holder_of; empty on a server that asks for no keys."""
    secret: str = ""
    """SHA-256 of what was shown as that key: a key that is rotated ends what was asked for with the secret before."""
    tenant: str
    job: str
    expires: float
    """Unix seconds."""

    @property
    def inbox(self) -> str:
        return f"_INBOX.stream.{self.id}"


def holder_of(asked: Principal) -> str:
    """Return how a credential names who asked for it: by the session, which may end before its key."""
    return f"{SESSION}{asked.session}" if asked.session else asked.key


class StreamCredentialStore:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._give = Script(redis, _GIVE)

    async def give(
        self, *, key: str, secret: str, tenant: str, job: str, now: float, life_s: float
    ) -> tuple[str, Credential]:
        """Create a credential and return its token, which is not stored. Raises TooManyCredentials."""
        id = secrets.token_hex(8)
        token = f"{PREFIX}{id}_{secrets.token_hex(32)}"
        given = Credential(id=id, key=key, secret=secret, tenant=tenant, job=job, expires=now + life_s)
        digest = digest_of(token)
        fields = [part for pair in msgspec.structs.asdict(given).items() for part in pair]
        forgotten = int(given.expires) + SLACK_S
        earliest = await self._give(
            keys=[f"stream:{digest}", f"streams:of:{key}"],
            args=[now, given.expires, MAX_CREDENTIALS, digest, forgotten, *fields],
        )
        if float(earliest):
            raise TooManyCredentials(float(earliest) - now)
        return token, given

    async def find(self, token: str, now: float) -> Credential | None:
        """Return a credential; None if it was never issued, or has expired."""
        fields = await self._redis.hgetall(f"stream:{digest_of(token)}") if token.startswith(PREFIX) else None
        found = msgspec.convert(fields, Credential, strict=False) if fields else None
        return found if found is not None and found.expires > now else None


class TooManyCredentials(Exception):
    """`wait_s`: until one of them is over."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        super().__init__(f"this key has {MAX_CREDENTIALS} credentials for streams, which is the most")
