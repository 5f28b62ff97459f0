"""Removes sessions of the Tinker API whose clients send no heartbeats, with their samplers and models.

run   consumes the index of heartbeats; produces commands that unload models, and deletions. Any number of schedulers
      may do it.

A session that has had no heartbeat for SESSION_KEPT_S is closed in two rounds: its models are unloaded, and when they
have answered, all that is known of it is removed. The record of a model stays while it has checkpoints.
"""

from __future__ import annotations

import time

import structlog
from aiohttp import web
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from opentinker.services.scheduler.tinker.access import Access
from opentinker.services.scheduler.tinker.commands import Commands
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.state.tinker_sessions import SESSION_KEPT_S
from opentinker.shared.types.errors import NotFound, OpenTinkerError
from opentinker.shared.types.tinker import TinkerModel, TinkerSession

log = structlog.get_logger()

ROUND_S = 60.0
ENDINGS = (RedisError, NatsError, OSError, TimeoutError, OpenTinkerError)
"""Errors that postpone an ending to the next round."""


async def close_left_sessions(access: Access, commands: Commands) -> None:
    """Close sessions whose clients have gone, round by round, until cancelled."""
    while True:
        before = time.time() - SESSION_KEPT_S
        try:
            left = await access.store.sessions_left(before)
        except ENDINGS as error:
            left = []
            log.warning("sessions_unavailable", error=str(error) or type(error).__name__)
        for session in left:
            try:
                if await _close(access, commands, session, before):
                    log.info("session_closed", session=session.id, tenant=session.tenant)
            except ENDINGS as error:
                log.warning("session_not_closed", session=session.id, error=str(error) or type(error).__name__)
        await sleep(ROUND_S)


async def _close(access: Access, commands: Commands, session: TinkerSession, before: float) -> bool:
    """Return False while models of the session have not been unloaded yet, or if it has had a heartbeat."""
    models, is_ready = [], True
    for id in await access.store.models_in(session.id):
        try:
            model = await access.store.model(session.tenant, id)
        except NotFound:
            continue
        models.append(model)
        is_ready = await _is_unloaded(access, commands, model) and is_ready
    if not is_ready:
        return False
    for model in models:  # before the session, by which the next round finds what is left of them
        await access.forget_model(model)
    return await access.store.close_session(session, before)


async def _is_unloaded(access: Access, commands: Commands, model: TinkerModel) -> bool:
    """Return whether the server has unloaded a model; ask it to if it has not."""
    if (await access.server_or_ended(model.job)).state.final:
        return True
    if not model.ended:
        try:
            await commands.unload(model)
        except web.HTTPGone:  # its server has just ended
            return True
        return False
    return not await access.store.is_waiting(model.id)
