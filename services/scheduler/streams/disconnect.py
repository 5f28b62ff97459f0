"""Closes browser connections to NATS whose API key, session or job has ended.

    hang up loop   consumes connections that `nats_auth.py` has noted, API keys, jobs; produces KICK, to the nats-server
                   that has the connection; polls every POLL_S

Every scheduler does it, none remembers anything: what has to be closed follows from Redis alone, and is tried again
until the server says that it has no such connection. KICK is a right of the servers' own account: a user of that
one sends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit, urlunsplit

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from prometheus_client import Counter
from redis.exceptions import RedisError

from opentinker.services.scheduler.streams.nats_auth import ConnectionRefused, Holders, standing
from opentinker.shared.asyncio_tools import await_cancellable, every_despite
from opentinker.shared.config import Settings
from opentinker.shared.messaging.connection import LOST
from opentinker.shared.messaging.permissions import SYSTEM, inbox
from opentinker.shared.messaging.subjects import KICK
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.secrets import password_in
from opentinker.shared.state.stream_connections import ConnectionGroup, StreamConnection, StreamConnections

log = structlog.get_logger()

POLL_S = 0.3
ANSWER_S = 2.0
MAX_CONCURRENT_KICKS = 64
"""Connections that are being closed."""
RETRY_S = 1
SAY_S = 10.0
HINT = "until it answers this user, connections of revoked keys stay; nats-users.conf of this release names it"
CLOSED = Counter(
    "opentinker_stream_hangups", "Connections that were closed because their key or job was over", registry=REGISTRY
)


class StreamDisconnector:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._holders, self._connections = Holders(ctx), StreamConnections(ctx.store.redis)

    async def run(self) -> None:
        """Close connections until cancelled."""
        if self.ctx.settings.nats_issuer_file is None:  # there are no credentials
            await asyncio.Event().wait()
        async with _system(self.ctx.settings, self.ctx.worker) as nc:
            away = (RedisError, OSError, TimeoutError, nats.errors.Error)
            await every_despite(POLL_S, partial(self.poll, nc), "stream_check_failed", *away)

    async def poll(self, nc: Client) -> None:
        """Once over all groups of connections."""
        now = time.time()
        groups = await self._connections.groups(now)
        if not groups:
            return
        holders = await self._holders.find(group.key for group in groups)
        tenants = await self.ctx.store.tenants_of({group.job for group in groups})
        away: set[str] = set()
        over: list[tuple[ConnectionGroup, str]] = []
        for group in groups:
            try:
                standing(group, holders.get(group.key), tenants.get(group.job), now, auth=self.ctx.settings.auth)
            except ConnectionRefused as error:
                over.append((group, str(error)))
        room = asyncio.Semaphore(MAX_CONCURRENT_KICKS)
        await asyncio.gather(*(self._close(nc, group, why, now, room, away) for group, why in over))

    async def _close(
        self, nc: Client, group: ConnectionGroup, why: str, now: float, room: asyncio.Semaphore, away: set[str]
    ) -> None:
        """Close all connections of a group. A closed one is requested once more, and forgotten when its server no
        longer has it: it may have been on its way in. `away`: servers that do not answer now; they delay no other
        server's."""

        async def kicked(one: StreamConnection) -> bool | None:
            async with room:
                if one.server in away:
                    return None
                try:
                    return await _kick(nc, one)
                except (TimeoutError, nats.errors.Error):  # it ended, or cannot be reached: until the time is over
                    away.add(one.server)
                    return None

        found = await self._connections.of(group, now)
        answers = await asyncio.gather(*(kicked(one) for one in found))
        if closed := sum(answer is True for answer in answers):
            CLOSED.inc(closed)
            log.info("stream_connections_closed", key=group.key, job=group.job, connections=closed, reason=why)
        gone = [one for one, answer in zip(found, answers, strict=True) if answer is False]
        await self._connections.gone(group, gone)


async def _kick(nc: Client, one: StreamConnection) -> bool:
    """False: its server has no such connection. Raises TimeoutError, nats.errors.Error."""
    asked = orjson.dumps({"cid": one.client})
    reply = await await_cancellable(nc.request(KICK.format(server=one.server), asked, timeout=ANSWER_S))
    return orjson.loads(reply.data).get("error") is None


@asynccontextmanager
async def _system(settings: Settings, name: str) -> AsyncIterator[Client]:
    """A connection as the user of nats-server's own account. Waits for the server as long as it takes."""
    url = urlsplit(settings.nats_url)
    bare = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2]))
    password = settings.password("nats_password_file") or password_in(settings.nats_url)
    said_at = float("-inf")

    async def report(error: Exception) -> None:
        nonlocal said_at
        if isinstance(error, LOST):  # it is away, which the scheduler's own connection says
            return
        if time.monotonic() - said_at > SAY_S:
            said_at = time.monotonic()
            log.warning("system_user_refused", user=SYSTEM, error=str(error) or type(error).__name__, hint=HINT)

    nc = Client()
    try:
        await nc.connect(
            bare, name=f"{name} {SYSTEM}", user=SYSTEM, password=password, inbox_prefix=inbox(SYSTEM),
            max_reconnect_attempts=-1, reconnect_time_wait=RETRY_S, ping_interval=5, max_outstanding_pings=2,
            connect_timeout=3, error_cb=report,
        )  # fmt: skip
        yield nc
    finally:
        await nc.close()
