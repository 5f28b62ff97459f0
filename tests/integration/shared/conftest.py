"""A job of each test, and a consumer of its tickets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opentinker.shared.messaging.bus import Bus, Consumer
from opentinker.shared.messaging.subjects import TICKET, token
from opentinker.shared.types.core import Ticket


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return token(request.node.name)


@pytest.fixture
async def consumer(bus: Bus, job: str) -> AsyncIterator[Consumer[Ticket]]:
    consumer = await bus.consume(TICKET, f"c-{job}", batch=8, job=job)
    yield consumer
    await consumer.close(delete=True)
