"""Common parts of every service process: settings, logs, bus and store, health, named tasks, drain on SIGTERM.

A service is one coroutine `serve(ctx)`. It returns after `ctx.stopping` is set; if it returns or raises before, the
process ends with an error and its supervisor starts it again: a service failure is a crash, never a silent half-life.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import nats.errors
import orjson
import structlog
import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from opentinker.shared.asyncio_tools import cancel_and_wait, sleep
from opentinker.shared.config import Settings, worker_name
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.permissions import streams_of
from opentinker.shared.messaging.subjects import SCHEDULER
from opentinker.shared.runtime import reexec
from opentinker.shared.runtime.job_logs import JobLogs
from opentinker.shared.runtime.telemetry import REGISTRY, configure_logging
from opentinker.shared.runtime.tenant_threads import TenantThreads
from opentinker.shared.runtime.tracing import Tracer
from opentinker.shared.settings_sources import PREFIX, load_settings
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import OpenTinkerError, SpecError

LIVENESS_S = 5.0
LIVENESS_FAILURES = 3
DRAIN_EXTRA_S = 3.0
"""Additional time after `drain_s` for releasing unfinished work."""
DISK_THREADS = 8
COPY_THREADS = 16
TENANT_COPIES = 2
"""Copies of one tenant at a time."""
FLUSH_TIMEOUT_S = 1.0
"""Time for shipping a job's log lines before the process re-executes itself."""


async def _is_no_process(_: Sequence[str]) -> NoReturn:
    raise OpenTinkerError(
        "work that cannot be interrupted needs a new process, and this service has no process to itself"
    )


@dataclass
class Context:
    """Opened at the edge, passed down. `worker` is the stable name of this slot."""

    service: str
    worker: str
    settings: Settings
    bus: Bus
    store: Store
    log: structlog.stdlib.BoundLogger
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    tracer: Tracer = field(default_factory=lambda: Tracer("none", {}))
    is_ready: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    """Shown by /readyz."""
    disk: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, DISK_THREADS, "disk"))
    """For calls on file systems that may hang, which hold up nothing else."""
    disk_s: float = 10.0
    """Time limit of such a call."""
    copies: TenantThreads = field(default_factory=partial(TenantThreads, COPY_THREADS, TENANT_COPIES, "copies"))
    """For copies of large files, which hold up no checks."""
    copy_s: float = 600.0
    """Time limit of the copies of a job, which may be gigabytes, from the beginning of the first."""
    copy_wait_s: float = 60.0
    """Time in which a thread must be free for them."""
    begin_anew: Callable[[Sequence[str]], Awaitable[NoReturn]] = _is_no_process
    """Ends all work of this process and re-executes it; see reexec.py for the argument. If the service is stopping, it
    exits for good."""

    def ready(self) -> None:
        self.is_ready = True
        self.log.info("ready")


async def first_failure(tasks: dict[str, Coroutine[Any, Any, Any]]) -> None:
    """Run named tasks until one of them ends; cancel the rest and raise what it raised. Returns if it returned."""
    running = [asyncio.create_task(coroutine, name=name) for name, coroutine in tasks.items()]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*running)
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def main(service: str, serve: Callable[[Context], Awaitable[None]]) -> None:
    """Entry point of a service process: `python -m opentinker.services.<name> [--config FILE]`."""
    parser = argparse.ArgumentParser(prog=f"python -m opentinker.services.{service.replace('-', '_')}")
    parser.add_argument("--config", help="settings file (TOML); OPENTINKER_* environment variables override it")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ["OPENTINKER_CONFIG"] = arguments.config  # environments that read settings read the same
    environment = dict(os.environ)  # libraries add to it later
    try:
        settings = load_settings(arguments.config)
        settings.secrets(service)
    except SpecError as error:
        for mistake in error.mistakes:
            sys.stderr.write(f"{mistake['field']} = {mistake['value']!r}: {mistake['problem']}\n")
        sys.exit(2)
    code = 1
    try:
        uvloop.run(run(service, serve, settings, environment))
        code = 0
    finally:
        # Native libraries leave threads behind that hang interpreter shutdown; everything of ours is closed by now.
        if code:
            structlog.get_logger().critical("crashed", exc_info=sys.exc_info())
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def _unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors that the event loop would otherwise print to stderr, outside the log's format."""
    error = context.get("exception")
    # from a lookup that took longer than its connect, which has reported it already
    if isinstance(error, socket.gaierror):
        return
    structlog.get_logger().error("unhandled", error=context["message"], exc_info=error)


