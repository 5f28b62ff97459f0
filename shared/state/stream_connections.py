"""Records browser connections to NATS that use a credential of a job, until they end by themselves.

Redis keys (`{group}` is `{key}/{secret}/{job}`: an API key, the SHA-256 of the secret of it with which the credential
was asked for, a job):
    streams:open            sorted set of groups by the end of their last connection
    streams:open:{group}    sorted set of `{server}/{client}` by the end of each

`services/scheduler/streams/nats_auth.py` notes them before a server hears that somebody may come in,
`services/scheduler/streams/disconnect.py` closes those whose key or job is over. Ids of servers and clients are never
used twice. One that has gone by itself stays noted until it would have ended, which costs nothing but room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from opentinker.shared.state.redis_script import Script

OPEN = "streams:open"
MAX_CONNECTIONS = 4_000
"""Noted of one group at a time; further ones are not let in."""
BATCH = 1_000
"""Forgotten by one script: it has room for some 8,000 arguments."""
SLACK_S = 60.0
"""Allowance for the clock of the server that ends a connection."""

# KEYS open, open of group. ARGV: now less the slack, until, most, connection, group, forgotten at
_NOTE = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[2], 'GT', ARGV[2], ARGV[4])
if tonumber(ARGV[6]) > tonumber(redis.call('EXPIRETIME', KEYS[2])) then
  redis.call('EXPIREAT', KEYS[2], ARGV[6])
end
redis.call('ZADD', KEYS[1], 'GT', ARGV[2], ARGV[5])
return 1
"""

# KEYS open, open of group. ARGV: group, connections ...
_GONE = """
redis.call('ZREM', KEYS[2], unpack(ARGV, 2))
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('ZREM', KEYS[1], ARGV[1]) end
"""


class ConnectionGroup(NamedTuple):
    """Connections that live and die together."""

    key: str
    """Id of an API key, or `session:` and a session's id; empty on a server that asks for none."""
    secret: str
    """SHA-256 of what was shown as that key."""
    job: str

    @property
    def name(self) -> str:
        return "/".join(self)


class StreamConnection(NamedTuple):
    server: str
    client: int


class StreamConnections:
    """`now` everywhere: Unix seconds, of the scheduler's clock."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._note, self._gone = Script(redis, _NOTE), Script(redis, _GONE)

    async def note(self, group: ConnectionGroup, one: StreamConnection, *, until: float, now: float) -> bool:
        """False: there are too many of its group already."""
        args = [now - SLACK_S, until, MAX_CONNECTIONS, _member(one), group.name, int(until + 2 * SLACK_S)]
        return bool(await self._note(keys=[OPEN, _of(group)], args=args))

    async def groups(self, now: float) -> list[ConnectionGroup]:
        """Return the groups that may have connections."""
        await self._redis.zremrangebyscore(OPEN, "-inf", now - SLACK_S)
        return [ConnectionGroup(*name.split("/")) for name in await self._redis.zrange(OPEN, 0, -1)]

    async def of(self, group: ConnectionGroup, now: float) -> list[StreamConnection]:
        found = (name.split("/") for name in await self._redis.zrangebyscore(_of(group), now - SLACK_S, "+inf"))
        return [StreamConnection(server, int(client)) for server, client in found]

    async def gone(self, group: ConnectionGroup, closed: Iterable[StreamConnection]) -> None:
        """These are there no more."""
        members = [_member(one) for one in closed]
        for at in range(0, len(members), BATCH):
            await self._gone(keys=[OPEN, _of(group)], args=[group.name, *members[at : at + BATCH]])


def _of(group: ConnectionGroup) -> str:
    return f"{OPEN}:{group.name}"


def _member(one: StreamConnection) -> str:
    return f"{one.server}/{one.client}"
