"""Removes sessions of the Tinker API whose clients send no heartbeats, with their samplers and models.

run   consumes the index of heartbeats; produces commands that unload models, and deletions. Any number of schedulers
      may do it.

    alive --(no heartbeat for SESSION_KEPT_S, or another needs its room)--> closing --(models are unloaded)--> removed

A closing session takes no heartbeats and does not count, and its models are unloaded. When they have
answered, all that is known of it is removed. The record of a model stays while it has checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.state.tinker.sessions import SESSION_KEPT_S, TooManyRecords
from opentinker.shared.types.errors import NotFound, OpenTinkerError
from opentinker.shared.types.tinker import TinkerModel, TinkerSession

log = structlog.get_logger()

ROUND_S = 60.0
RECONNECT_S = 300.0
"""After a start, an outage of Redis or a suspended machine, clients have this time to send heartbeats again."""
LAPSE_S = 300.0
"""The machine was suspended, or its clock set, if so much time lies between two steps of the rounds."""
ENDINGS = (RedisError, NatsError, OSError, TimeoutError, OpenTinkerError)
"""Errors that postpone an ending to the next round."""


class Endings:
    def __init__(self, access: Access, commands: Commands) -> None:
        self._access, self._store, self._commands = access, access.store, commands
        self._since = self._seen = time.time()

    async def run(self) -> None:
        """Close sessions whose clients have gone, round by round, until cancelled."""
        while True:
            try:
                await self._store.complete_indexes()
                await self._round(time.time())
            except ENDINGS as error:
                self._since = time.time()
                log.warning("sessions_unavailable", error=str(error) or type(error).__name__)
            await sleep(ROUND_S)

    async def with_room(self, tenant: str, add: Callable[[], Awaitable[None]], *, models: bool = False) -> None:
        """Add a record of the tenant's. At the bound, models of servers that have ended count no longer (with
        `models`), and the session that was left first makes room. Raises TooManyRecords."""
        try:
            return await add()
        except TooManyRecords:
            if models:
                await self._access.forget_ended_servers(tenant)
        try:
            return await add()
        except TooManyRecords:
            if not self._may_end_sessions():
                raise
        await self._store.make_room(tenant, models=models)
        await add()

    async def _round(self, began: float) -> None:
        before = began - SESSION_KEPT_S
        await self._store.release_answered()
        left = await self._store.sessions_left(before)
        if self._may_end_sessions():
            await self._store.drop_unread()
            for session in left:
                await self._store.leave_session(session.tenant, session.id, before)
        while closing := await self._store.sessions_closing(began):
            for session in closing:
                await self._store.try_later(session.id, began)
                try:
                    if await self._close(session):
                        log.info("session_closed", session=session.id, tenant=session.tenant)
                except ENDINGS as error:
                    log.warning("session_not_closed", session=session.id, error=str(error) or type(error).__name__)
                self._may_end_sessions()

    def _may_end_sessions(self) -> bool:
        """Return whether clients that are alive have had the time to say so."""
        now = time.time()
        if not 0 <= now - self._seen <= LAPSE_S:
            self._since = now
        self._seen = now
        return now - self._since >= RECONNECT_S

    async def _close(self, session: TinkerSession) -> bool:
        """Return False while models of the session have not been unloaded yet."""
        models, is_ready = [], True
        for id in await self._store.models_in(session.id):
            try:
                model = await self._store.model(session.tenant, id)
            except NotFound:
                continue
            models.append(model)
            is_ready = await self._is_unloaded(model) and is_ready
        if not is_ready:
            return False
        for model in models:  # before the session, by which the next round finds what is left of them
            await self._access.forget_model(model)
        await self._store.close_session(session)
        return True

    async def _is_unloaded(self, model: TinkerModel) -> bool:
        """Return whether the server has unloaded a model; ask it to if it has not."""
        if (await self._access.server_or_ended(model.job)).state.final:
            return True
        if not model.ended:
            try:
                await self._commands.unload(model)
            except web.HTTPGone:  # its server has just ended
                return True
            return False
        return await self._store.is_unloaded(model.id)