async def run(
    service: str, serve: Callable[[Context], Awaitable[None]], settings: Settings, environment: Mapping[str, str]
) -> None:
    """One life of a service. Returns after SIGTERM or SIGINT; raises when the service failed.

    `environment`: that of the next life, if this one ends by `Context.begin_anew`."""
    worker = worker_name(settings, service)
    logs = JobLogs()
    configure_logging(settings, service, worker, logs)
    log = structlog.get_logger()
    log.info("starting", pid=os.getpid())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_unhandled)
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stopping.set)
    serving = asyncio.Event()

    async def begin_anew(bus: Bus, left: Sequence[str]) -> NoReturn:
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await logs.send(bus)
                await bus.nc.flush()
        _flush()
        argv = [] if stopping.is_set() else reexec.own_argv()
        reexec.begin_anew(left, argv, {**environment, f"{PREFIX}WORKER_ID": worker})

    life = asyncio.create_task(_live(service, worker, serve, settings, logs, stopping, serving, begin_anew))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            # Before `serve` began there is nothing to finish: the servers we wait for may never come.
            await asyncio.wait([life], timeout=settings.drain_s + DRAIN_EXTRA_S if serving.is_set() else 0.0)
        if life.done():
            life.result()
        elif serving.is_set():
            log.warning("drain_cut_short", drain_s=settings.drain_s)
    finally:
        await cancel_and_wait(life, stop)
    log.info("stopped")


async def _live(
    service: str,
    worker: str,
    serve: Callable[[Context], Awaitable[None]],
    settings: Settings,
    logs: JobLogs,
    stopping: asyncio.Event,
    serving: asyncio.Event,
    begin_anew: Callable[[Bus, Sequence[str]], Awaitable[NoReturn]],
) -> None:
    nats_password, redis_password = settings.password("nats_password_file"), settings.password("redis_password_file")
    async with (
        _tracing(service) as tracer,
        Bus.connect(settings.nats_url, worker, service, nats_password) as bus,
        Store.connect(settings.redis_url, worker, service, redis_password) as store,
    ):
        log = structlog.get_logger()
        ctx = Context(
            service=service,
            worker=worker,
            settings=settings,
            bus=bus,
            store=store,
            log=log,
            stopping=stopping,
            tracer=tracer,
            begin_anew=partial(begin_anew, bus),
        )
        if service == SCHEDULER:
            await bus.ensure_streams(settings.nats_replicas)
        else:
            await bus.await_streams(streams_of(service))
        async with _health(ctx):
            serving.set()
            try:
                await first_failure({"serve": _serve(ctx, serve), "liveness": _liveness(ctx), "logs": logs.run(bus)})
            finally:
                await logs.send(bus)


@contextlib.asynccontextmanager
async def _tracing(service: str) -> AsyncIterator[Tracer]:
    tracer = Tracer(service)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


async def _serve(ctx: Context, serve: Callable[[Context], Awaitable[None]]) -> None:
    await serve(ctx)
    if not ctx.stopping.is_set():
        raise OpenTinkerError(f"{ctx.service} ended without being told to")


async def _liveness(ctx: Context) -> None:
    """A connection that says it is up but does not answer is restarted from outside: end the process."""
    failures = 0
    while True:
        await sleep(LIVENESS_S)
        try:
            await ctx.bus.js.account_info()
            failures = 0
        except (TimeoutError, nats.errors.Error):
            failures = failures + 1 if ctx.bus.nc.is_connected else 0
            if failures >= LIVENESS_FAILURES:
                raise OpenTinkerError("NATS is connected but JetStream does not answer") from None


@contextlib.asynccontextmanager
async def _health(ctx: Context) -> Any:
    """/healthz: the event loop turns; /readyz: the service can work; /metrics: Prometheus text."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "service": ctx.service, "worker": ctx.worker})

    async def readyz(_: web.Request) -> web.Response:
        ready = ctx.is_ready and ctx.bus.nc.is_connected and not ctx.stopping.is_set()
        body = {"ready": ready, "nats": ctx.bus.nc.is_connected, "stopping": ctx.stopping.is_set(), **ctx.detail}
        return web.Response(body=orjson.dumps(body), status=200 if ready else 503, content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, ctx.settings.health_host, ctx.settings.health_port)
    await site.start()
    host, port = runner.addresses[0][:2]
    ctx.log.info("health", host=host, port=port)
    try:
        yield
    finally:
        await runner.cleanup()
