"""An env worker whose environments run in sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.shared.config import Settings
from tests.integration.access.sandboxes.sandbox_worker import Worker
from tests.support.cluster import PYTHONPATH


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setenv("OPENTINKER_NATS_URL", "nats://user:secret@127.0.0.1:1")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    settings = Settings(data_dir=tmp_path / "data", env_modules=True, sandbox_memory_mb=512, sandbox_disk_mb=32)
    worker = Worker(settings, await Sandboxes.open(settings))
    assert worker.sandboxes.unavailable == ""
    yield worker
    await worker.sessions.drain(0.01)
    await worker.host.close()
    await worker.sandboxes.close()
