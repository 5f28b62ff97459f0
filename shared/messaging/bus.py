"""The only place that talks to NATS, with `consumer.py`, its receiving half, and `stored_messages.py`:
connect, request/serve, publish/consume, emit/listen.

JetStream is at-least-once; the checkpoint manifest, never an ack, decides what has been trained once. A publish waits
for its ack on our own inbox and is repeated under the same id at the reconnect after a server restart, or when no ack
arrives; any number may be in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamConfig
from nats.js.errors import APIError, NotFoundError

from opentinker.shared.asyncio_tools import await_cancellable
from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.connection import NoReply, NoResponders, OutageLog, PublishAcks, StreamFull, TooLarge
from opentinker.shared.messaging.consumer import (
    ACK_WAIT_S,
    AWAY,
    CLOSED,
    Consumer,
    ConsumerDeleted,
    Delivery,
    patiently,
)
from opentinker.shared.messaging.permissions import inbox
from opentinker.shared.messaging.stored_messages import StoredMessages, required_stream
from opentinker.shared.messaging.subjects import STREAMS, Call, Subject
from opentinker.shared.security.redact import redacted
from opentinker.shared.types import codec
from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")
R = TypeVar("R")
log = structlog.get_logger()

__all__ = [
    "ACK_WAIT_S", "Bus", "Consumer", "ConsumerDeleted", "Delivery", "NoReply", "NoResponders", "StreamFull", "TooLarge",
]  # fmt: skip

SETTLE_S = 2
RECONNECT_TIMEOUT_S = 10.0
"""A publish that is not stored within this time is logged, once."""

FULL = (10002, 10023, 10047, 10077)
"""JetStream errors that mean no room: of the account, the server's store (`max_file_store`), its disk, the stream."""
TOO_FEW = (10005, 10074)
"""Server error codes: fewer servers in the cluster than replicas, or no cluster."""


