"""Tells people what becomes of their jobs, by the jobs' [[notify]].

    notify   consumes events and metrics of jobs that notify; produces messages in Redis, and sends those that are due:
             webhooks and e-mails; waits LOOK_S between looks

A message is kept in Redis before what it tells of counts as seen, so a killed scheduler loses none; one may be sent
twice, with the same id. It is tried TRIES times, over about an hour.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats.errors
import structlog
from redis.exceptions import RedisError

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.notifications.delivery import NotDelivered, deliver
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.notify import ALARMS, NotifySpec
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict, NotFound, OpenTinkerError

log = structlog.get_logger()

LOOK_S = 2.0
TRIES = 9
FIRST_RETRY_S, MAX_RETRY_S = 10.0, 1200.0
AT_ONCE = 20
UNKNOWN_S = 300.0
"""A job that is not there so long after it was announced was never stored."""
POINTS = 1000
STATES = ("succeeded", "failed", "cancelled")
HIDDEN = ("id", "event", "time", "state")
"""Of an event: what the message has elsewhere, or nobody needs."""


class Notifier:
    def __init__(self, ctx: Context) -> None:
        self._ctx, self._store = ctx, ctx.store
        self._kept = Notifications(ctx.store.redis)
        self._history = MetricHistory(ctx.bus, ArtifactCatalog(ctx))

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("notifier_waits", error=str(error) or type(error).__name__)
            await sleep(LOOK_S)

    async def look(self) -> None:
        """Look at all jobs that notify once, and send what is due."""
        now = time.time()
        for id, since in (await self._kept.followed()).items():
            try:
                await self._look_at(await self._store.job(id))
            except NotFound:
                if now - since > UNKNOWN_S:
                    await self._kept.forget(id)
            except (NoReply, nats.errors.Error, OpenTinkerError, ValueError) as error:
                log.warning("notifier_waits", job=id, error=str(error))
        await asyncio.gather(*(self._send(message) for message in await self._kept.due(time.time(), AT_ONCE)))

    async def _look_at(self, job: JobRecord) -> None:
        told = [NotifySpec.model_validate(entry) for entry in job.spec.get("notify") or []]
        seen = await self._kept.seen(job.id)
        events = await self._store.events(job.id, seen.get("after", "0"))
        messages = [message for event in events for message in self._messages(job, event, told)]
        marks = {"after": events[-1]["id"]} if events else {}
        reached, more_marks = await self._targets(job, told, seen)
        if messages or reached or marks or more_marks:
            await self._kept.add(job.id, [*reached, *messages], {**marks, **more_marks}, time.time())
        if job.state.final and not events:
            await self._kept.forget(job.id)

    def _messages(self, job: JobRecord, event: dict[str, Any], told: list[NotifySpec]) -> list[Message]:
        kind = event["event"]
        occasion = kind if kind in STATES else "alarm" if kind in ALARMS else ""
        detail = {name: value for name, value in event.items() if name not in HIDDEN}
        if occasion == "alarm":
            detail = {"alarm": kind, **detail}
        return [
            self._message(job, f"{job.id}/{event['id']}/{place}", place, occasion, event["time"], detail)
            for place, entry in enumerate(told)
            if occasion and entry.wants(occasion)
        ]

    def _message(
        self, job: JobRecord, id: str, place: int, occasion: str, at: float, detail: dict[str, Any]
    ) -> Message:
        page = self._ctx.settings.public_url
        about = {
            "id": job.id, "name": job.name, "project": job.project, "tags": job.tags, "kind": job.kind,
            "state": job.state.value, "step": job.step, "steps": job.steps, "reason": job.reason,
        }  # fmt: skip
        body = {
            "occasion": occasion, "time": at, "job": about, "detail": detail,
            "page": f"{page.rstrip('/')}/#/jobs/{job.id}" if page else "",
        }  # fmt: skip
        return Message(id=id, job=job.id, tenant=job.tenant, entry=place, occasion=occasion, body=body)

    async def _targets(
        self, job: JobRecord, told: list[NotifySpec], seen: dict[str, str]
    ) -> tuple[list[Message], dict[str, str]]:
        """Return messages of targets that new points reach, and marks for what was looked at."""
        open_ones = {place: entry.target for place, entry in enumerate(told)
                     if entry.target is not None and f"target:{place}" not in seen}  # fmt: skip
        if not open_ones:
            return [], {}
        page, _ = await self._history.page(job, int(seen.get("cursor", 0)), POINTS, "*")
        messages, marks = [], {"cursor": str(page[-1][0])} if page else {}
        for _, point in page:
            for place, target in list(open_ones.items()):
                value = point.values.get(target.metric)
                if value is None or not target.reached(value):
                    continue
                del open_ones[place]
                marks[f"target:{place}"] = "1"
                detail = {"metric": target.metric, "value": value, "step": point.step}
                id = f"{job.id}/target/{place}"
                messages.append(self._message(job, id, place, "target", point.time, detail))
        return messages, marks

    async def _send(self, message: Message) -> None:
        try:
            job = await self._store.job(message.job)
            to = NotifySpec.model_validate(job.spec["notify"][message.entry])
            secret = await self._kept.secret(message.tenant)
            await deliver(message, to, secret, self._ctx.settings)
        except (NotFound, KeyError, IndexError):
            await self._kept.done(message)  # the job was deleted
        except (NotDelivered, OpenTinkerError) as error:
            await self._failed(message, str(error))
        else:
            await self._kept.done(message)
            log.info("notified", job=message.job, occasion=message.occasion, message=message.id)

    async def _failed(self, message: Message, why: str) -> None:
        log.warning("notification_failed", job=message.job, message=message.id, tries=message.tries + 1, error=why)
        if message.tries + 1 < TRIES:
            wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**message.tries)
            await self._kept.again(message, time.time() + wait_s)
            return
        await self._kept.done(message)
        detail = {"occasion": message.occasion, "entry": message.entry, "tries": TRIES, "error": why[:500]}
        try:
            await self._store.update(message.job, event="notification_failed", failure=True, detail=detail)
        except (Conflict, NotFound):
            return
