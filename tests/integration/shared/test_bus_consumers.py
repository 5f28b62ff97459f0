"""Consumers of the bus: shared, limited, closed and lost ones take every message."""

from __future__ import annotations

import asyncio
import time

import pytest

from opentinker.shared.messaging.bus import Bus, Consumer, ConsumerDeleted
from opentinker.shared.messaging.consumer import EXPIRES_S
from opentinker.shared.messaging.subjects import GROUP, TICKET, Subject
from opentinker.shared.types.core import Ticket
from tests.conftest import WAIT_S, soon, until
from tests.integration.shared.bus_tickets import none_left, publish, take
from tests.support.factories import make_ticket


async def test_a_waiting_consumer_gets_its_message(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    """Not with the next ask: that is sent when this one expires, `expires_s` later."""
    consumer.expires_s = 2 * WAIT_S
    for seq in range(10):
        waiting = asyncio.create_task(consumer.next(WAIT_S))
        await until(lambda: consumer._asks)
        await publish(bus, job, seq)
        delivery = await waiting
        assert delivery is not None and delivery.noun == make_ticket(job=job, seq=seq)
        await delivery.ack()


async def test_many_processes_share_a_durable_without_a_limit_on_what_is_under_way(bus: Bus, job: str) -> None:
    for seq in range(12 * 32):
        await bus.publish(TICKET, make_ticket(job=job, seq=seq), f"{job}/{seq}", job=job)
    workers = [await bus.consume(TICKET, f"roll-{job}", batch=32, job=job) for _ in range(12)]
    held = [[await worker.next(WAIT_S, limit=32 - n) for n in range(32)] for worker in workers]
    assert sorted(d.noun.seq for deliveries in held for d in deliveries if d and d.noun) == list(range(12 * 32))
    for worker in workers:
        await worker.close()


async def test_delivery_goes_on_after_asks_expired(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    consumer.expires_s = 0.2
    waiting = asyncio.create_task(consumer.next(2 * WAIT_S))
    await until(lambda: consumer._serial == 1)
    consumer.expires_s = 4 * WAIT_S
    await until(lambda: consumer._serial == 2)  # the first ask has ended without a message
    await publish(bus, job, 1)
    assert await soon(waiting) is not None


async def test_next_gives_none_after_its_time(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    began = time.monotonic()
    assert await consumer.next(0.1) is None
    assert await consumer.next(0.0) is None
    assert 0.1 <= time.monotonic() - began < EXPIRES_S, "no longer than asked for"


async def test_message_not_acked_comes_again(bus: Bus, job: str) -> None:
    consumer = await bus.consume(TICKET, f"c-{job}", batch=8, ack_wait_s=1.0, job=job)
    await publish(bus, job, 1)
    first = await consumer.next(WAIT_S)
    again = await consumer.next(WAIT_S)
    assert first is not None and again is not None
    assert (first.deliveries, again.deliveries, first.seq) == (1, 2, again.seq)
    await again.nak()
    once_more = await consumer.next(WAIT_S)
    assert once_more is not None and once_more.deliveries == 3
    await once_more.term()
    await until(lambda: none_left(bus, job))
    await consumer.close(delete=True)


async def test_held_message_is_handed_back_if_cancelled_and_deleted_at_the_end(bus: Bus, job: str) -> None:
    """Meanwhile it does not come again."""
    consumer = await bus.consume(TICKET, f"c-{job}", batch=8, ack_wait_s=2.0, job=job)
    await publish(bus, job, 1)
    first = await consumer.next(WAIT_S)
    assert first is not None

    async def hold() -> None:
        async with first.held(2.0):
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    assert await consumer.next(3.0) is None
    holding.cancel()
    again = await consumer.next(WAIT_S)
    assert again is not None and (again.seq, again.deliveries) == (first.seq, 2)
    async with again.held(2.0):
        pass
    assert await none_left(bus, job)
    await consumer.close(delete=True)


async def test_ack_sync_deletes_from_a_work_queue(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    await publish(bus, job, 1, 2, 3)
    assert sorted(await take(consumer, 3)) == [1, 2, 3]
    assert await bus.count("TICKETS", TICKET.at(job=job)) == 0


async def test_limit_is_never_exceeded(bus: Bus, job: str) -> None:
    """What one consumer does not want is left for the other."""
    one = await bus.consume(TICKET, f"c-{job}", batch=64, job=job)
    other = await bus.consume(TICKET, f"c-{job}", batch=64, job=job)
    await publish(bus, job, *range(20))
    for _ in range(3):
        delivery = await one.next(WAIT_S, limit=1)
        assert delivery is not None
    assert await one.next(0.1, limit=0) is None
    assert len(await take(other, 17)) == 17
    await one.close()
    await other.close(delete=True)


async def test_shrinking_limits_take_every_message_once(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    await publish(bus, job, *range(50))
    got = []
    for i in range(50):
        delivery = await consumer.next(WAIT_S, limit=1 + i % 5)
        assert delivery is not None and delivery.noun is not None
        got.append(delivery.noun.seq)
        await delivery.ack()
    assert sorted(got) == list(range(50))


async def test_closing_gives_unread_messages_back(bus: Bus, job: str) -> None:
    one = await bus.consume(TICKET, f"c-{job}", batch=16, job=job)
    await publish(bus, job, *range(10))
    assert await one.next(WAIT_S) is not None  # nine more are on their way to it or there
    await until(lambda: len(one._ready) == 9)
    await one.close()
    other = await bus.consume(TICKET, f"c-{job}", batch=16, job=job)
    assert len(await take(other, 9)) == 9
    await other.close(delete=True)


async def test_start_seq_makes_the_consumer_anew(bus: Bus, job: str) -> None:
    group = Subject(GROUP.pattern, Ticket)
    seqs = [await bus.publish(group, make_ticket(seq=i), f"{job}/{i}", job=job) for i in range(6)]
    first = await bus.consume(group, f"c-{job}", batch=8, job=job)
    await take(first, 6)
    again = await bus.consume(group, f"c-{job}", batch=8, start_seq=seqs[2] + 1, job=job)
    assert await take(again, 3) == [3, 4, 5]
    with pytest.raises(ConsumerDeleted):
        while True:
            await first.next(WAIT_S)
    await first.close()
    await again.close(delete=True)
    await bus.purge("GROUPS", GROUP.at(job=job))


async def test_undecodable_message_is_delivered_with_its_error(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    for payload in (b"\xc1", b"", b"\x93\x01\x02\x03"):
        await bus.js.publish(TICKET.at(job=job), payload)
        delivery = await consumer.next(WAIT_S)
        assert delivery is not None and delivery.noun is None and "Ticket" in delivery.error
        await delivery.term()


async def test_consumer_that_vanished_is_made_again(bus: Bus, job: str, consumer: Consumer[Ticket]) -> None:
    await bus.delete_consumer("TICKETS", f"c-{job}")  # no ask is on its way yet, so nobody tells it
    await publish(bus, job, 1)
    assert await take(consumer, 1) == [1]


async def test_busy_consumer_does_not_pile_up_asks(bus: Bus, job: str) -> None:
    consumer = await bus.consume(TICKET, f"c-{job}", batch=16, job=job)
    await publish(bus, job, *range(1000))
    for _ in range(1000):
        delivery = await consumer.next(WAIT_S)
        assert delivery is not None
        await delivery.ack()
        assert len(consumer._ready) + sum(ask.left for ask in consumer._asks) <= 16
    info = await bus.js.consumer_info("TICKETS", f"c-{job}")
    assert (info.num_waiting or 0) <= 8, "more than 100 asks were made; the server may serve those it has in turns"
    await consumer.close(delete=True)
