"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sessions import Sessions
from tests.samples import env_samples


@pytest.fixture
async def host() -> AsyncIterator[ChildPool]:
    host = ChildPool(children=2, per_child=2, modules=True)
    yield host
    await host.close()


@pytest.fixture
async def sessions(host: ChildPool) -> AsyncIterator[Sessions]:
    env_samples.Counting.calls.clear()
    env_samples.LET_GO.clear()
    sessions = Sessions("w", limit=8, resolver=Resolver(modules=True), host=host, close_s=0.5, remembered=10)
    yield sessions
    env_samples.LET_GO.set()
    await sessions.drain(0.01)
