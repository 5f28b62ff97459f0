"""Publishes new events of unfinished jobs on NATS: for dashboards, which read earlier ones over HTTP.

    feed   consumes those logs, which every service writes into in Redis; produces EVENT; woken by each entry

When the leadership changes, an entry may be skipped or published twice. Entries of a job that ends within half a second
are not published. The log itself has every entry once, under its id.
"""

from __future__ import annotations

import time

import orjson
import structlog
from redis.exceptions import RedisError

from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.subjects import EVENT
from opentinker.shared.runtime.service import Context
from opentinker.shared.types.telemetry import JobEvent

log = structlog.get_logger()

POLL_MS = 500
"""Delay after which new jobs are seen."""
RETRY_S = 1.0
LINGER_S = 30.0
"""Events of a job are published for this time after its end: that it was saved, and released."""
READ_COUNT = 200


class EventFeed:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._seen: dict[str, str] = {}
        """Job -> id of the last entry that went out."""
        self._over: dict[str, float] = {}
        """Jobs that have ended, and since when we know."""
        self._began = False

    async def run(self) -> None:
        while True:
            try:
                await self.poll()
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("feed_unavailable", error=str(error) or type(error).__name__)
                await sleep(RETRY_S)

    async def poll(self) -> None:
        """Wait for entries and publish them."""
        await self._follow()
        if not self._seen:
            await sleep(POLL_MS / 1000)
            return
        logs = {f"job:{job}:events": after for job, after in self._seen.items()}
        for name, entries in await self.ctx.store.redis.xread(logs, count=READ_COUNT, block=POLL_MS):
            job = name.split(":")[1]
            for id, fields in entries:
                self._seen[job] = id
                event = {"id": id, **orjson.loads(fields["event"])}
                await self.ctx.bus.emit(EVENT, JobEvent(job=job, event=event), job=job)

    async def _follow(self) -> None:
        """Logs of jobs that there were before we led are read from now on, those of others from the beginning."""
        now, active = time.monotonic(), await self.ctx.store.redis.sunion("jobs:active", "jobs:ending")
        for job in active - self._seen.keys():
            last = [] if self._began else await self.ctx.store.redis.xrevrange(f"job:{job}:events", count=1)
            self._seen[job] = last[0][0] if last else "0-0"
        self._began = True
        for job in self._seen.keys() - active:
            if now - self._over.setdefault(job, now) > LINGER_S:
                del self._seen[job], self._over[job]
