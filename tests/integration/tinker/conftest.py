"""A scheduler, a Tinker server with fake workers, and a user of its tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opentinker.services.scheduler.tinker import gateway
from opentinker.shared.runtime.service import Context
from tests.integration.tinker.site import Client, FakeWorkers, start_server
from tests.support.api import OPERATOR, Http
from tests.support.scheduling import scheduler


@pytest.fixture
async def url(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A scheduler that holds requests for answers for a moment alone."""
    monkeypatch.setattr(gateway, "HOLD_S", 1.0)
    async with scheduler(ctx) as url:
        yield url


@pytest.fixture
async def workers(ctx: Context, url: str) -> AsyncIterator[FakeWorkers]:
    async with FakeWorkers(ctx, await start_server(ctx)).work() as workers:
        yield workers


@pytest.fixture
def user(api: Http, workers: FakeWorkers) -> Client:
    return Client(api, OPERATOR)
