"""Server-sent events: a response that lasts while there may be events and the client is connected."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from opentinker.shared.runtime.service import Context

COMMENT_S = 10.0
"""An idle stream says something so often, so that proxies keep it and a dead client is noticed."""


def event_stream() -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
    )
    response.content_type = "text/event-stream"
    return response


async def send_events(ctx: Context, request: web.Request, pieces: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Write the pieces as they come, until there are no more, the client leaves, or the service stops. An empty piece
    says that there is nothing new."""
    response = event_stream()
    await response.prepare(request)
    said_at = time.monotonic()
    async with aclosing(pieces):
        async for piece in pieces:
            if ctx.stopping.is_set() or request.transport is None or request.transport.is_closing():
                break
            if piece or time.monotonic() - said_at > COMMENT_S:
                await response.write(piece or b": nothing new\n\n")
                said_at = time.monotonic()
    return response
