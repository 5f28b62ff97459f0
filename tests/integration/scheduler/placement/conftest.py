"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.integration.scheduler.placement.reconciling import looking
from tests.support.scheduling import Workers


@pytest.fixture
async def workers(store: Store) -> AsyncIterator[Workers]:
    workers = Workers(store)
    await workers.start("env-0")
    yield workers
    await workers.stop()


@pytest.fixture
async def reconciler(ctx: Context) -> AsyncIterator[Reconciler]:
    reconciler = Reconciler(ctx)
    async with looking(reconciler):
        yield reconciler
