"""Connects environments that users serve: requests of rollout workers on NATS go to a process behind a WebSocket, and
back.

    connect   consumes WebSockets of `opentinker env serve`; serves SERVED_OPEN, SERVED_CHECK for their name, and
              ENV_STEP, ENV_CLOSE at the address of each process; woken by frames
    run       produces the heartbeats of these processes, so that they are seen like env workers

A process keeps its address with any scheduler and through broken connections: it identifies itself by a random name
that only it knows. While it is away its turns wait; after `away_s` they are lost. Opens go to connected processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import nats.errors
import structlog
from aiohttp import WSCloseCode, web
from prometheus_client import Gauge

from opentinker.services.scheduler.environments.served_process import ServedProcess
from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response, problem
from opentinker.services.scheduler.http.route_decorator import Route
from opentinker.shared import api_types
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.messaging.websocket_frames import (
    FRAME_BYTES,
    GOODBYE,
    HEARTBEAT_S,
    Asker,
    BadFrame,
    ConnectionLost,
    Hello,
    Welcome,
    greet,
    refuse,
)  # fmt: skip
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.authorization import Action
from opentinker.shared.types import codec
from opentinker.shared.types.core import Pool
from opentinker.shared.types.env_protocol import AWAY_S, SERVED, SERVED_WORKER
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.workers import WorkerInfo

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_PROCESSES = 1000
"""Connected to one scheduler."""

log = structlog.get_logger()
CONNECTED = Gauge("opentinker_served_processes", "Connected processes that serve environments", registry=REGISTRY)


class Gateway:
    """`max_known`: processes, with those that are away."""

    def __init__(
        self,
        ctx: Context,
        away_s: float = AWAY_S,
        heartbeat_s: float = HEARTBEAT_S,
        max_known: int = 2 * MAX_PROCESSES,
    ) -> None:
        self.ctx, self.away_s, self.heartbeat_s, self.max_known = ctx, away_s, heartbeat_s, max_known
        self.closing = False
        self._served: dict[str, ServedProcess] = {}
        """By address; also those that are away."""
        self._sockets: set[web.WebSocketResponse] = set()

    @Route("GET", "/v1/served/{name}", Action.ENVIRONMENTS_SERVE, status=101, content="application/octet-stream")
    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Serve an environment under this name (WebSocket)."""
        tenant, name = tenant_of(request), request.match_info["name"]
        if not NAME.fullmatch(name):
            problem_ = "must be up to 64 letters, digits and -_. and begin with a letter or digit"
            raise SpecError.of("name", name[:100], problem_)
        if "Origin" in request.headers:
            return problem(403, "a web page may not serve environments", title="Forbidden")
        socket = web.WebSocketResponse(
            heartbeat=self.heartbeat_s, max_msg_size=FRAME_BYTES, compress=False, timeout=2.0
        )
        if not socket.can_prepare(request).ok:
            return problem(426, "this route is a WebSocket; use opentinker env serve", title="Upgrade required")
        if self.closing or len(self._sockets) >= MAX_PROCESSES:
            return problem(503, "too many connections; retry later", title="Unavailable")
        await socket.prepare(request)
        self._sockets.add(socket)
        CONNECTED.set(len(self._sockets))
        try:
            await self._converse(socket, tenant, name, request.remote or "")
        finally:
            self._sockets.discard(socket)
            CONNECTED.set(len(self._sockets))
            await socket.close()
        return socket

    async def _converse(self, socket: web.WebSocketResponse, tenant: str, name: str, remote: str) -> None:
        """Talk to a serving process from its Hello to the end of the connection."""
        try:
            hello = await greet(socket)
        except ConnectionLost:
            return
        except BadFrame as error:
            log.warning("served_environment_refused", environment=name, remote=remote, reason=str(error))
            await refuse(socket, error)
            return
        served = self._of(tenant, name, hello)
        if served is None or not await self._welcome(served, hello, socket):
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return
        facts = {"environment": served.environment, "worker": served.address, "remote": remote}
        log.info("served_environment_connected", capacity=hello.capacity, **facts)
        asker, reason = Asker(socket), ""
        served.attach(asker, socket)
        try:
            await asker.run()
        except BadFrame as error:
            reason = str(error)
        finally:
            over = socket.close_code == GOODBYE
            await served.detach(asker, for_good=over)
            if over and served.gone:
                await self.ctx.store.leave(self._info(served))
            log.info("served_environment_disconnected", code=socket.close_code, reason=reason, **facts)

    async def _welcome(self, served: ServedProcess, hello: Hello, socket: web.WebSocketResponse) -> bool:
        """Return whether the connection is accepted; if so, `served` counts it as coming until it is attached."""
        served.claim(hello)
        why = "another scheduler has it"
        try:
            await served.take_over()
            if not served.gone:
                await socket.send_bytes(codec.encode(Welcome(worker=served.address)))
                why = "" if not served.gone else why
        except (TimeoutError, nats.errors.Error, ConnectionError, RuntimeError) as error:  # aiohttp: closing, or closed
            why = str(error) or type(error).__name__
        except BaseException:
            await served.abandon()
            raise
        if why:
            log.info("served_environment_rejected", environment=served.environment, worker=served.address, reason=why)
            await served.abandon()
        return not why

    def _of(self, tenant: str, name: str, hello: Hello) -> ServedProcess | None:
        """Return the process that sent a Hello; None if there are too many."""
        digest = hashlib.sha256("\0".join((tenant, name, hello.process)).encode()).hexdigest()[:20]
        address = SERVED_WORKER + digest
        served = self._served.get(address)
        if served is None and len(self._served) < self.max_known:
            served = ServedProcess(self.ctx, address, SERVED + name, tenant, self._served.pop, self.away_s)
            self._served[address] = served
        return served

    # --- what is seen of them -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Say that they live, as every worker does for itself."""
        while True:
            for served in list(self._served.values()):
                if served.connected:
                    await self.ctx.store.beat(self._info(served), self.ctx.settings.worker_ttl_s)
            await sleep(self.ctx.settings.heartbeat_s)

    def _info(self, served: ServedProcess) -> WorkerInfo:
        detail = {
            "served": served.environment,
            "tenant": served.tenant,
            "class": served.hello.environment,
            "sessions": served.sessions,
            "capacity": served.hello.capacity,
        }
        return WorkerInfo(
            id=served.address,
            incarnation=served.address,
            pool=Pool.ENV,
            host=served.hello.host,
            pid=0,
            status="ready",
            detail=detail,
        )

    @Route("GET", "/v1/served", Action.ENVIRONMENTS_READ, answer=api_types.ServedEnvironments)
    async def list(self, request: web.Request) -> web.Response:
        """List environments served by users.

        The list covers all schedulers."""
        found: dict[str, dict[str, Any]] = {}
        for worker in await self.ctx.store.workers():
            environment = worker.detail.get("served")
            if environment is None or worker.detail["tenant"] != tenant_of(request):
                continue
            of_name = {"environment": environment, "processes": 0, "sessions": 0, "capacity": 0, "classes": []}
            entry = found.setdefault(environment, of_name)
            entry["processes"] += 1
            entry["sessions"] += worker.detail["sessions"]
            entry["capacity"] += worker.detail["capacity"]
            entry["classes"] = sorted({*entry["classes"], worker.detail["class"]})
        return json_response({"served": [found[environment] for environment in sorted(found)]})

    async def close(self) -> None:
        """Close all connections: processes reconnect to the next scheduler, or to this one after its restart."""
        self.closing = True
        await asyncio.gather(*(served.release() for served in list(self._served.values())))
        await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in list(self._sockets)))
