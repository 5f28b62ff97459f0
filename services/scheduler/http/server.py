"""The HTTP server: collects the routes of all handlers and puts the middlewares in front of them.

http   consumes requests; produces jobs, cancellations, answers read from Redis, NATS and the checkpoint directory
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from opentinker.services.scheduler.artifacts.artifacts_api import ArtifactsApi
from opentinker.services.scheduler.data_rows.rows_api import RowsApi
from opentinker.services.scheduler.diagnosis.diagnosis_api import DiagnosisApi
from opentinker.services.scheduler.environments.check_reports_api import CheckReportsApi
from opentinker.services.scheduler.environments.plays_api import PlaysApi
from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.http.audit import Audit
from opentinker.services.scheduler.http.auth import TOUCHED, AuthMiddleware, mark_unauthenticated
from opentinker.services.scheduler.http.checkpoint_registry import CheckpointRegistryApi
from opentinker.services.scheduler.http.cors import CrossOrigin
from opentinker.services.scheduler.http.dashboard import Page
from opentinker.services.scheduler.http.environments import EnvironmentsApi
from opentinker.services.scheduler.http.errors import BODY_LIMIT, BODY_S, begins, json_response, last_resort, problems
from opentinker.services.scheduler.http.job_history import JobHistoryApi
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.keys import KeysApi
from opentinker.services.scheduler.http.observability import ObservabilityApi
from opentinker.services.scheduler.http.openapi import document, job_schema
from opentinker.services.scheduler.http.publishing import PublishingApi
from opentinker.services.scheduler.http.rate_limit import (
    HEADERS,
    IDLE_S,
    RequestLimiter,
    behind_proxies,
    bound,
    query_check,
    server_log,
)
from opentinker.services.scheduler.http.route_decorator import Route, routes_of
from opentinker.services.scheduler.http.submission_api import SubmissionApi
from opentinker.services.scheduler.http.usage import UsageApi
from opentinker.services.scheduler.http.validate import ValidateApi
from opentinker.services.scheduler.inference.inference_api import InferenceApi
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.services.scheduler.login.oidc_api import OidcApi
from opentinker.services.scheduler.login.sessions_api import SessionsApi
from opentinker.services.scheduler.streams.credentials_api import StreamCredentialsApi
from opentinker.services.scheduler.sweeps.sweeps_api import SweepsApi
from opentinker.services.scheduler.tinker.gateway import TinkerGateway
from opentinker.services.scheduler.tinker.models_api import ModelsApi
from opentinker.shared import api_types
from opentinker.shared.messaging.subjects import STREAMS, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.authorization import Action
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound

log = structlog.get_logger()


class Api:
    def __init__(
        self,
        ctx: Context,
        gate: AuthMiddleware,
        gateway: Gateway,
        replicas: InferenceRouter,
        tinker: TinkerGateway | None = None,
    ) -> None:
        tinker = tinker or TinkerGateway(ctx)
        self.ctx, self.gate, self.gateway = ctx, gate, gateway
        jobs = JobsApi(ctx)
        oidc = OidcApi(ctx, gate)
        publishing = PublishingApi(jobs)
        sweeps = SweepsApi(jobs, publishing)
        self.routes = routes_of(
            jobs,
            JobHistoryApi(jobs),
            InferenceApi(jobs, replicas),
            StreamCredentialsApi(jobs),
            ObservabilityApi(jobs),
            DiagnosisApi(jobs),
            ModelsApi(jobs),
            RowsApi(jobs),
            ArtifactsApi(jobs),
            CheckpointRegistryApi(jobs),
            publishing,
            SubmissionApi(jobs, sweeps),
            sweeps,
            EnvironmentsApi(ctx),
            CheckReportsApi(ctx),
            PlaysApi(ctx),
            gateway,
            KeysApi(ctx),
            SessionsApi(ctx, gate, oidc),
            oidc,
            UsageApi(jobs),
            ValidateApi(ctx),
            *tinker.handlers,
            self,
            Page(ctx.settings.nats_websocket_url),
        )
        self._document: asyncio.Task[dict[str, Any]] | None = None

    def app(self) -> web.Application:
        audit, limiter = Audit(self.ctx), RequestLimiter(self.ctx.settings)
        pages = CrossOrigin(self.ctx.settings.http_origins, self.routes)
        named = behind_proxies(self.ctx.settings.http_proxies)
        before = [last_resort, named, audit.watch, problems, pages.preflight, limiter.guard]
        after = [query_check, audit.begins]
        app = web.Application(middlewares=[*before, self.gate.authenticate, *after], client_max_size=BODY_LIMIT)
        app[BODY_S] = self.ctx.settings.http_body_s
        app.on_response_prepare.extend((begins, pages.allow))
        if not self.ctx.settings.auth:
            app.on_response_prepare.append(mark_unauthenticated)
        app.on_shutdown.append(self._close_gateway)
        for route in self.routes:
            app.router.add_route(route.method, route.pattern, route.handler)
            if route.method == "GET" and route.action is Action.FREE:
                app.router.add_route("HEAD", route.pattern, route.handler)
        return app

    async def _close_gateway(self, _: web.Application) -> None:
        await self.gateway.close()

    @Route("GET", "/v1/workers", Action.SERVER_READ, answer=api_types.Workers)
    async def workers(self, _: web.Request) -> web.Response:
        """List live workers and their leases."""
        leases = {lease.worker: lease for lease in await self.ctx.store.leases()}
        return json_response(
            {
                "workers": [
                    {**msgspec.to_builtins(worker), "lease": msgspec.to_builtins(leases.get(worker.id))}
                    for worker in await self.ctx.store.workers()
                ]
            }
        )

    @Route("POST", "/v1/workers/{worker}/free", Action.SERVER_WRITE, answer=api_types.FreedWorker)
    async def free(self, request: web.Request) -> web.Response:
        """Free a worker by cancelling the job that holds it, of any tenant.

        Raises NotFound if there is no such worker, Conflict if no job holds it, or the job has just ended."""
        worker, store = request.match_info["worker"], self.ctx.store
        lease = await store.lease(worker)
        if lease is None:
            if worker not in {one.id for one in await store.workers()}:
                raise NotFound(f"no worker {worker[:100]!r}")
            raise Conflict(f"no job holds worker {worker}")
        request[TOUCHED] = lease.job
        reason = f"cancelled by an operator of the server, to free {worker}"
        await store.transition(lease.job, JobState.CANCELLED, reason=reason)
        await self.ctx.bus.emit(WAKE, {"job": lease.job}, who="scheduler")
        log.info("worker_freed", freed=worker, cancelled=lease.job)
        return json_response({"worker": worker, "job": lease.job, "state": JobState.CANCELLED.value})

    @Route("GET", "/v1/queues", Action.SERVER_READ, answer=api_types.Queues)
    async def queues(self, _: web.Request) -> web.Response:
        """List message streams and their depths."""
        queues: list[api_types.Queue] = []
        for stream in STREAMS:
            assert stream.name is not None
            info = await self.ctx.bus.js.stream_info(stream.name, subjects_filter=">")
            queues.append(
                {
                    "stream": stream.name,
                    "messages": info.state.messages,
                    "bytes": info.state.bytes,
                    "consumers": info.state.consumer_count,
                    "subjects": info.state.subjects or {},
                }
            )
        return json_response({"queues": queues})

    @Route("GET", "/healthz", Action.FREE, answer=api_types.Health)
    async def healthz(self, _: web.Request) -> web.Response:
        """Liveness check."""
        auth = "on" if self.ctx.settings.auth else "off"
        return json_response({"status": "ok", "service": self.ctx.service, "worker": self.ctx.worker, "auth": auth})

    @Route("GET", "/readyz", Action.FREE, answer=api_types.Readiness)
    async def readyz(self, _: web.Request) -> web.Response:
        """Readiness check."""
        ready = self.ctx.is_ready and self.ctx.bus.nc.is_connected and not self.ctx.stopping.is_set()
        return json_response({"ready": ready, "nats": self.ctx.bus.nc.is_connected}, status=200 if ready else 503)

    @Route("GET", "/metrics", Action.SERVER_READ, content="text/plain")
    async def prometheus(self, _: web.Request) -> web.Response:
        """Metrics in the Prometheus text format."""
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @Route("GET", "/openapi.json", Action.ABOUT)
    async def openapi(self, _: web.Request) -> web.Response:
        """This OpenAPI document.

        It is generated once, at the first request, because that takes as long as a
        hundred requests, and never by two threads, because the generator is not thread-safe."""
        if self._document is None:
            self._document = asyncio.create_task(asyncio.to_thread(document, self.routes))
        return json_response(await asyncio.shield(self._document))

    @Route("GET", "/v1/schema/job.json", Action.FREE)
    async def job_schema(self, _: web.Request) -> web.Response:
        """JSON schema of a job spec, for editors."""
        return json_response(job_schema())


@contextlib.asynccontextmanager
async def listening(
    ctx: Context, gate: AuthMiddleware, gateway: Gateway, replicas: InferenceRouter, tinker: TinkerGateway
) -> AsyncIterator[int]:
    """Serve while the block runs; gives the port. A port that is taken is an error of the process."""
    runner = web.AppRunner(
        Api(ctx, gate, gateway, replicas, tinker).app(),
        access_log=None,
        shutdown_timeout=2.0,
        keepalive_timeout=IDLE_S,
        logger=server_log(),
        auto_decompress=False,  # a small body may be a large one: guard() refuses what is compressed
        **HEADERS,
    )
    await runner.setup()
    assert runner.server is not None
    bound(runner.server, ctx.settings.http_connections, ctx.settings.http_connections_per_address)
    try:
        site = web.TCPSite(runner, ctx.settings.http_host, ctx.settings.http_port)
        await site.start()
        addresses: list[Any] = runner.addresses
        port = int(addresses[0][1])
        ctx.detail["http_port"] = port
        log.info("listening", url=f"http://{ctx.settings.http_host}:{port}")
        yield port
    finally:
        await runner.cleanup()
