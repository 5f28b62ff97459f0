"""Servers whose users sign in at an OpenID provider."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from opentinker.shared.runtime.service import Context
from tests.conftest import NewContext
from tests.support.oidc.login import Open, with_provider
from tests.support.oidc.provider import Provider, oidc_provider
from tests.support.scheduling import scheduler


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with oidc_provider() as provider:
        yield provider


@pytest.fixture
async def served(new_context: NewContext, provider: Provider, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens servers whose users sign in at the provider."""

    @asynccontextmanager
    async def open(**more: Any) -> AsyncIterator[tuple[Context, str]]:
        async with new_context() as ctx:
            with_provider(ctx, provider, tmp_path / "secret", **more)
            async with scheduler(ctx) as url:
                yield ctx, url

    yield open
