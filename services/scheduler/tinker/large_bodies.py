"""Bounds how many large bodies, and large answers, a scheduler has in memory at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.tinker.bodies import is_compressed

LARGE_OF_TENANT = 4
"""A tenant's large bodies that are read, parsed and sent at the same time; and as many of its large answers."""
PARSED_AT_ONCE = 4
"""Large bodies of all tenants that are parsed at the same time: a parsed one takes ten times its bytes. And as many
answers that are encoded."""


class Places:
    """Places of bodies, or of answers."""

    def __init__(self) -> None:
        self._parsing = asyncio.Semaphore(PARSED_AT_ONCE)
        self._of_tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of_tenant(self, request: web.Request, *, is_large: bool) -> AbstractAsyncContextManager[Any]:
        """One of its tenant's places for what is large, taken before it is in memory and kept until it is sent: a
        client that stalls delays no other tenant."""
        if not is_large:
            return contextlib.nullcontext()
        return self._of_tenants.setdefault(tenant_of(request), asyncio.Semaphore(LARGE_OF_TENANT))

    def parsing(self, *, is_large: bool) -> AbstractAsyncContextManager[Any]:
        """One of the places of all tenants, for as long as what is large is parsed or encoded."""
        return self._parsing if is_large else contextlib.nullcontext()


def may_be_beyond(request: web.Request, size: int) -> bool:
    """Return whether a body may have more bytes than that: one without a length, or a compressed one, may."""
    return is_compressed(request) or request.content_length is None or request.content_length > size
