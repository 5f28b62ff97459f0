"""Deletes checkpoints of the Tinker API whose time is over.

run   consumes the index of checkpoints that expire; produces deletions. Any number of schedulers may do it.
"""

from __future__ import annotations

import time

import structlog
from redis.exceptions import RedisError

from opentinker.services.scheduler.tinker.access import Access
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.types.tinker import TinkerCheckpoint

log = structlog.get_logger()

ROUND_S = 30.0


async def expire(access: Access) -> None:
    """Delete what has expired, round by round, until cancelled."""
    while True:
        try:
            while any([await _remove(access, one) for one in await access.store.expired(time.time())]):
                pass  # there may be more of them
        except (RedisError, OSError, TimeoutError) as error:  # the next round does it
            log.warning("checkpoints_unavailable", error=str(error) or type(error).__name__)
        await sleep(ROUND_S)


async def _remove(access: Access, checkpoint: TinkerCheckpoint) -> bool:
    removed = await access.remove(checkpoint)
    if removed:
        log.info("checkpoint_expired", checkpoint=checkpoint.path)
    return removed
