"""The HTTP server: routes, their table (which is also the OpenAPI document), and who is asking.

http   consumes requests; produces jobs, cancellations, answers read from Redis, NATS and the checkpoint directory
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from opentinker.services.scheduler.artifact_routes import artifact_routes
from opentinker.services.scheduler.audit import Audit
from opentinker.services.scheduler.environments_api import EnvironmentsApi
from opentinker.services.scheduler.gate import Gate, say_open
from opentinker.services.scheduler.gateway import Gateway
from opentinker.services.scheduler.inference_api import InferenceApi
from opentinker.services.scheduler.jobs_api import MOST_FAILURES, MOST_JOBS, JobsApi
from opentinker.services.scheduler.keys_api import KeysApi, NewKey, Rotation
from opentinker.services.scheduler.knowing_api import MOST_LINES, KnowingApi
from opentinker.services.scheduler.limits import HEADERS, IDLE_S, Guard, bound, server_log
from opentinker.services.scheduler.openapi import Parameter, Route, document
from opentinker.services.scheduler.page import Page
from opentinker.services.scheduler.problems import BODY_LIMIT, begins, json_response, problems
from opentinker.services.scheduler.replicas import Replicas
from opentinker.services.scheduler.streams_api import StreamsApi
from opentinker.services.scheduler.usage_api import MOST_DAYS, UsageApi
from opentinker.services.scheduler.validating import Validating
from opentinker.shared.authority import Action
from opentinker.shared.service import Context
from opentinker.shared.spec import JobSpec
from opentinker.shared.subjects import STREAMS
from opentinker.shared.telemetry import REGISTRY
from opentinker.shared.types import LEVELS

log = structlog.get_logger()

KEY = Parameter(
    "Idempotency-Key", "header", "Any text of up to 200 characters: the same key and spec make one job, for 24 h."
)
BEFORE_JOB = Parameter("before", "query", "Only jobs made before this one: the cursor of the last answer.")
LIMIT_JOBS = Parameter("limit", "query", f"Jobs per answer, up to {MOST_JOBS}.", "integer")
LIMIT_FAILURES = Parameter("limit", "query", f"The newest so many, up to {MOST_FAILURES}.", "integer")
AFTER_EVENT = Parameter("after", "query", "Only events after this id; `Last-Event-ID` means the same.")
FORMAT = Parameter("format", "query", "`json`: what there is now as one list, instead of a stream.")
AFTER_POINT = Parameter("after", "query", "Only points after this cursor.", "integer")
AFTER_PART = Parameter("after", "query", "Only parts after this cursor.", "integer")
LAST_S = Parameter("last_s", "query", "Only those of the last so many seconds.", "integer")
LIMIT = Parameter("limit", "query", "Points, lines, or parts per answer.", "integer")
SOURCE = Parameter("source", "query", "Only points of this source, e.g. `trainer`.")
NAMES = Parameter("names", "query", "Only these values, comma separated.")
STEP = Parameter("step", "query", "Of this evaluation; default: the newest.", "integer")
TRAINED = Parameter("step", "query", "That trained on it; default: the newest.", "integer")
AFTER_STEP = Parameter("after", "query", "Only steps after this one.", "integer")
STEPS = Parameter("limit", "query", "The newest so many steps; default: 1.", "integer")
AFTER_LINE = Parameter("after", "query", "Only lines after this cursor; `Last-Event-ID` means the same.", "integer")
LEVEL = Parameter("level", "query", f"And graver lines: one of {', '.join(LEVELS)}.")
LAST = Parameter("last", "query", f"Only the last so many of the lines that there are, up to {MOST_LINES}.", "integer")

BY = Parameter("by", "query", "`job` (the default: the newest ones), `day` or `key`.")
FIRST = Parameter("from", "query", "With `day`: the first one, YYYY-MM-DD; default: the last 30.")
LAST_DAY = Parameter("to", "query", f"With `day`: the last one; at most {MOST_DAYS} days.")
USED_JOB = Parameter("job", "query", "With `job`: this one alone.")
NAME = Parameter("name", "query", "Of the environment; default: the one that the package gives itself.")
TENANT = Parameter("tenant", "query", "Of operators: another tenant's; default: your own.")
VERSION = Parameter("version", "query", "Only this version; default: all of them.", "integer")


class Api:
    def __init__(self, ctx: Context, gate: Gate, gateway: Gateway, replicas: Replicas) -> None:
        self.ctx, self.gate, self.gateway = ctx, gate, gateway
        jobs = JobsApi(ctx)
        inference = InferenceApi(jobs, replicas)
        environments = EnvironmentsApi(ctx)
        keys = KeysApi(ctx)
        knowing, usage, page = KnowingApi(jobs), UsageApi(jobs), Page(ctx.settings.nats_websocket_url)
        get = "/v1/jobs/{id}"
        openai = get + "/v1"
        json = "application/json"
        env = "/v1/environments"
        self.routes = [
            Route("POST", "/v1/jobs", jobs.create, Action.JOBS_WRITE, "Submit a job", 201, (KEY,), body=JobSpec),
            Route(
                "GET", "/v1/jobs", jobs.list, Action.JOBS_READ, "Your jobs, newest first", 200, (BEFORE_JOB, LIMIT_JOBS)
            ),
            Route("GET", get, jobs.get, Action.JOBS_READ, "One job: state, ledger, workers, last metrics"),
            Route("POST", get + "/cancel", jobs.cancel, Action.JOBS_WRITE, "Cancel a job in any state"),
            Route(
                "POST",
                get + "/pause",
                jobs.pause,
                Action.JOBS_WRITE,
                "Save what it has trained and free its workers",
            ),
            Route(
                "POST",
                get + "/resume",
                jobs.resume,
                Action.JOBS_WRITE,
                "Queue a paused job again; it goes on from its checkpoint",
            ),
            Route(
                "POST", get + "/complete", jobs.complete, Action.JOBS_WRITE, "End an inference job: it has succeeded"
            ),
            Route(
                "GET",
                openai + "/models",
                inference.models,
                Action.INFERENCE_USE,
                "OpenAI: what an inference job serves",
            ),
            Route(
                "POST",
                openai + "/chat/completions",
                inference.chat,
                Action.INFERENCE_USE,
                "OpenAI: chat, streamed or not",
                takes=json,
            ),
            Route(
                "POST",
                openai + "/completions",
                inference.completions,
                Action.INFERENCE_USE,
                "OpenAI: text or token ids",
                takes=json,
            ),
            Route(
                "GET",
                get + "/events",
                jobs.events,
                Action.JOBS_READ,
                "The job's log, as server-sent events",
                200,
                (AFTER_EVENT, FORMAT),
            ),
            Route(
                "GET",
                get + "/metrics",
                jobs.metrics,
                Action.JOBS_READ,
                "Metrics history",
                200,
                (AFTER_POINT, LIMIT, SOURCE, NAMES),
            ),
            Route(
                "GET",
                get + "/transcripts",
                jobs.transcripts,
                Action.JOBS_READ,
                "Kept validation episodes",
                200,
                (STEP,),
            ),
            Route(
                "POST",
                get + "/stream-credentials",
                StreamsApi(jobs).give,
                Action.JOBS_READ,
                "A token to hear the job live on NATS, for a while; shows it, once",
                201,
            ),
            Route(
                "GET",
                get + "/logs",
                knowing.logs,
                Action.JOBS_READ,
                "What all services said about the job",
                200,
                (AFTER_LINE, LEVEL, LAST, LIMIT, FORMAT),
            ),
            Route(
                "GET", get + "/rollouts", knowing.rollouts, Action.JOBS_READ, "Kept training episodes", 200, (TRAINED,)
            ),
            Route(
                "GET",
                get + "/distributions",
                knowing.distributions,
                Action.JOBS_READ,
                "How a step's rewards, lengths, turns, staleness and importance ratios are spread",
                200,
                (TRAINED, AFTER_STEP, STEPS),
            ),
            Route(
                "GET",
                get + "/timeline",
                knowing.timeline,
                Action.JOBS_READ,
                "What its workers were busy with, second by second",
                200,
                (AFTER_PART, LAST_S, LIMIT),
            ),
            Route(
                "GET",
                get + "/failures",
                jobs.failures,
                Action.JOBS_READ,
                "Groups that failed for good",
                200,
                (LIMIT_FAILURES,),
            ),
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
            ),
            Route(
                "GET", env, environments.list, Action.ENVIRONMENTS_READ, "Your environments, with their newest versions"
            ),
            Route(
                "GET",
                env + "/{name}",
                environments.get,
                Action.ENVIRONMENTS_READ,
                "One environment: its versions, oldest first",
            ),
            Route(
                "DELETE",
                env + "/{name}",
                environments.delete,
                Action.ENVIRONMENTS_WRITE,
                "Delete an environment",
                200,
                (VERSION,),
            ),
            Route("GET", "/v1/served", gateway.list, Action.ENVIRONMENTS_READ, "Environments that their users serve"),
            Route(
                "GET",
                "/v1/served/{name}",
                gateway.connect,
                Action.ENVIRONMENTS_SERVE,
                "A WebSocket: serve an environment under this name",
                101,
                content="application/octet-stream",
            ),
            Route("POST", "/v1/keys", keys.create, Action.KEYS_WRITE, "Make a key; shows it, once", 201, body=NewKey),
            Route("GET", "/v1/keys", keys.list, Action.KEYS_READ, "Keys, oldest first; no secrets", 200, (TENANT,)),
            Route(
                "POST",
                "/v1/keys/{id}/rotate",
                keys.rotate,
                Action.KEYS_WRITE,
                "Give a key a new secret; shows it, once",
                body=Rotation,
            ),
            Route("POST", "/v1/keys/{id}/revoke", keys.revoke, Action.KEYS_WRITE, "A key opens nothing any more"),
            Route("GET", "/v1/whoami", keys.whoami, Action.ABOUT, "Whose key this is, and what it may"),
            Route("GET", "/v1/tenants", keys.tenants, Action.SERVER_READ, "Tenants that have had a key"),
            Route(
                "GET",
                "/v1/usage",
                usage.usage,
                Action.JOBS_READ,
                "What your jobs cost",
                200,
                (BY, FIRST, LAST_DAY, USED_JOB, LIMIT_JOBS),
            ),
            Route(
                "POST",
                "/v1/validate",
                Validating(ctx).validate,
                Action.JOBS_WRITE,
                "Look at a spec as if it were submitted, play an episode of it, and submit nothing",
                body=JobSpec,
            ),
            Route("GET", "/v1/workers", self.workers, Action.SERVER_READ, "Live workers and what they are leased to"),
            Route("GET", "/v1/queues", self.queues, Action.SERVER_READ, "Depth of every message stream"),
            Route("GET", "/healthz", self.healthz, Action.FREE, "The process turns"),
            Route("GET", "/readyz", self.readyz, Action.FREE, "The process can work"),
            Route("GET", "/metrics", self.prometheus, Action.SERVER_READ, "Prometheus text", content="text/plain"),
            Route("GET", "/openapi.json", self.openapi, Action.ABOUT, "This document"),
            Route("GET", "/", page.index, Action.FREE, "The dashboard", content="text/html"),
            Route("GET", "/page/{name}", page.part, Action.FREE, "What it loads", content="text/javascript"),
        ]

        self._document = document(self.routes)  # takes as long as a hundred requests

    def app(self) -> web.Application:
        known = {(r.method, r.path): {p.name for p in r.parameters if p.place == "query"} for r in self.routes}
        free = {r.path for r in self.routes if r.action is Action.FREE}
        audit = Audit(self.ctx)
        guard = Guard(self.ctx.settings, free, known)
        app = web.Application(
            middlewares=[audit.over(self.routes), problems, guard.guard, self.gate.before(self.routes), audit.begins],
            client_max_size=BODY_LIMIT,
        )
        app.on_response_prepare.append(begins)
        if not self.ctx.settings.auth:
            app.on_response_prepare.append(say_open)
        app.on_shutdown.append(self._let_go)
        for route in self.routes:
            app.router.add_route(route.method, route.path, route.handler)
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

    async def queues(self, _: web.Request) -> web.Response:
        queues = []
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
        return json_response(self._document)


@contextlib.asynccontextmanager
async def listening(ctx: Context, gate: Gate, gateway: Gateway, replicas: Replicas) -> AsyncIterator[int]:
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
