"""Reads and deletes messages that streams store, and deletes their consumers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import uuid
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from opentinker.shared.messaging.connection import NoReply
from opentinker.shared.messaging.consumer import AWAY, CLOSED, patiently
from opentinker.shared.messaging.permissions import stream_of
from opentinker.shared.messaging.subjects import Subject
from opentinker.shared.types import codec

T = TypeVar("T")

EXPIRES_S = 5.0
"""The server ends a request for messages after this time."""
SILENCE_S = 5.0
"""Time without a message after which the server counts as away."""
SHORT_ACK = 9
"""Parts of an acknowledgement's subject without domain and account."""


def required_stream(subject: Subject[Any]) -> str:
    name = stream_of(subject)
    assert name is not None
    return name


def stream_sequence(reply: str) -> int:
    """Return a message's place in its stream, of `$JS.ACK.STREAM.CONSUMER.DELIVERIES.SEQUENCE...`: nine parts or,
    with `DOMAIN.ACCOUNT` before the stream, more. `Msg.metadata` parses all of them, in ten times the time."""
    parts = reply.split(".")
    return int(parts[5 if len(parts) == SHORT_ACK else 7])


class _Page(Generic[T]):
    """Messages that the server sends for one request of `history`. A callback receives them, because the client
    creates two tasks for every message that is awaited: these took three quarters of the time of a long history."""

    def __init__(self, subject: Subject[T]) -> None:
        self._subject = subject
        self.found: list[tuple[int, T]] = []
        self.missing = 0
        """Messages to come."""
        self._end = asyncio.Event()

    async def receive(self, msg: Msg) -> None:
        if not msg.reply:  # a status: the server has no more
            self._end.set()
        if self._end.is_set():
            return
        with contextlib.suppress(codec.WireError):
            self.found.append((stream_sequence(msg.reply), self._subject.decode(msg.data)))
        self.missing -= 1
        if not self.missing:
            self._end.set()

    async def complete(self) -> None:
        """Wait for the last message. Raises TimeoutError if none comes for SILENCE_S."""
        while not self._end.is_set():
            before = self.missing
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), SILENCE_S)
            if self.missing == before and not self._end.is_set():
                raise TimeoutError


class StoredMessages:
    def __init__(self, nc: Client, js: JetStreamContext) -> None:
        self.nc, self.js = nc, js

    async def delete_consumer(self, stream: str, durable: str) -> None:
        with contextlib.suppress(NotFoundError):
            await patiently(lambda: self.js.delete_consumer(stream, durable))

    async def delete_consumers(self, subject: Subject[Any], **keys: str) -> None:
        """Delete every durable consumer of exactly this subject, or of one that it stands for with its wildcards."""
        stream = required_stream(subject)
        wanted = re.compile(re.escape(subject.at(**keys)).replace(r"\*", "[^.]+"))
        names: list[str] = []
        offset = 0
        while page := await patiently(functools.partial(self.js.consumers_info, stream, offset)):
            names += [info.name for info in page if wanted.fullmatch(info.config.filter_subject or "")]
            offset += len(page)
        for name in names:
            await self.delete_consumer(stream, name)

    async def purge(self, stream: str, subject: str, below: int | None = None) -> None:
        """Remove the subject's messages, all or those with a sequence lower than `below`."""
        await patiently(lambda: self.js.purge_stream(stream, subject=subject, seq=below))

    async def history(
        self, subject: Subject[T], after: int, limit: int, *, since: float | None = None, **keys: str
    ) -> list[tuple[int, T]]:
        """Up to `limit` stored messages with a stream sequence above `after`, or stored at `since` (Unix seconds) or
        later, oldest first, without consuming them.

        Raises NoReply while the server is away. Messages that are not a T are left out.
        """
        config = ConsumerConfig(
            name=uuid.uuid4().hex,
            filter_subject=subject.at(**keys),
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE if since is None else DeliverPolicy.BY_START_TIME,
            opt_start_seq=after + 1 if since is None else None,
            opt_start_time=None if since is None else datetime.fromtimestamp(since, UTC),
            inactive_threshold=10.0,
            mem_storage=True,
        )
        stream = required_stream(subject)
        inbox = self.nc.new_inbox()
        page = _Page(subject)
        sub = await self.nc.subscribe(inbox, cb=page.receive, pending_bytes_limit=512 * 2**20)
        try:
            info = await self.js.add_consumer(stream, config)
            if want := min(limit, info.num_pending or 0):
                page.missing = want
                request = orjson.dumps({"batch": want, "expires": int(EXPIRES_S * 1e9)})
                await self.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}", request, reply=inbox)
                await page.complete()
            await self.delete_consumer(stream, info.name)
        except (TimeoutError, *AWAY, *CLOSED) as error:
            raise NoReply(f"{subject.at(**keys)}: history: {type(error).__name__}") from None
        finally:
            if not self.nc.is_closed:
                await sub.unsubscribe()
        return page.found

    async def stored(self, subject: Subject[T], **keys: str) -> list[T]:
        """Return every message stored for the subject, also on a work queue, where a second consumer is not allowed."""
        found: list[T] = []
        seq = 1
        while True:
            try:
                raw = await self.js.get_msg(required_stream(subject), seq=seq, subject=subject.at(**keys), next=True)
            except NotFoundError:
                return found
            except (TimeoutError, *AWAY, *CLOSED) as error:
                raise NoReply(f"{subject.at(**keys)}: {type(error).__name__}") from None
            assert raw.seq is not None
            seq = raw.seq + 1
            with contextlib.suppress(codec.WireError):
                found.append(subject.decode(raw.data or b""))

    async def stored_at(self, subject: Subject[T], seq: int) -> T | None:
        """Return the message with this stream sequence; None if it was removed. Raises WireError if it is no T."""
        try:
            raw = await patiently(lambda: self.js.get_msg(required_stream(subject), seq=seq))
        except NotFoundError:
            return None
        return subject.decode(raw.data or b"")

    async def newest(self, stream: str) -> int:
        """Return the sequence of the last message that the stream took."""
        info = await patiently(lambda: self.js.stream_info(stream))
        return int(info.state.last_seq)

    async def last(self, subject: Subject[T], **keys: str) -> T | None:
        """The newest message stored for the subject. Raises WireError if it is no T."""
        try:
            raw = await patiently(lambda: self.js.get_last_msg(required_stream(subject), subject.at(**keys)))
        except NotFoundError:
            return None
        return subject.decode(raw.data or b"")

    async def counts(self, stream: str, subject: str) -> dict[str, int]:
        """Messages stored for each subject that the given one, with wildcards, stands for; none is left out as 0."""
        info = await patiently(lambda: self.js.stream_info(stream, subjects_filter=subject))
        return dict(info.state.subjects or {})

    async def count(self, stream: str, subject: str) -> int:
        """Messages stored for the subject."""
        return sum((await self.counts(stream, subject)).values())
