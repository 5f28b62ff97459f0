"""Live streams of jobs in tests: a nats-server that asks schedulers who may come in, and whoever comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import nats.aio.msg
import orjson
import structlog
from nats.aio.client import Client

from opentinker.local.embedded import nats_binary
from opentinker.local.server_users import Access, WebSocket
from opentinker.shared.config import Settings
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import SCHEDULER
from opentinker.shared.runtime.service import Context
from opentinker.shared.state.store import Store
from tests.conftest import Server, free_port, nats_conf, soon
from tests.support.api import OPERATOR_FILE, SPEC, Http, bearing


@dataclass
class Guarded:
    server: Server
    access: Access

    @property
    def websocket(self) -> str:
        assert self.access.websocket is not None
        return self.access.websocket.url


@contextmanager
def guarded_nats(directory: Path, origins: tuple[str, ...] = ()) -> Iterator[Guarded]:
    port = free_port()
    listener = WebSocket(free_port(), origins=origins)
    access = Access(directory / "access", nats_conf(directory, port, sync_interval="2m"), listener)
    server = Server([str(nats_binary()), "-c", str(access.nats_conf)], port, f"nats://127.0.0.1:{port}")
    try:
        yield Guarded(server, access)
    finally:
        server.kill()


@asynccontextmanager
async def guarded_context(
    guarded: Guarded, valkey: Server, store: Store, data_dir: Path, *, streams: bool = True, **more: Any
) -> AsyncIterator[Context]:
    """The surroundings of a scheduler that is a user of NATS. `streams`: the server has JetStream; `more`: settings."""
    settings = Settings(
        nats_url=guarded.server.url,
        nats_password_file=guarded.access.password_file("nats", SCHEDULER),
        nats_issuer_file=guarded.access.folder / "nats-issuer",
        nats_websocket_url=guarded.websocket,
        redis_url=valkey.url,
        data_dir=data_dir,
        http_port=0,
        admin_key_file=OPERATOR_FILE,
        **more,
    )
    password = settings.password("nats_password_file")
    async with Bus.connect(settings.nats_url, "s", SCHEDULER, password) as bus:
        if streams:
            await bus.ensure_streams()
        log = structlog.get_logger()
        yield Context(
            service="scheduler", worker="scheduler-0", settings=settings, bus=bus, store=store, log=log,
        )  # fmt: skip


async def job_of(api: Http, key: str) -> str:
    status, job = await api("POST", "/v1/jobs", json=SPEC, headers=bearing(key))
    assert status == 201, job
    return str(job["id"])


async def given(api: Http, job: str, key: str) -> dict[str, Any]:
    status, body = await api("POST", f"/v1/jobs/{job}/stream-credentials", headers=bearing(key))
    assert status == 201, body
    return dict(body)


class Listener:
    """A connection that counts what it is refused and notes what it hears."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.refused: list[str] = []
        self.heard: list[str] = []
        self.closed = False

    async def listen(self, subject: str) -> None:
        async def hear(message: nats.aio.msg.Msg) -> None:
            self.heard.append(message.subject)

        await self.nc.subscribe(subject, cb=hear)

    async def said(self) -> None:
        """All that was asked so far is answered: the client sends its first ping before what it still holds back."""
        await self.nc.flush(30)
        await self.nc.flush(30)

    def was_refused(self, kind: str, subject: str) -> bool:
        return any(f'permissions violation for {kind} to "{subject.lower()}"' in text.lower() for text in self.refused)


@asynccontextmanager
async def connected(url: str, **login: Any) -> AsyncIterator[Listener]:
    listener = Listener(Client())

    async def report(error: Exception) -> None:
        listener.refused.append(str(error))

    async def over() -> None:
        listener.closed = True

    try:
        await listener.nc.connect(
            url,
            error_cb=report,
            closed_cb=over,
            disconnected_cb=over,
            allow_reconnect=False,
            connect_timeout=30,
            **login,
        )
        yield listener
    finally:
        await listener.nc.close()


async def comes_in(url: str, **login: str) -> bool:
    """In NATS's own words: nats-py takes a server that hangs up for one that lets it in."""
    names = {"token": "auth_token", "user": "user", "password": "pass"}
    told = {"verbose": False, "protocol": 1, **{names[name]: value for name, value in login.items()}}
    words = b"CONNECT " + orjson.dumps(told) + b"\r\nPING\r\n"
    heard = b""
    if url.startswith("ws"):
        async with aiohttp.ClientSession() as session, session.ws_connect(url, protocols=("nats",)) as socket:
            await socket.send_bytes(words)
            while b"PONG" not in heard and (message := await soon(socket.receive())).type is aiohttp.WSMsgType.BINARY:
                heard += message.data
    else:
        reader, writer = await asyncio.open_connection(*url.removeprefix("nats://").split(":"))
        writer.write(words)
        while b"PONG" not in heard and (more := await soon(reader.read(1000))):
            heard += more
        writer.close()
        await writer.wait_closed()
    assert b"PONG" in heard or b"Authorization Violation" in heard or b"Authentication Timeout" in heard, heard
    return b"PONG" in heard
