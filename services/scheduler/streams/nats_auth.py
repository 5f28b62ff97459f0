"""Authenticates NATS clients that are not services: holders of a stream credential of a job.

    callout   consumes nats-server's question who somebody is; produces a user with the rights of that credential, or a
              refusal; woken by each question; schedulers share them

Services are users in the server's configuration and are never decided here. While no scheduler runs no new client can
connect; connected ones stay until their credential expires. A connection is recorded before the server is answered:
`disconnect.py` closes it when its key or job has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import structlog
from nats.aio.msg import Msg
from prometheus_client import Counter
from redis.exceptions import RedisError

from opentinker.services.scheduler.http.auth import UNAUTHENTICATED
from opentinker.services.scheduler.login.identity import Identity, Sessions
from opentinker.shared.messaging.nats_tokens import Signer, claims_of
from opentinker.shared.messaging.permissions import shown_of
from opentinker.shared.messaging.subjects import LOGINS
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.authorization import Action, Verdict, authorize
from opentinker.shared.state.keys import Key, KeyStore
from opentinker.shared.state.stream_connections import ConnectionGroup, StreamConnection, StreamConnections
from opentinker.shared.state.stream_credentials import SESSION, Credential, StreamCredentialStore

log = structlog.get_logger()

MAX_CONCURRENT = 16
"""Questions that wait for Redis; others wait for them."""
MAX_WAITING = 1000
"""Further requests are not answered: nats-server refuses clients without an answer."""
SUBSCRIPTIONS = 32
"""Subscriptions per connection."""
ACCOUNT = "$G"
"""Where all users of a nats-server without accounts are."""
SEEN = Counter("opentinker_stream_logins", "Who asked to hear streams of jobs", ["let_in"], registry=REGISTRY)
for _let_in in ("yes", "no", "unanswered"):
    SEEN.labels(_let_in)  # from zero on: Prometheus sees no rate in a series that begins with its first event


class _Server(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]{1,64}$")]


class _Client(msgspec.Struct):
    id: int
    host: str = ""
    type: str = ""
    """nats | mqtt | websocket"""


class _Said(msgspec.Struct):
    auth_token: str = ""


class _Login(msgspec.Struct):
    server_id: _Server
    user_nkey: str
    client_info: _Client
    connect_opts: _Said


class _Question(msgspec.Struct):
    nats: _Login


class ConnectionRefused(Exception):
    """`str(error)` is for the server's log; the client gets no reason."""


class NatsAuthCallout:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        settings = ctx.settings
        self._signer = Signer(settings.password("nats_issuer_file")) if settings.nats_issuer_file else None
        self._holders, self._credentials = Holders(ctx), StreamCredentialStore(ctx.store.redis)
        self._connections = StreamConnections(ctx.store.redis)
        self._room = asyncio.Semaphore(MAX_CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until cancelled."""
        if self._signer is None:
            await asyncio.Event().wait()
        subscription = await self.ctx.bus.nc.subscribe(LOGINS, queue="scheduler", cb=self._receive)
        try:
            await asyncio.Event().wait()
        finally:
            if not self.ctx.bus.nc.is_closed:
                await subscription.unsubscribe()
            for task in list(self._tasks):
                task.cancel()

    async def _receive(self, message: Msg) -> None:
        if len(self._tasks) >= MAX_WAITING:
            SEEN.labels("unanswered").inc()
            return
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        assert self._signer is not None
        try:
            login = claims_of(message.data, _Question).nats
        except ValueError as error:
            log.warning("bad_auth_request", error=str(error))
            return
        about: dict[str, Any] = {"type": "authorization_response", "version": 2}
        try:
            async with self._room:
                credential = await self._admitted(login)
            about["jwt"] = self._signer.sign(user(credential, login.user_nkey))
            SEEN.labels("yes").inc()
        except ConnectionRefused as error:
            about["error"] = str(error)
            SEEN.labels("no").inc()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("auth_request_failed", error=str(error) or type(error).__name__)
            about["error"] = "the state store does not answer"
            SEEN.labels("no").inc()
        answer = self._signer.sign({"sub": login.user_nkey, "aud": login.server_id.id, "nats": about})
        if not self.ctx.bus.nc.is_closed:
            await self.ctx.bus.nc.publish(message.reply, answer.encode())

    async def _admitted(self, login: _Login) -> Credential:
        """Return the credential of a login, with the time at which it ends: with its key at the latest. Raises
        ConnectionRefused."""
        if login.client_info.type != "websocket":
            raise ConnectionRefused("credentials are for the WebSocket listener")
        now = time.time()
        credential = await self._credentials.find(login.connect_opts.auth_token, now)
        if credential is None:
            raise ConnectionRefused("no such credential, or not any more")
        group = ConnectionGroup(credential.key, credential.secret, credential.job)
        holder = (await self._holders.find([credential.key])).get(credential.key)
        tenant = (await self.ctx.store.tenants_of([credential.job])).get(credential.job)
        until = min(credential.expires, standing(group, holder, tenant, now, auth=self.ctx.settings.auth))
        one = StreamConnection(login.server_id.id, login.client_info.id)
        if not await self._connections.note(group, one, until=until, now=now):
            raise ConnectionRefused("its key has too many connections")
        return msgspec.structs.replace(credential, expires=until)


class Holders:
    """Keys and sessions by which credentials were asked for."""

    def __init__(self, ctx: Context) -> None:
        self._keys, self._sessions = KeyStore(ctx.store.redis), Sessions(ctx)

    async def find(self, names: Iterable[str]) -> dict[str, Key | Identity]:
        """Return the known keys and sessions with these names (`Credential.key`)."""
        asked = set(filter(None, names))
        sessions = {name for name in asked if name.startswith(SESSION)}
        found = await self._sessions.several(name.removeprefix(SESSION) for name in sessions) if sessions else {}
        keys = await self._keys.several(asked - sessions) if asked - sessions else {}
        return {**keys, **{f"{SESSION}{id}": identity for id, identity in found.items()}}


def standing(
    group: ConnectionGroup, holder: Key | Identity | None, tenant: str | None, now: float, *, auth: bool
) -> float:
    """Return until when, as far as is known now, connections of this group may stay. `holder`: the key or session of
    that name, `tenant`: that of the job. Raises ConnectionRefused."""
    if not group.key and not auth:
        principal, until = UNAUTHENTICATED, float("inf")
    else:
        if holder is None or holder.state(now) != "live" or not holder.fits(group.secret, now):
            raise ConnectionRefused("the key or session that asked for it is over")
        principal, until = holder.principal, holder.expires or float("inf")
        if isinstance(holder, Key) and holder.digest != group.secret:
            until = min(until, holder.old_until)
    if tenant is None or authorize(principal, Action.JOBS_READ, tenant) is not Verdict.ALLOWED:
        raise ConnectionRefused("its job is not there for it any more")
    return until


def user(credential: Credential, nkey: str) -> dict[str, Any]:
    """Claims of a user of NATS that hears what a credential shows, and sends nothing."""
    heard = [*shown_of(credential.job).values(), credential.inbox + ".>"]
    rights = {"pub": {"deny": [">"]}, "sub": {"allow": heard}, "subs": SUBSCRIPTIONS, "payload": 1, "data": -1}
    kind = {"allowed_connection_types": ["WEBSOCKET"], "type": "user", "version": 2}
    name = f"{credential.job}:{credential.id}"
    return {"sub": nkey, "aud": ACCOUNT, "name": name, "exp": int(credential.expires), "nats": {**rights, **kind}}
