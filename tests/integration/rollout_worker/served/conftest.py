"""A job, and an environment that counts its turns."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from opentinker.shared.state.store import Store
from tests.integration.rollout_worker.served.served_episodes import Counting
from tests.support.factories import make_spec


@pytest.fixture
def environment() -> type[Counting]:
    """One of the test's own, with its gate open."""
    gate = asyncio.Event()
    gate.set()
    return type("Counting", (Counting,), {"gate": gate, "played": []})


@pytest.fixture
async def job(store: Store) -> str:
    spec = make_spec().model_dump(mode="json")
    return await store.create_job(id="j-" + uuid.uuid4().hex[:10], spec=spec, tenant="default")
