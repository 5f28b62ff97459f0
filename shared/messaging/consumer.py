"""The receiving half of JetStream: deliveries, and a standing pull that survives server restarts.

We manage pulls ourselves. The client requests messages ahead of need and again when half of them have arrived; the
server answers a request with messages (in the order of requests) or with a status that ends it. Outstanding messages
are counted per request, so a lost request is forgotten when it is due, and all are forgotten at a reconnect, because
the server does not repeat them. So a message is delivered as soon as it is stored, and a restarted server delivers
immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import ConsumerConfig
from nats.js.client import JetStreamContext
from nats.js.errors import NoStreamResponseError, NotFoundError, ServiceUnavailableError

from opentinker.shared.asyncio_tools import await_cancellable, check_cancelled, every
from opentinker.shared.backoff import Backoff
from opentinker.shared.messaging.subjects import Subject
from opentinker.shared.types import codec
from opentinker.shared.types.errors import OpenTinkerError

T = TypeVar("T")
log = structlog.get_logger()

EXPIRES_S = 2.0
"""The server ends a pull request after this time."""
GRACE_S = 0.5
ACK_WAIT_S = 30.0
REFUSALS = 5
"""So many asks without a responder in a row: the consumer is gone and is made again."""

SILENT_ACKS = 2
"""So many seconds a connected server may leave a confirmed ack unanswered."""

AWAY = (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.errors.OutboundBufferLimitError,
        nats.errors.ConnectionReconnectingError, NoStreamResponseError, ServiceUnavailableError)  # fmt: skip
"""The server is not there, or not ready yet: try again."""
CLOSED = (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError)
"""We closed the connection ourselves: do not try again."""


class ConsumerDeleted(OpenTinkerError):
    """The durable consumer was deleted: its job has ended, or a newer process has recreated it."""


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call until the server is there to answer it."""
    backoff = Backoff(0.05, 0.5)
    while True:
        try:
            return await await_cancellable(call())
        except AWAY as error:
            log.debug("nats_unavailable", error=str(error) or type(error).__name__)
        await backoff.sleep()


class Delivery(Generic[T]):
    """One message: `noun` is None when it could not be decoded (`error` says why)."""

    __slots__ = ("_msg", "deliveries", "error", "key", "noun", "seq")

    def __init__(self, msg: Msg, noun: T | None, error: str) -> None:
        self._msg = msg
        self.noun = noun
        self.error = error
        metadata = msg.metadata
        self.seq: int = metadata.sequence.stream
        self.deliveries: int = metadata.num_delivered or 1
        self.key: str = (msg.headers or {}).get("Nats-Msg-Id", "")
        """The message id under which it was published; known even if the message cannot be decoded."""

    @property
    def data(self) -> bytes:
        """The message as it came."""
        data: bytes = self._msg.data
        return data

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return len(self._msg.data)

    async def ack(self) -> None:
        """Acknowledge for flow control: fire and forget."""
        await self._say(self._msg.ack())

    async def ack_sync(self, timeout_s: float = 5.0) -> bool:
        """Confirmed; on a work queue it deletes the message. Asks again while the server is away.

        False after `timeout_s`, or when a server that is there keeps silent: one that was restarted does not know
        deliveries of its last moments. The message comes again then.
        """
        deadline = time.monotonic() + timeout_s
        silent = 0
        while silent < SILENT_ACKS and (remaining := deadline - time.monotonic()) > 0:
            life = self._life()
            try:
                await await_cancellable(self._msg.ack_sync(timeout=min(1.0, remaining)))
                return True
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.1)
            except AWAY:
                silent = silent + 1 if life == self._life() else 0
            except (*CLOSED, nats.errors.MsgAlreadyAckdError):
                return False
        return False

    def _life(self) -> tuple[bool, int]:
        """Changes with every reconnect."""
        nc = self._msg._client
        return nc.is_connected, nc.stats["reconnects"]

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._say(self._msg.nak(delay=delay_s or None))

    async def term(self) -> None:
        await self._say(self._msg.term())

    async def in_progress(self) -> None:
        await self._say(self._msg.in_progress())

    @contextlib.asynccontextmanager
    async def held(self, ack_wait_s: float) -> AsyncIterator[None]:
        """Keep the message while the block runs, and ack it at its end. A block that is cancelled hands it back; one
        that raises leaves it to its redelivery. `ack_wait_s`: that of the consumer."""
        alive = asyncio.create_task(every(ack_wait_s / 3, self.in_progress))
        try:
            yield
            await self.ack_sync()
        except asyncio.CancelledError:
            await self.nak()
            raise
        finally:
            alive.cancel()

    async def _say(self, message: Awaitable[None]) -> None:
        """Send an acknowledgement or report. If it is lost, redelivery of the message repeats it."""
        with contextlib.suppress(nats.errors.MsgAlreadyAckdError, *AWAY, *CLOSED):
            await message


@dataclass(slots=True)
class _Ask:
    serial: str
    left: int
    until: float


