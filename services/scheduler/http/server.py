"""The HTTP server: routes, their table (which is also the OpenAPI document), and who is asking.

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

from opentinker.services.scheduler.environments.served_gateway import Gateway
from opentinker.services.scheduler.http.artifact_routes import artifact_routes
from opentinker.services.scheduler.http.audit import Audit
from opentinker.services.scheduler.http.auth import TOUCHED, AuthMiddleware, say_open
from opentinker.services.scheduler.http.cors import CrossOrigin
from opentinker.services.scheduler.http.dashboard import Page
from opentinker.services.scheduler.http.environments import EnvironmentsApi
from opentinker.services.scheduler.http.errors import BODY_LIMIT, begins, json_response, last_resort, problems
from opentinker.services.scheduler.http.inference import InferenceApi
from opentinker.services.scheduler.http.job_routes import LIMIT_JOBS, job_routes
from opentinker.services.scheduler.http.jobs import JobsApi
from opentinker.services.scheduler.http.keys import KeysApi, NewKey, Rotation
from opentinker.services.scheduler.http.openapi import Parameter, Route, document
from opentinker.services.scheduler.http.rate_limit import HEADERS, IDLE_S, RequestLimiter, bound, server_log
from opentinker.services.scheduler.http.usage import MOST_DAYS, UsageApi
from opentinker.services.scheduler.http.validate import ValidateApi
from opentinker.services.scheduler.inference.router import InferenceRouter
from opentinker.shared import api_types
from opentinker.shared.messaging.subjects import STREAMS, WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.runtime.telemetry import REGISTRY
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import JobState
from opentinker.shared.types.errors import Conflict, NotFound

log = structlog.get_logger()

BY = Parameter("by", "query", "`job` (the default: the newest ones), `day` or `key`.")
FIRST = Parameter("from", "query", "With `day`: the first one, YYYY-MM-DD; default: the last 30.")
LAST_DAY = Parameter("to", "query", f"With `day`: the last one; at most {MOST_DAYS} days.")
USED_JOB = Parameter("job", "query", "With `job`: this one alone.")
NAME = Parameter("name", "query", "Of the environment; default: the one that the package gives itself.")
TENANT = Parameter("tenant", "query", "Of operators: another tenant's; default: your own.")
VERSION = Parameter("version", "query", "Only this version; default: all of them.", "integer")


class Api:
    def __init__(self, ctx: Context, gate: AuthMiddleware, gateway: Gateway, replicas: InferenceRouter) -> None:
        self.ctx, self.gate, self.gateway = ctx, gate, gateway
        jobs = JobsApi(ctx)
        environments = EnvironmentsApi(ctx)
        keys = KeysApi(ctx)
        usage, page = UsageApi(jobs), Page(ctx.settings.nats_websocket_url)
        env = "/v1/environments"
        self.routes = [
            *job_routes(jobs, InferenceApi(jobs, replicas)),
            *artifact_routes(jobs),
            Route(
                "POST",
                env,
                environments.push,
                Action.ENVIRONMENTS_WRITE,
                "Push an environment",
                201,
                (NAME,),
                takes="application/x-tar",
                answer=api_types.PushedEnvironment,
            ),
            Route(
                "GET",
                env,
                environments.list,
                Action.ENVIRONMENTS_READ,
                "Your environments, with their newest versions",
                answer=api_types.Environments,
            ),
            Route(
                "GET",
                env + "/{name}",
                environments.get,
                Action.ENVIRONMENTS_READ,
                "One environment: its versions, oldest first",
                answer=api_types.Environment,
            ),
            Route(
                "DELETE",
                env + "/{name}",
                environments.delete,
                Action.ENVIRONMENTS_WRITE,
                "Delete an environment",
                200,
                (VERSION,),
                answer=api_types.DeletedEnvironment,
            ),
            Route(
                "GET",
                "/v1/served",
                gateway.list,
                Action.ENVIRONMENTS_READ,
                "Environments that their users serve",
                answer=api_types.ServedEnvironments,
            ),
            Route(
                "GET",
                "/v1/served/{name}",
                gateway.connect,
                Action.ENVIRONMENTS_SERVE,
                "A WebSocket: serve an environment under this name",
                101,
                content="application/octet-stream",
            ),
            Route(
                "POST",
                "/v1/keys",
                keys.create,
                Action.KEYS_WRITE,
                "Make a key; shows it, once",
                201,
                body=NewKey,
                answer=api_types.MadeKey,
            ),
            Route(
                "GET",
                "/v1/keys",
                keys.list,
                Action.KEYS_READ,
                "Keys, oldest first; no secrets",
                200,
                (TENANT,),
                answer=api_types.Keys,
            ),
            Route(
                "POST",
                "/v1/keys/{id}/rotate",
                keys.rotate,
                Action.KEYS_WRITE,
                "Give a key a new secret; shows it, once",
                body=Rotation,
                answer=api_types.MadeKey,
            ),
            Route(
                "POST",
                "/v1/keys/{id}/revoke",
                keys.revoke,
                Action.KEYS_WRITE,
                "A key opens nothing any more",
                answer=api_types.Key,
            ),
            Route(
                "GET",
                "/v1/whoami",
                keys.whoami,
                Action.ABOUT,
                "Whose key this is, and what it may",
                answer=api_types.WhoAmI,
            ),
            Route(
                "GET",
                "/v1/tenants",
                keys.tenants,
                Action.SERVER_READ,
                "Tenants that have had a key",
                answer=api_types.Tenants,
            ),
            Route(
                "GET",
                "/v1/usage",
                usage.usage,
                Action.JOBS_READ,
                "What your jobs cost",
                200,
                (BY, FIRST, LAST_DAY, USED_JOB, LIMIT_JOBS),
                answer=api_types.Usage,
            ),
            Route(
                "POST",
                "/v1/validate",
                ValidateApi(ctx).validate,
                Action.JOBS_WRITE,
                "Look at a spec as if it were submitted, play an episode of it, and submit nothing",
                body=JobSpec,
                answer=api_types.Validation,
            ),
            Route(
                "GET",
                "/v1/workers",
                self.workers,
                Action.SERVER_READ,
                "Live workers and what they are leased to",
                answer=api_types.Workers,
            ),
            Route(
                "POST",
                "/v1/workers/{worker}/free",
                self.free,
                Action.SERVER_WRITE,
                "Cancel the job that holds a worker, whosever it is",
                answer=api_types.FreedWorker,
            ),
            Route(
                "GET",
                "/v1/queues",
                self.queues,
                Action.SERVER_READ,
                "Depth of every message stream",
                answer=api_types.Queues,
            ),
            Route("GET", "/healthz", self.healthz, Action.FREE, "The process turns", answer=api_types.Health),
            Route("GET", "/readyz", self.readyz, Action.FREE, "The process can work", answer=api_types.Readiness),
            Route("GET", "/metrics", self.prometheus, Action.SERVER_READ, "Prometheus text", content="text/plain"),
            Route("GET", "/openapi.json", self.openapi, Action.ABOUT, "This document"),
            Route("GET", "/", page.index, Action.FREE, "The dashboard", content="text/html"),
            Route("GET", "/page/{name}", page.part, Action.FREE, "What it loads", content="text/javascript"),
        ]

        self._document: asyncio.Task[dict[str, Any]] | None = None

    def app(self) -> web.Application:
        known = {(r.method, r.path): {p.name for p in r.parameters if p.place == "query"} for r in self.routes}
        free = {r.path for r in self.routes if r.action is Action.FREE}
        audit = Audit(self.ctx)
        guard = RequestLimiter(self.ctx.settings, free, known)
        pages = CrossOrigin(self.ctx.settings.http_origins, self.routes)
        before = [last_resort, audit.over(self.routes), problems, pages.preflight, guard.guard]
        app = web.Application(
            middlewares=[*before, self.gate.before(self.routes), audit.begins], client_max_size=BODY_LIMIT
        )
        app.on_response_prepare.extend((begins, pages.allow))
        if not self.ctx.settings.auth:
            app.on_response_prepare.append(say_open)
        app.on_shutdown.append(self._let_go)
        for route in self.routes:
            app.router.add_route(route.method, route.pattern, route.handler)
            if route.method == "GET" and route.action is Action.FREE:
                app.router.add_route("HEAD", route.pattern, route.handler)
        return app

    async def _let_go(self, _: web.Application) -> None:
        await self.gateway.close()

    async def workers(self, _: web.Request) -> web.Response:
        leases = {lease.worker: lease for lease in await self.ctx.store.leases()}
        return json_response(
            {
                "workers": [
                    {**msgspec.to_builtins(worker), "lease": msgspec.to_builtins(leases.get(worker.id))}
                    for worker in await self.ctx.store.workers()
                ]
            }
        )

    async def free(self, request: web.Request) -> web.Response:
        """Raises NotFound if there is no such worker, Conflict if no job holds it, or the job has just ended."""
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

    async def queues(self, _: web.Request) -> web.Response:
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

    async def healthz(self, _: web.Request) -> web.Response:
        auth = "on" if self.ctx.settings.auth else "off"
        return json_response({"status": "ok", "service": self.ctx.service, "worker": self.ctx.worker, "auth": auth})

    async def readyz(self, _: web.Request) -> web.Response:
        ready = self.ctx.is_ready and self.ctx.bus.nc.is_connected and not self.ctx.stopping.is_set()
        return json_response({"ready": ready, "nats": self.ctx.bus.nc.is_connected}, status=200 if ready else 503)

    async def prometheus(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: web.Request) -> web.Response:
        """Return the OpenAPI document. It is generated once, at the first request, because that takes as long as a
        hundred requests, and never by two threads, because the generator is not thread-safe."""
        if self._document is None:
            self._document = asyncio.create_task(asyncio.to_thread(document, self.routes))
        return json_response(await asyncio.shield(self._document))


@contextlib.asynccontextmanager
async def listening(
    ctx: Context, gate: AuthMiddleware, gateway: Gateway, replicas: InferenceRouter
) -> AsyncIterator[int]:
    """Serve while the block runs; gives the port. A port that is taken is an error of the process."""
    runner = web.AppRunner(
        Api(ctx, gate, gateway, replicas).app(),
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
