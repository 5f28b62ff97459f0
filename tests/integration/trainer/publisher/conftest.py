"""The surroundings of a trainer, one for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from opentinker.shared.runtime.service import Context
from tests.conftest import Server
from tests.integration.trainer.publisher.published_weights import TIMEOUT_S, TTL_S
from tests.support.scheduling import context


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ctx(
    nats_server: Server, valkey_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Context]:
    directory = tmp_path_factory.mktemp("publisher")
    settings = {"swap_timeout_s": TIMEOUT_S, "worker_ttl_s": TTL_S}
    async with context(nats_server, valkey_server, "trainer-0", directory, **settings) as ctx:
        await ctx.store.redis.flushdb()
        yield ctx
