"""The only place that talks to NATS: connect, request/serve, publish/consume, emit/listen.

JetStream is at-least-once; what is trained once is decided by the checkpoint manifest, never by an ack.
Pulls are our own: one standing request of many messages, renewed when half used, when the server ends it, or when
it has been silent too long (after a reconnect nobody re-sends pull requests). So a message is delivered at once and
a restarted server is noticed within `EXPIRES_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import nats
import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from opentinker.shared import codec
from opentinker.shared.errors import OpenTinkerError
from opentinker.shared.subjects import STREAMS, Call, Subject

T = TypeVar("T")
R = TypeVar("R")
log = structlog.get_logger()

EXPIRES_S = 2.0
ACK_WAIT_S = 30.0
_RETRY = (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.errors.ConnectionClosedError,
          nats.errors.OutboundBufferLimitError, nats.errors.ConnectionReconnectingError)  # fmt: skip


class NoReply(OpenTinkerError):
    """Nobody answered a request: no one serves the subject, or not in time."""


class NoResponders(NoReply):
    """The server says that nobody serves the subject at this moment."""


class StreamFull(OpenTinkerError):
    """The job's share of the stream is used up: stop producing until the consumer has caught up."""


class Bus:
    """One connection. Survives server restarts; every call of ours waits or retries until it is back."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.js = nc.jetstream(timeout=5.0)

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, name: str) -> AsyncIterator[Bus]:
        """Waits for the server as long as it takes."""
        first_failure = True
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
                    error_cb=_log_error,
                )
                break
            except (TimeoutError, OSError, nats.errors.Error) as error:
                if first_failure:
                    log.warning("nats_unreachable", url=url, error=str(error) or type(error).__name__)
                    first_failure = False
                await asyncio.sleep(0.2)
        try:
            yield cls(nc)
        finally:
            try:
                await asyncio.wait_for(nc.drain(), 3.0)
            except (TimeoutError, nats.errors.Error):
                await nc.close()

    async def ensure_streams(self) -> None:
        """Create or update every stream. Idempotent; every service calls it at start."""
        for stream in STREAMS:
            while True:
                try:
                    await self.js.add_stream(stream)
                    break
                except APIError as error:
                    if error.err_code != 10058:  # exists with another configuration
                        raise
                    await self.js.update_stream(stream)
                    break
                except _RETRY:
                    await asyncio.sleep(0.2)

    # --- core: request/reply and live messages ------------------------------------------------------------------

    async def request(self, call: Call[T, R], noun: T, timeout_s: float, **keys: str) -> R:
        """Raises NoReply when nobody answers in time, at once NoResponders when nobody serves the subject, and
        WireError on a reply that is not an R."""
        try:
            reply = await self.nc.request(call.at(**keys), codec.encode(noun), timeout=timeout_s)
        except nats.errors.NoRespondersError:
            raise NoResponders(f"{call.at(**keys)}: nobody serves it") from None
        except (TimeoutError, *_RETRY) as error:
            raise NoReply(f"{call.at(**keys)}: {type(error).__name__}") from None
        return codec.decode(call.reply, reply.data)

    async def serve(
        self, call: Call[T, R], handler: Callable[[T], Awaitable[R]], queue: str = "", **keys: str
    ) -> Subscription:
        """Answer requests, each in a task of its own. Undecodable requests are logged and left unanswered."""
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

    async def emit(self, subject: Subject[T], noun: T, **keys: str) -> None:
        """Live message without an ack; lost when nobody listens (or kept by a stream that covers the subject)."""
        payload = codec.to_json(noun) if subject.json else codec.encode(noun)
        try:
            await self.nc.publish(subject.at(**keys), payload)
        except _RETRY as error:
            log.warning("emit_dropped", subject=subject.at(**keys), error=type(error).__name__)

    async def listen(self, subject: Subject[T], handler: Callable[[T], Awaitable[None]], **keys: str) -> Subscription:
        async def receive(msg: Msg) -> None:
            try:
                noun = codec.from_json(subject.kind, msg.data) if subject.json else codec.decode(subject.kind, msg.data)
            except codec.WireError as error:
                log.warning("bad_message", subject=msg.subject, error=str(error))
                return
            await handler(noun)

        return await self.nc.subscribe(subject.at(**keys), cb=receive)

    # --- JetStream ----------------------------------------------------------------------------------------------

    async def publish(self, subject: Subject[T], noun: T, msg_id: str, **keys: str) -> int:
        """Store a message and return its stream sequence. Repeats the same id until the server has confirmed.

        Raises StreamFull when the subject's share of the stream is used up.
        """
        payload = codec.to_json(noun) if subject.json else codec.encode(noun)
        pause = 0.05
        while True:
            try:
                ack = await self.js.publish(subject.at(**keys), payload, timeout=3.0, headers={"Nats-Msg-Id": msg_id})
                return int(ack.seq)
            except APIError as error:
                if error.err_code in (10077, 10122):
                    raise StreamFull(f"{subject.at(**keys)}: {error.description}") from None
                if error.code is not None and error.code < 500:
                    raise
                log.warning("publish_refused", subject=subject.at(**keys), error=error.description)
            except _RETRY as error:
                log.warning("publish_retry", subject=subject.at(**keys), error=type(error).__name__)
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, 1.0)

    async def consume(
        self,
        subject: Subject[T],
        durable: str,
        *,
        batch: int,
        start_seq: int | None = None,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliver: int = -1,
        **keys: str,
    ) -> Consumer[T]:
        """A durable pull consumer; `start_seq` makes it anew from that stream sequence on."""
        config = ConsumerConfig(
            durable_name=durable,
            filter_subject=subject.at(**keys),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_deliver=max_deliver,
            max_ack_pending=max(4 * batch, 256),
            inactive_threshold=3600.0,
            deliver_policy=DeliverPolicy.ALL if start_seq is None else DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start_seq,
        )
        consumer = Consumer(self, subject, _stream_of(subject), config, batch)
        await consumer.open(fresh=start_seq is not None)
        return consumer

    async def delete_consumer(self, stream: str, durable: str) -> None:
        try:
            await self.js.delete_consumer(stream, durable)
        except NotFoundError:
            return

    async def delete_consumers(self, subject: Subject[Any], **keys: str) -> None:
        """Every durable consumer of exactly this subject."""
        stream, wanted = _stream_of(subject), subject.at(**keys)
        names: list[str] = []
        offset = 0
        while page := await self.js.consumers_info(stream, offset):
            names += [info.name for info in page if info.config.filter_subject == wanted]
            offset += len(page)
        for name in names:
            await self.delete_consumer(stream, name)

    async def purge(self, stream: str, subject: str, below: int | None = None) -> None:
        """Remove the subject's messages, all or those with a sequence lower than `below`."""
        await self.js.purge_stream(stream, subject=subject, seq=below)

    async def history(self, subject: Subject[T], after: int, limit: int, **keys: str) -> list[tuple[int, T]]:
        """Up to `limit` stored messages with a stream sequence above `after`, oldest first, without consuming them.

        Raises NoReply while the server is away. Messages that are not a T are left out.
        """
        config = ConsumerConfig(
            filter_subject=subject.at(**keys),
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            inactive_threshold=10.0,
            mem_storage=True,
        )
        stream = _stream_of(subject)
        inbox = self.nc.new_inbox()
        sub = await self.nc.subscribe(inbox, pending_bytes_limit=512 * 2**20)
        found: list[tuple[int, T]] = []
        try:
            info = await self.js.add_consumer(stream, config)
            want = min(limit, info.num_pending or 0)
            if want:
                request = orjson.dumps({"batch": want, "expires": int(5e9)})
                await self.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}", request, reply=inbox)
            for _ in range(want):
                msg = await sub.next_msg(timeout=5.0)
                if not msg.reply:  # a status: the server has no more
                    break
                with contextlib.suppress(codec.WireError):
                    decode = codec.from_json if subject.json else codec.decode
                    found.append((msg.metadata.sequence.stream, decode(subject.kind, msg.data)))
            await self.delete_consumer(stream, info.name)
        except (TimeoutError, *_RETRY) as error:
            raise NoReply(f"{subject.at(**keys)}: history: {type(error).__name__}") from None
        finally:
            if not self.nc.is_closed:
                await sub.unsubscribe()
        return found

    async def stored(self, subject: Subject[T], **keys: str) -> list[T]:
        """Every message stored for the subject, also on a work queue, where a second consumer is not allowed."""
        found: list[T] = []
        seq = 1
        while True:
            try:
                raw = await self.js.get_msg(_stream_of(subject), seq=seq, subject=subject.at(**keys), next=True)
            except NotFoundError:
                return found
            except (TimeoutError, *_RETRY) as error:
                raise NoReply(f"{subject.at(**keys)}: {type(error).__name__}") from None
            assert raw.seq is not None
            seq = raw.seq + 1
            with contextlib.suppress(codec.WireError):
                found.append(codec.decode(subject.kind, raw.data or b""))

    async def count(self, stream: str, subject: str) -> int:
        """Messages stored for the subject."""
        info = await self.js.stream_info(stream, subjects_filter=subject)
        subjects = info.state.subjects or {}
        return int(sum(subjects.values()))