class Consumer(Generic[T]):
    """A standing pull. `next()` gives messages as they come; several tasks may call it."""

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        on_reconnect: set[Callable[[], Awaitable[None]]],
        subject: Subject[T],
        stream: str,
        config: ConsumerConfig,
        batch: int,
    ) -> None:
        assert config.durable_name is not None
        self._nc, self._js, self._on_reconnect = nc, js, on_reconnect
        self._subject, self._stream, self._config, self._batch = subject, stream, config, batch
        self._durable: str = config.durable_name
        self.expires_s = EXPIRES_S
        self._ready: deque[Msg] = deque()
        self._asks: deque[_Ask] = deque()
        self._serial = 0
        self._refusals = 0
        self._not_before = 0.0
        self._deleted = False
        self._news = asyncio.Event()
        self._sub: Subscription | None = None
        self._inbox = nc.new_inbox()

    async def open(self, fresh: bool) -> None:
        """`fresh`: the consumer is deleted first, so that it starts where its configuration says."""
        if fresh:
            await patiently(self._delete)
        await patiently(self._make)
        self._sub = await self._nc.subscribe(self._inbox + ".*", cb=self._receive, pending_bytes_limit=512 * 2**20)
        self._on_reconnect.add(self._reconnected)

    async def _make(self) -> None:
        await self._js.add_consumer(self._stream, self._config)

    async def _delete(self) -> None:
        with contextlib.suppress(NotFoundError):
            await self._js.delete_consumer(self._stream, self._durable)

    async def next(self, timeout_s: float, limit: int | None = None) -> Delivery[T] | None:
        """The next message, or None after `timeout_s`. `limit` caps how many may be on their way to us.

        Raises ConsumerDeleted.
        """
        deadline = time.monotonic() + timeout_s
        want = self._batch if limit is None else min(self._batch, limit)
        while True:
            check_cancelled()
            if self._ready:
                msg = self._ready.popleft()
                if limit is None:
                    await self._ask(want)
                return self._deliver(msg)
            if self._deleted:
                raise ConsumerDeleted(f"consumer {self._durable} was deleted")
            self._news.clear()
            await self._ask(want)
            now = time.monotonic()
            if now >= deadline and not self._news.is_set():
                return None
            look_at = deadline
            if self._asks:
                look_at = self._asks[0].until
            elif want > 0:  # the server is away, or we pause after a refusal
                look_at = now + 0.05
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(deadline, look_at) - now)):
                    await self._news.wait()

    @property
    def ready(self) -> int:
        """Messages that have come and were not taken."""
        return len(self._ready)

    async def settled(self) -> int:
        """Stream sequence up to which everything was delivered and acknowledged; above it, messages may still come.

        Raises ConsumerDeleted.
        """
        try:
            info = await patiently(lambda: self._js.consumer_info(self._stream, self._durable))
        except NotFoundError:
            raise ConsumerDeleted(f"consumer {self._durable} was deleted") from None
        return info.ack_floor.stream_seq if info.ack_floor else 0

    async def _ask(self, want: int) -> None:
        """Ask for more when less than half of what we want is here or on its way."""
        now = time.monotonic()
        while self._asks and self._asks[0].until < now:
            self._asks.popleft()
        coming = len(self._ready) + sum(ask.left for ask in self._asks)
        if coming > want // 2 or coming >= want or now < self._not_before or not self._nc.is_connected:
            return
        if self._refusals >= REFUSALS:
            self._refusals = 0
            log.warning("consumer_recreated", consumer=self._durable)
            await patiently(self._make)
        self._serial += 1
        ask = _Ask(str(self._serial), want - coming, now + self.expires_s + GRACE_S)
        self._asks.append(ask)
        body = orjson.dumps({"batch": ask.left, "expires": int(self.expires_s * 1e9)})
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}"
        try:
            await self._nc.publish(subject, body, reply=f"{self._inbox}.{ask.serial}")
        except AWAY:
            self._asks.clear()

    async def _receive(self, msg: Msg) -> None:
        if msg.reply:
            self._ready.append(msg)
            self._refusals = 0
            if self._asks:
                self._asks[0].left -= 1
                if self._asks[0].left <= 0:
                    self._asks.popleft()
        else:
            self._ended(msg.subject.rpartition(".")[2], msg.headers or {})
        self._news.set()

    def _ended(self, serial: str, headers: dict[str, str]) -> None:
        """A status: the server will send nothing more for this ask."""
        status = headers.get("Status", "")
        if status == "100":
            return
        self._asks = deque(ask for ask in self._asks if ask.serial != serial)
        if status == "409" and "Deleted" in headers.get("Description", ""):
            self._deleted = True
        elif status == "503":
            self._refusals += 1
            self._not_before = time.monotonic() + 0.1
        elif status == "409":
            self._not_before = time.monotonic() + 0.1
        else:
            self._refusals = 0

    async def _reconnected(self) -> None:
        """Asks are forgotten. Unread messages are given back: a restarted server may not know that it sent them, and
        then an ack of them is not heard."""
        self._asks.clear()
        self._news.set()
        await self._give_back()

    async def _give_back(self) -> None:
        while self._ready:
            await Delivery(self._ready.popleft(), None, "").nak()

    def _deliver(self, msg: Msg) -> Delivery[T]:
        try:
            return Delivery(msg, self._subject.decode(msg.data), "")
        except codec.WireError as error:
            return Delivery(msg, None, str(error))

    async def close(self, delete: bool = False) -> None:
        """Return messages that were not taken to other consumers of the same durable name, immediately."""
        self._on_reconnect.discard(self._reconnected)
        if self._sub is not None and not self._nc.is_closed:
            with contextlib.suppress(nats.errors.Error):
                await self._sub.unsubscribe()
        await self._give_back()
        if delete:
            await patiently(self._delete)
