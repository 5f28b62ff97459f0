"""Waits for answers to commands and requests for samples.

hear   consumes ANSWERED of all jobs; wakes the requests that wait for it
poll   looks into Redis for all requests that wait: a message may be lost while NATS is away
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import structlog
from redis.exceptions import RedisError

from opentinker.shared.asyncio_tools import sleep, wait_event
from opentinker.shared.messaging.subjects import ANSWERED
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.tinker import Answered

log = structlog.get_logger()

POLL_S = 2.0


class Futures:
    def __init__(self, ctx: Context, store: TinkerStore) -> None:
        self._ctx, self._store = ctx, store
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)

    async def run(self) -> None:
        """Hear of answers until cancelled."""
        subscription = await self._ctx.bus.listen(ANSWERED, self._hear, job="*")
        try:
            while True:
                await sleep(POLL_S)
                await self._poll()
        finally:
            if not self._ctx.bus.nc.is_closed:
                await subscription.unsubscribe()

    async def size(self, request: str, within_s: float) -> int:
        """Return the bytes of the answer to a request, as it is stored; 0 if it has none within this time."""
        came = asyncio.Event()
        self._waiting[request].add(came)
        try:
            if (found := await self._store.answer_size(request)) or within_s <= 0:
                return found
            await wait_event(came, within_s)
            return await self._store.answer_size(request)
        finally:
            self._waiting[request].discard(came)
            if not self._waiting[request]:
                del self._waiting[request]

    async def _hear(self, answered: Answered) -> None:
        self._wake(answered.request)

    def _wake(self, request: str) -> None:
        for event in self._waiting.get(request, ()):
            event.set()

    async def _poll(self) -> None:
        waiting = list(self._waiting)
        try:
            for start in range(0, len(waiting), 500):
                for request in await self._store.which_answered(waiting[start : start + 500]):
                    self._wake(request)
        except (RedisError, OSError, TimeoutError) as error:  # tried again in a moment; the requests have their limit
            log.warning("answers_unavailable", error=str(error) or type(error).__name__)