class Delivery(Generic[T]):
    """One message: `noun` is None when it could not be decoded (`error` says why)."""

    __slots__ = ("_msg", "deliveries", "error", "noun", "seq")

    def __init__(self, msg: Msg, noun: T | None, error: str) -> None:
        self._msg = msg
        self.noun = noun
        self.error = error
        metadata = msg.metadata
        self.seq: int = metadata.sequence.stream
        self.deliveries: int = metadata.num_delivered or 1

    async def ack(self) -> None:
        """For flow control: fire and forget."""
        await self._msg.ack()

    async def ack_sync(self) -> bool:
        """Confirmed; on a work queue it deletes the message. False if the server did not confirm in time."""
        try:
            await self._msg.ack_sync(timeout=5.0)
        except (TimeoutError, *_RETRY, nats.errors.MsgAlreadyAckdError):
            return False
        return True

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._msg.nak(delay=delay_s or None)

    async def term(self) -> None:
        await self._msg.term()

    async def in_progress(self) -> None:
        await self._msg.in_progress()


class Consumer(Generic[T]):
    """A standing pull. `next()` gives messages as they come."""

    def __init__(self, bus: Bus, subject: Subject[T], stream: str, config: ConsumerConfig, batch: int) -> None:
        self._bus, self._subject, self._stream, self._config, self._batch = bus, subject, stream, config, batch
        self._queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._outstanding = 0
        self._asked_at = 0.0
        self._serial = 0
        self._sub: Subscription | None = None

    async def open(self, fresh: bool) -> None:
        durable = self._config.durable_name
        assert durable is not None
        while True:
            try:
                if fresh:
                    await self._bus.delete_consumer(self._stream, durable)
                await self._bus.js.add_consumer(self._stream, self._config)
                break
            except _RETRY:
                await asyncio.sleep(0.2)
        self._inbox = self._bus.nc.new_inbox()
        self._sub = await self._bus.nc.subscribe(self._inbox + ".*", cb=self._receive, pending_bytes_limit=512 * 2**20)

    async def _receive(self, msg: Msg) -> None:
        await self._queue.put(msg)

    async def next(self, timeout_s: float, limit: int | None = None) -> Delivery[T] | None:
        """The next message, or None after `timeout_s`. `limit` caps how many may be on their way to us."""
        deadline = time.monotonic() + timeout_s
        want = min(self._batch, limit) if limit is not None else self._batch
        while True:
            if self._queue.empty():
                await self._ask(want)
            remaining = deadline - time.monotonic()
            if remaining <= 0 and self._queue.empty():
                return None
            if self._queue.empty():
                try:
                    msg = await asyncio.wait_for(self._queue.get(), min(remaining, EXPIRES_S / 2))
                except TimeoutError:
                    continue
            else:
                msg = self._queue.get_nowait()
            if self._is_status(msg):
                continue
            self._outstanding = max(0, self._outstanding - 1)
            if self._outstanding <= self._batch // 2 and limit is None:
                await self._ask(want)
            return self._deliver(msg)

    def _is_status(self, msg: Msg) -> bool:
        if not msg.headers or "Status" not in msg.headers or msg.data:
            return False
        if msg.subject.endswith(f".{self._serial}"):
            self._outstanding = 0
            if msg.headers["Status"] == "409" and "Deleted" in (msg.headers.get("Description") or ""):
                raise OpenTinkerError(f"consumer {self._config.durable_name} was deleted")
        return True

    async def _ask(self, want: int) -> None:
        """Renew the standing request unless a live one still covers us."""
        now = time.monotonic()
        if self._outstanding > self._batch // 2 and now - self._asked_at < 1.5 * EXPIRES_S:
            return
        if 0 < self._outstanding <= self._batch // 2 and want <= self._outstanding and now - self._asked_at < EXPIRES_S:
            return
        self._serial += 1
        self._asked_at, self._outstanding = now, want
        request = {"batch": want, "expires": int(EXPIRES_S * 1e9)}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config.durable_name}"
        try:
            await self._bus.nc.publish(subject, orjson.dumps(request), reply=f"{self._inbox}.{self._serial}")
        except _RETRY:
            self._outstanding = 0
            await asyncio.sleep(0.1)

    def _deliver(self, msg: Msg) -> Delivery[T]:
        try:
            if self._subject.json:
                return Delivery(msg, codec.from_json(self._subject.kind, msg.data), "")
            return Delivery(msg, codec.decode(self._subject.kind, msg.data), "")
        except codec.WireError as error:
            return Delivery(msg, None, str(error))

    async def close(self, delete: bool = False) -> None:
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()
        if delete:
            assert self._config.durable_name is not None
            await self._bus.delete_consumer(self._stream, self._config.durable_name)


def _stream_of(subject: Subject[Any]) -> str:
    first = subject.pattern.split(".")[0]
    name: str | None = next(s.name for s in STREAMS if s.subjects and s.subjects[0].split(".")[0] == first)
    assert name is not None
    return name


def _finish(tasks: set[asyncio.Task[None]]) -> Callable[[asyncio.Task[Any]], None]:
    def done(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "request handler failed", "exception": error, "task": task}
            )

    return done


async def _log_error(error: Exception) -> None:
    log.warning("nats_error", error=str(error) or type(error).__name__)
