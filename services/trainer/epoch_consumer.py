"""The consumer through which the trainer of a lease's epoch reads a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from opentinker.shared.messaging.bus import Bus, Consumer, Delivery
from opentinker.shared.messaging.consumer import ConsumerDeleted
from opentinker.shared.messaging.stored_messages import required_stream
from opentinker.shared.messaging.subjects import Subject
from opentinker.shared.types.core import Lease

T = TypeVar("T")

OLD_CONSUMERS = 16
"""Number of earlier epochs whose consumer may still exist; the server removes older ones, which are idle, by itself."""


async def open_epoch_consumer(
    bus: Bus, subject: Subject[T], lease: Lease, name: Callable[[str, int], str], *, batch: int, start_seq: int
) -> Consumer[T]:
    """Create the consumer of this epoch: a former holder of the lease that is only asleep takes nothing from it.
    Consumers of earlier epochs are deleted. `name`: returns the consumer's, from job and epoch."""
    for before in range(max(1, lease.epoch - OLD_CONSUMERS), lease.epoch):
        await bus.delete_consumer(required_stream(subject), name(lease.job, before))
    return await bus.consume(
        subject, name(lease.job, lease.epoch), batch=batch, start_seq=start_seq, job=lease.job
    )  # fmt: skip


async def deliveries(consumer: Consumer[T], guard: Callable[[], Awaitable[None]]) -> AsyncGenerator[Delivery[T], None]:
    """Yield what arrives, and acknowledge it afterwards; acks are flow control only. `guard` raises Fenced if a newer
    trainer has taken over: most likely it is the one that deleted the consumer."""
    while True:
        try:
            delivery = await consumer.next(1.0)
        except ConsumerDeleted:
            await guard()
            raise
        if delivery is not None:
            yield delivery
            await delivery.ack()
