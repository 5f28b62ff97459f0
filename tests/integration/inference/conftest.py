"""An inference job's surroundings for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opentinker.client import AsyncClient
from opentinker.shared.runtime.service import Context
from tests.conftest import Server
from tests.support.inference import Site, site_of


@pytest.fixture
async def site(client: AsyncClient, ctx: Context, nats_server: Server, valkey_server: Server) -> AsyncIterator[Site]:
    async with site_of(client, nats_server, valkey_server, ctx.settings.data_dir) as site:
        yield site
