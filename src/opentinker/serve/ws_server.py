"""An environment behind a URL: a WebSocket server that env workers connect to (`websocket_frames.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aiohttp import WSCloseCode, web

from opentinker.envs.base import Environment
from opentinker.envs.runtime.in_process_server import InProcessServer
from opentinker.shared.messaging.websocket_frames import (
    FRAME_BYTES,
    HEARTBEAT_S,
    BadFrame,
    ConnectionLost,
    answer_calls,
    hello_of,
    introduce,
)
from opentinker.shared.types.errors import OpenTinkerError

log = structlog.get_logger()
MOST_CONNECTIONS = 4096


@asynccontextmanager
async def listening(environment: type[Environment] | str, host: str, port: int, concurrency: int) -> AsyncIterator[str]:
    """Serve while the block runs; gives the URL. Port 0 takes a free one. Whoever reaches the address may play."""
    stage = InProcessServer(environment, concurrency)
    sockets: set[web.WebSocketResponse] = set()
    hello = hello_of(stage.title, concurrency)

    async def connect(request: web.Request) -> web.StreamResponse:
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="a web page may not play here")
        connection = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES, compress=False)
        if not connection.can_prepare(request).ok:
            raise web.HTTPUpgradeRequired(text="this is an OpenTinker environment: connect with a WebSocket")
        if len(sockets) >= MOST_CONNECTIONS:
            raise web.HTTPServiceUnavailable(text="too many connections")
        await connection.prepare(request)
        sockets.add(connection)
        try:
            await introduce(connection, hello)
            await answer_calls(connection, stage.play)
        except (BadFrame, ConnectionLost) as error:
            log.warning("connection_refused", remote=request.remote, reason=str(error))
        finally:
            sockets.discard(connection)
            await connection.close()
        return connection

    async def let_go(_: web.Application) -> None:
        for connection in list(sockets):
            await connection.close(code=WSCloseCode.GOING_AWAY)

    app = web.Application()
    app.router.add_get("/{any:.*}", connect)
    app.on_shutdown.append(let_go)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise OpenTinkerError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
        taken = runner.addresses[0][1]
        yield f"ws://[{host}]:{taken}" if ":" in host else f"ws://{host}:{taken}"
    finally:
        await runner.cleanup()
        await stage.close(0.0)
