"""Makes the tools of jobs as an env worker does."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import pytest

from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.shared.config import Settings
from tests.samples import tool_samples

SETTINGS = Settings(env_modules=True, env_tool_commands=True, sandbox_memory_mb=512, sandbox_disk_mb=32)


@pytest.fixture
async def shop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolFactory]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), *sys.path])))
    tool_samples.LET_GO.clear()
    shop = ToolFactory(SETTINGS)
    yield shop
    tool_samples.LET_GO.set()
    await shop.close()