class Bus(StoredMessages):
    """One connection. Survives server restarts: what may be repeated waits until the server is back, `request` and
    the reading calls that say so raise NoReply instead."""

    def __init__(self, nc: Client, on_reconnect: set[Callable[[], Awaitable[None]]], outage: OutageLog) -> None:
        super().__init__(nc, nc.jetstream(timeout=2.5))
        self._outage = outage
        self.reconnect_timeout_s = RECONNECT_TIMEOUT_S
        self.on_reconnect = on_reconnect
        """Awaited one after the other when the server is back, after what the client had held back for it."""
        self._acks = PublishAcks(nc)
        on_reconnect.add(self._acks.lost)

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, name: str, service: str = "", password: str = "") -> AsyncIterator[Bus]:
        """Waits for the server as long as it takes.

        With a password the user is the one in the URL, else the service; without one, what the URL says. Answers come
        below the service's own inbox prefix.
        """
        shown, user = redacted(url), urlsplit(url).username or service
        login = {"user": user, "password": password} if password else {}
        prefix = {"inbox_prefix": inbox(service)} if service else {}
        first_failure = True
        on_reconnect: set[Callable[[], Awaitable[None]]] = set()

        outage = OutageLog(shown)

        async def reconnected() -> None:
            outage.ends()
            outage.ended_at = time.monotonic()
            log.info("nats_reconnected", url=shown)
            for notice in list(on_reconnect):
                await notice()

        while True:
            try:
                nc = await nats.connect(
                    url,
                    name=name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=64 * 1024 * 1024,
                    connect_timeout=3,
                    allow_reconnect=True,
                    error_cb=outage.report,
                    disconnected_cb=outage.begins,
                    reconnected_cb=reconnected,
                    **login,
                    **prefix,
                )
                outage.ends()
                break
            except (TimeoutError, OSError, nats.errors.Error) as error:
                if first_failure:
                    log.warning("nats_unreachable", url=shown, error=str(error) or type(error).__name__)
                    first_failure = False
                await asyncio.sleep(0.2)
        try:
            bus = cls(nc, on_reconnect, outage)
            await bus._acks.open()
            yield bus
        finally:
            try:
                await asyncio.wait_for(nc.drain(), 3.0)
            except (TimeoutError, nats.errors.Error):
                with contextlib.suppress(RuntimeError):  # of uvloop: what is held back finds the connection closed
                    await nc.close()

    def was_away(self, within_s: float) -> bool:
        """Return whether the connection is down, or was within the last seconds. The time before the first connection
        does not count."""
        return not self.nc.is_connected or time.monotonic() - self._outage.ended_at < within_s

    async def ensure_streams(self, replicas: int = 1) -> None:
        """Create or update every stream with this number of replicas. Idempotent; the scheduler calls it at start.
        Raises OpenTinkerError if the servers have no room, or are too few."""
        for stream in STREAMS:
            # nats-server refuses persist_mode ASYNC for what is replicated
            kept = stream if replicas == 1 else stream.evolve(num_replicas=replicas, persist_mode=None)
            await patiently(functools.partial(self._ensure, kept))

    async def await_streams(self, names: Sequence[str]) -> None:
        """Wait until the scheduler has made them."""
        for name in names:
            say_at: float | None = time.monotonic() + RECONNECT_TIMEOUT_S
            while True:
                try:
                    await patiently(functools.partial(self.js.stream_info, name))
                    break
                except NotFoundError:
                    if say_at is not None and time.monotonic() >= say_at:
                        say_at = None
                        log.warning("stream_missing", stream=name, hint="a scheduler makes it when it starts")
                await asyncio.sleep(0.1)

    async def _ensure(self, stream: StreamConfig) -> None:
        """Raises OpenTinkerError if the server has no room to reserve for it."""
        try:
            try:
                await self.js.add_stream(stream)
            except APIError as error:
                if error.err_code != 10058:  # exists with another configuration
                    raise
                await self.js.update_stream(stream)
        except APIError as error:
            if error.err_code in TOO_FEW:
                raise OpenTinkerError(
                    f"nats_replicas = {stream.num_replicas}, but NATS cannot keep the stream {stream.name} so often "
                    f"({error.description}): it needs that many servers with JetStream"
                ) from None
            if error.err_code not in FULL:
                raise
            raise OpenTinkerError(
                f"NATS has no room for the stream {stream.name} ({error.description}): it reserves "
                f"{(stream.max_bytes or 0) >> 20} MiB of the server's file store, which is three quarters of what was "
                "free on the disk of its store_dir (DATA_DIR/nats under `opentinker up`) when it started, or "
                "max_file_store in its configuration. Free disk there, or raise max_file_store, and restart nats-server"
            ) from None

    # --- core: request/reply and live messages ------------------------------------------------------------------

    async def request(self, call: Call[T, R], noun: T, timeout_s: float, **keys: str) -> R:
        """Send a request and return the reply. Raises NoReply without a reply in time, NoResponders immediately if no
        process serves the subject, and WireError if the reply is not an R."""
        try:
            reply = await await_cancellable(self.nc.request(call.at(**keys), codec.encode(noun), timeout=timeout_s))
        except nats.errors.NoRespondersError:
            raise NoResponders(f"{call.at(**keys)}: no process serves it") from None
        except (TimeoutError, *AWAY, *CLOSED) as error:
            raise NoReply(f"{call.at(**keys)}: {type(error).__name__}") from None
        return codec.decode(call.reply, reply.data)

    async def serve(
        self, call: Call[T, R], handler: Callable[[T], Awaitable[R]], queue: str = "", **keys: str
    ) -> Subscription:
        """Answer requests, each in a separate task. Undecodable requests are logged and left unanswered."""
        tasks: set[asyncio.Task[None]] = set()

        async def answer(msg: Msg, noun: T) -> None:
            reply = codec.encode(await handler(noun))
            if msg.reply and not self.nc.is_closed:
                await self.nc.publish(msg.reply, reply)

        async def receive(msg: Msg) -> None:
            try:
                noun = codec.decode(call.kind, msg.data)
            except codec.WireError as error:
                log.warning("bad_request", subject=msg.subject, error=str(error))
                return
            task = asyncio.create_task(answer(msg, noun))
            tasks.add(task)
            task.add_done_callback(_finish(tasks))

        return await self.nc.subscribe(call.at(**keys), queue=queue, cb=receive)

    async def emit(self, subject: Subject[T], noun: T, msg_id: str = "", **keys: str) -> None:
        """Publish a live message without an ack. It is lost without subscribers, unless a stream covers the subject,
        which then stores it once per `msg_id`."""
        headers = {"Nats-Msg-Id": msg_id} if msg_id else None
        try:
            await self.nc.publish(subject.at(**keys), subject.encode(noun), headers=headers)
        except (*AWAY, *CLOSED) as error:
            log.warning("emit_dropped", subject=subject.at(**keys), error=type(error).__name__)

    async def flush(self, timeout_s: int = 10) -> None:
        """Wait until everything sent so far has reached the server. The client sends its ping before data that it still
        buffers: the first answer proves that the buffer has left, the second that it has arrived."""
        await self.nc.flush(timeout=timeout_s)
        await self.nc.flush(timeout=timeout_s)

    async def settle(self) -> None:
        """Wait until everything emitted so far has reached the server, for at most SETTLE_S, and not while the server
        is away."""
        if self.nc.is_connected:
            with contextlib.suppress(*AWAY, *CLOSED):
                await await_cancellable(self.flush(SETTLE_S))

    async def listen(self, subject: Subject[T], handler: Callable[[T], Awaitable[None]], **keys: str) -> Subscription:
        async def receive(msg: Msg) -> None:
            try:
                noun = subject.decode(msg.data)
            except codec.WireError as error:
                log.warning("bad_message", subject=msg.subject, error=str(error))
                return
            await handler(noun)

        return await self.nc.subscribe(subject.at(**keys), cb=receive)

    @asynccontextmanager
    async def wakes(self, event: asyncio.Event, subject: Subject[Any], **keys: str) -> AsyncIterator[None]:
        """Set the event with each message, while the block runs."""

        async def wake(_: Any) -> None:
            event.set()

        subscription = await self.listen(subject, wake, **keys)
        try:
            yield
        finally:
            if not self.nc.is_closed:
                await subscription.unsubscribe()

    # --- JetStream ----------------------------------------------------------------------------------------------

    async def publish(self, subject: Subject[T], noun: T, msg_id: str, **keys: str) -> int:
        """Store a message and return its stream sequence. Repeats the same id until the server has confirmed.

        Raises StreamFull when the server has no room for it now, TooLarge when the server never takes it.
        """
        payload = subject.encode(noun)
        to, headers, backoff = subject.at(**keys), {"Nats-Msg-Id": msg_id}, Backoff(0.05, 0.5)
        size = len(payload) + len(f"NATS/1.0\r\nNats-Msg-Id: {msg_id}\r\n\r\n")
        say_at: float | None = time.monotonic() + self.reconnect_timeout_s
        while True:
            if size > self.nc.max_payload:  # known since the first connect; the server closes connections over it
                raise TooLarge(to, size, self.nc.max_payload)
            try:
                ack = await self._acks.publish(to, payload, headers)
                if (error := ack.get("error")) is None:
                    return int(ack["seq"])
                if error.get("err_code") in FULL:
                    raise StreamFull(f"{to}: {error.get('description')}")
                if error.get("code", 500) < 500:
                    raise APIError.from_error(error)
                why = str(error.get("description"))
            except AWAY as away:
                why = str(away) or type(away).__name__
            if say_at is not None and time.monotonic() >= say_at:
                say_at = None
                log.warning("publish_delayed", subject=to, error=why, since_s=self.reconnect_timeout_s)
            await backoff.sleep()

    async def consume(
        self,
        subject: Subject[T],
        durable: str,
        *,
        batch: int,
        start_seq: int | None = None,
        ack_wait_s: float = ACK_WAIT_S,
        **keys: str,
    ) -> Consumer[T]:
        """Return a durable pull consumer; `start_seq` recreates it from that stream sequence."""
        config = ConsumerConfig(
            name=durable,  # with it, the call names the subject too, and the server holds us to it
            durable_name=durable,
            filter_subject=subject.at(**keys),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=-1,  # of all processes that share the durable; each asks for no more than it can hold
            inactive_threshold=3600.0,
            deliver_policy=DeliverPolicy.ALL if start_seq is None else DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start_seq,
        )
        consumer = Consumer(self.nc, self.js, self.on_reconnect, subject, required_stream(subject), config, batch)
        await consumer.open(fresh=start_seq is not None)
        return consumer


def _finish(tasks: set[asyncio.Task[None]]) -> Callable[[asyncio.Task[Any]], None]:
    def done(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_handler_failed", exc_info=error)

    return done
