"""Tells people what becomes of their jobs and sweeps, by their [[notify]]. Messages about sweeps come from
`sweeps/messages.py`.

    look   consumes events and metrics of jobs that notify; produces messages in Redis; waits LOOK_S
    send   consumes messages that are due; produces webhooks and e-mails, AT_ONCE of each tenant at the same time, so
           that a receiver who hangs delays no other tenant's; waits SEND_S

A message is kept in Redis before what it tells of counts as seen, so a killed scheduler loses none; one may be sent
twice, with the same id. It is tried TRIES times, over about 40 minutes; an e-mail that waits for the next hour is not
tried meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import msgspec
import nats.errors
import structlog
from redis.exceptions import RedisError

from opentinker.services.scheduler.artifacts.catalog import ArtifactCatalog
from opentinker.services.scheduler.jobs.metric_history import MetricHistory
from opentinker.services.scheduler.notifications.delivery import deliver
from opentinker.shared.asyncio_tools import cancel_and_wait, every_despite
from opentinker.shared.messaging.bus import NoReply
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec.notify import ALARMS, NotifySpec, TargetSpec
from opentinker.shared.state.notifications import Message, Notifications
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.core import JobRecord
from opentinker.shared.types.errors import Conflict, NotFound, OpenTinkerError
from opentinker.shared.types.sweeps import ID_PREFIX, Undelivered

log = structlog.get_logger()

LOOK_S, SEND_S = 2.0, 0.5
LATE_S = 30.0
"""Time after the end of a job within which metrics may still arrive."""
MAILS = 200
"""Delivered per tenant and hour; further ones wait for the next."""
TRIES = 9
FIRST_RETRY_S, MAX_RETRY_S = 10.0, 1200.0
AT_ONCE = 5
UNKNOWN_S = 300.0
"""Time after its announcement from which on a missing job counts as never stored."""
STATES = ("succeeded", "failed", "cancelled")
HIDDEN = ("id", "event", "time", "state")
"""Fields of an event that a message leaves out, or has elsewhere."""


class Notifier:
    def __init__(self, ctx: Context, *, metrics_s: float = 10.0, points: int = 1000) -> None:
        """`metrics_s`: interval at which metrics of a job are read again if nothing else of it has changed. `points`:
        read at a time."""
        self._metrics_s, self._points = metrics_s, points
        self._ctx, self._store = ctx, ctx.store
        self._kept = Notifications(ctx.store.redis)
        self._sweeps = SweepStore(ctx.store.redis)
        self._history = MetricHistory(ctx.bus, ArtifactCatalog(ctx))
        self._looked: dict[str, tuple[float, float]] = {}
        """By job: its `updated` when all of it had been read, and when that was (monotonic seconds)."""
        self._sending: dict[str, asyncio.Task[None]] = {}
        """By id of the message."""

    async def run(self) -> None:
        """Deliver notifications until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for wait_s, work in ((LOOK_S, self.look), (SEND_S, self.send)):
                    tasks.create_task(every_despite(wait_s, work, "notifier_waits", RedisError, OSError, TimeoutError))
        finally:
            await cancel_and_wait(*self._sending.values())

    async def look(self) -> None:
        """Look at all jobs that notify once, and keep messages."""
        now, followed = time.time(), await self._kept.followed()
        found = {job.id: job for job in await self._store.jobs(list(followed))}
        for id, since in followed.items():
            if id not in found and now - since > UNKNOWN_S:
                await self._kept.forget(id)
        for job, seen in zip(found.values(), await self._kept.seen(list(found)), strict=True):
            if self._is_known(job):
                continue
            try:
                await self._look_at(job, seen)
            except (NoReply, nats.errors.Error, OpenTinkerError, ValueError) as error:
                log.warning("notifier_waits", job=job.id, error=str(error))

    def _is_known(self, job: JobRecord) -> bool:
        """Return whether nothing has happened since the last look."""
        updated, at = self._looked.get(job.id, (-1.0, 0.0))
        if updated != job.updated or job.state.final:
            return False
        return time.monotonic() < at + self._metrics_s or not any(entry.get("target") for entry in job.spec["notify"])

    async def send(self) -> None:
        """Begin to send what is due."""
        due = await self._kept.due(time.time(), AT_ONCE)
        busy = Counter(message.tenant for message in due if message.id in self._sending)
        for message in due:
            if message.id in self._sending or busy[message.tenant] >= AT_ONCE:
                continue
            self._sending[message.id] = asyncio.create_task(self._send(message))
            busy[message.tenant] += 1

    async def sent(self) -> None:
        """Wait for what is being sent."""
        await asyncio.gather(*self._sending.values())

    async def _look_at(self, job: JobRecord, seen: dict[str, str]) -> None:
        told = [NotifySpec.model_validate(entry) for entry in job.spec.get("notify") or []]
        events = await self._store.events(job.id, seen.get("after", "0"))
        messages = [message for event in events for message in self._messages(job, event, told)]
        marks = {"after": events[-1]["id"]} if events else {}
        reached, more_marks, more = await self._targets(job, told, seen)
        if messages or reached or marks or more_marks:
            await self._kept.add(job.id, [*reached, *messages], {**marks, **more_marks}, time.time())
        if more or events:
            return
        self._looked[job.id] = (job.updated, time.monotonic())
        if job.state.final and time.time() > job.finished + (LATE_S if _open_targets(told, seen) else 0.0):
            await self._kept.forget(job.id)
            del self._looked[job.id]

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
    ) -> tuple[list[Message], dict[str, str], bool]:
        """Return messages of targets that new points reach, marks for what was looked at, and whether there is more."""
        open_ones = _open_targets(told, seen)
        if not open_ones:
            return [], {}, False
        page, more = await self._history.page(job, int(seen.get("cursor", 0)), self._points, "*")
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
        return messages, marks, more

    async def _send(self, message: Message) -> None:
        try:
            await self._deliver(message)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("notifier_waits", message=message.id, error=str(error) or type(error).__name__)
        finally:
            del self._sending[message.id]

    async def _deliver(self, message: Message) -> None:
        try:
            entries = await self._entries(message.job)
        except NotFound:
            return await self._kept.done(message)  # it was deleted
        try:
            to = NotifySpec.model_validate(entries[message.entry])
            secret = await self._kept.secret(message.tenant)
            if to.email is None:
                await deliver(message, to, secret, self._ctx.settings)
            elif wait_s := await self._kept.take_mail(message.tenant, MAILS):
                return await self._kept.postpone(message, time.time() + wait_s)
            else:
                await self._mail(message, to, secret)
        except RedisError:
            raise
        except Exception as error:  # noqa: BLE001 - one message must not end the others
            await self._failed(message, str(error) or type(error).__name__)
        else:
            await self._kept.done(message)
            log.info("notified", job=message.job, occasion=message.occasion, message=message.id)

    async def _mail(self, message: Message, to: NotifySpec, secret: str) -> None:
        """Deliver an e-mail that was counted; one that fails counts no longer."""
        try:
            await deliver(message, to, secret, self._ctx.settings)
        except Exception:
            await self._kept.give_back_mail(message.tenant)
            raise

    async def _entries(self, id: str) -> list[dict[str, Any]]:
        """Return the [[notify]] of a job or sweep. Raises NotFound."""
        if id.startswith(ID_PREFIX):
            return list((await self._sweeps.sweep(id)).base["notify"])
        return list((await self._store.job(id)).spec["notify"])

    async def _failed(self, message: Message, why: str) -> None:
        log.warning("notification_failed", job=message.job, message=message.id, tries=message.tries + 1, error=why)
        if message.tries + 1 < TRIES:
            wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**message.tries)
            await self._kept.again(message, time.time() + wait_s)
            return
        await self._kept.done(message)
        given_up = Undelivered(
            time=time.time(), occasion=message.occasion, entry=message.entry, tries=TRIES, error=why[:500]
        )
        try:
            await self._record(message.job, given_up)
        except (Conflict, NotFound):
            return

    async def _record(self, id: str, given_up: Undelivered) -> None:
        """Show at a job or sweep what could not be delivered. Raises Conflict, NotFound."""
        if id.startswith(ID_PREFIX):
            return await self._sweeps.add_undelivered(id, given_up)
        detail = {name: value for name, value in msgspec.to_builtins(given_up).items() if name != "time"}
        await self._store.update(id, event="notification_failed", failure=True, detail=detail)


def _open_targets(told: list[NotifySpec], seen: dict[str, str]) -> dict[int, TargetSpec]:
    """Return targets that were not reached yet, by their entry's place."""
    return {
        place: entry.target
        for place, entry in enumerate(told)
        if entry.target is not None and f"target:{place}" not in seen
    }
