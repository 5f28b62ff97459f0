"""Connects to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as aioredis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from opentinker.shared.asyncio_tools import await_cancellable

log = structlog.get_logger()

CONNECTIONS = 5000
"""Each event stream holds one connection; redis-py's default limit is 100."""


class _Connection(aioredis.Connection):
    """Connection that does not lose a cancellation during a write and is not reused while an unread reply is
    outstanding."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await await_cancellable(super().send_packed_command(command, check_health))
        except asyncio.CancelledError:
            await self.disconnect(nowait=True)
            raise


@asynccontextmanager
async def connect_redis(url: str, name: str, user: str = "", password: str = "") -> AsyncIterator[aioredis.Redis]:
    """Wait for the server as long as it takes; later, commands retry for half a minute before they raise. User and
    password of the URL take precedence over the arguments."""
    login = {"username": user or None, "password": password} if password else {}
    client = aioredis.from_url(
        url,
        **login,
        client_name=name.replace(" ", "-"),
        decode_responses=True,
        connection_class=_Connection,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        socket_connect_timeout=3.0,
        socket_timeout=10.0,
        retry=Retry(EqualJitterBackoff(cap=1.0, base=0.05), 40),
        retry_on_error=[RedisConnectionError, RedisTimeoutError, ConnectionError],
        health_check_interval=15,
        max_connections=CONNECTIONS,
    )
    try:
        await _wait_for_server(client)
        yield client
    finally:
        await client.aclose()


async def _wait_for_server(client: aioredis.Redis) -> None:
    warned = False
    while True:
        try:
            await client.ping()
            return
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            if not warned:
                log.warning("redis_unreachable", error=str(error))
                warned = True
            await asyncio.sleep(0.2)
