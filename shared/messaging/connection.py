"""One NATS connection of the bus: its errors, acks of publishes, a log of outages."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from opentinker.shared.types.errors import OpenTinkerError

log = structlog.get_logger()

ERROR_LOG_S = 10.0
ACK_S = 3.0
"""A publish without an ack is repeated after this time."""
LOST = (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, OSError)
"""Errors that the client reports while it loses the connection, before it reports the loss itself."""


class NoReply(OpenTinkerError):
    """Nobody answered a request: no one serves the subject, or not in time."""


class NoResponders(NoReply):
    """The server reports that no process serves the subject at this moment."""


class StreamFull(OpenTinkerError):
    """The server has no room for the message: its store is full, or the account's or the stream's share of it is.
    Stop producing until a checkpoint, or the end of a job, has made room."""


class TooLarge(OpenTinkerError):
    """The server takes no message of this size, however often it is sent. Sizes in bytes, headers included."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"{subject}: the message has {size} bytes, the NATS server takes {limit} (max_payload)")


class PublishAcks:
    """Publishes that wait for their ack, all on one inbox."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._inbox = nc.new_inbox()
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0

    async def open(self) -> None:
        await self._nc.subscribe(self._inbox + ".*", cb=self._receive)

    async def _receive(self, msg: Msg) -> None:
        future = self._waiting.pop(msg.subject, None)
        if future is None or future.done():
            return
        if msg.data:
            future.set_result(orjson.loads(msg.data))
        else:  # 503: no stream listens on the subject, or not yet
            future.set_exception(nats.errors.NoRespondersError())

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Raises one of AWAY if there was no ack: the message may be stored or not."""
        if not self._nc.is_connected and not self._nc.is_closed:
            raise nats.errors.ConnectionReconnectingError
        self._count += 1
        reply = f"{self._inbox}.{self._count}"
        future = self._waiting[reply] = asyncio.get_running_loop().create_future()
        try:
            await self._nc.publish(subject, payload, reply=reply, headers=headers)
            async with asyncio.timeout(ACK_S):
                ack: dict[str, Any] = await future
                return ack
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            self._waiting.pop(reply, None)

    async def lost(self) -> None:
        """The connection is a new one: acks that were on their way will not come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(nats.errors.ConnectionReconnectingError())


class OutageLog:
    """Logs what the client reports: of a server that is away one line, however often it is looked for, and one when it
    is back; the same error of one that is there now and then."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ended_at = float("-inf")
        """When the newest outage ended, monotonic."""
        self._away = self._said = False
        self._said_at: dict[str, float] = {}

    async def begins(self) -> None:
        self._away = True

    def ends(self) -> None:
        self._away = self._said = False

    async def report(self, error: Exception) -> None:
        text, now = str(error) or type(error).__name__, time.monotonic()
        lost = self._away or isinstance(error, LOST)
        if (lost and self._said) or now - self._said_at.get(text, -ERROR_LOG_S) < ERROR_LOG_S:
            return
        self._said = self._said or lost
        self._said_at = {said: at for said, at in self._said_at.items() if now - at < ERROR_LOG_S} | {text: now}
        log.warning("nats_error", url=self._url, error=text)
