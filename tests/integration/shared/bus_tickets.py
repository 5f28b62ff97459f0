"""Tickets sent over the bus to a server that may restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentinker.shared.messaging.bus import Bus, Consumer
from opentinker.shared.messaging.subjects import TICKET
from opentinker.shared.types.core import Ticket
from tests.conftest import WAIT_S, Server
from tests.support.factories import make_ticket


@asynccontextmanager
async def connected(server: Server, name: str = "test") -> AsyncIterator[Bus]:
    async with Bus.connect(server.url, name) as bus:
        await bus.ensure_streams()
        yield bus


def restart(server: Server, away_s: float) -> asyncio.Task[None]:
    """Kill now, start again after `away_s`, while the test goes on."""
    server.kill()

    async def later() -> None:
        await asyncio.sleep(away_s)
        await asyncio.to_thread(server.start)

    return asyncio.create_task(later())


async def publish(bus: Bus, job: str, *seqs: int) -> None:
    await asyncio.gather(*(bus.publish(TICKET, make_ticket(job=job, seq=seq), f"{job}/{seq}", job=job) for seq in seqs))


async def take(consumer: Consumer[Ticket], count: int, within_s: float = WAIT_S) -> list[int]:
    """The numbers of the next `count` different tickets, each acknowledged."""
    seen: list[int] = []
    deadline = time.monotonic() + within_s
    while len(seen) < count:
        delivery = await consumer.next(max(0.0, deadline - time.monotonic()))
        assert delivery is not None, f"only {len(seen)} of {count} came within {within_s} s"
        assert delivery.noun is not None
        assert await delivery.ack_sync()
        if delivery.noun.seq not in seen:
            seen.append(delivery.noun.seq)
    return seen


async def none_left(bus: Bus, job: str) -> bool:
    return await bus.count("TICKETS", TICKET.at(job=job)) == 0
