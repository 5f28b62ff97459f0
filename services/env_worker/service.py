"""Entry point of an env worker: connects subjects to Sessions, sends heartbeats and drains on shutdown.

Consumes opens (shared between all env workers by a queue group), steps and closes (addressed to this process) and
checks; produces replies, METRIC and TIMELINE once a second; woken by messages. On SIGTERM it accepts no more opens and
lets running sessions finish within `drain_s`. Rollout workers with sessions left after that get no response and play
the episodes elsewhere.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from opentinker.envs.harbor.boxes import close_boxes
from opentinker.envs.registry import BUILT_IN
from opentinker.envs.runtime.child_pool import ChildPool
from opentinker.envs.runtime.data_rows import list_rows
from opentinker.envs.runtime.interpreters import Interpreters
from opentinker.envs.runtime.preflight import check_request
from opentinker.envs.runtime.resolver import Resolver
from opentinker.envs.runtime.sandboxes import Sandboxes
from opentinker.envs.runtime.sessions import Sessions
from opentinker.envs.runtime.tools.tool_factory import ToolFactory
from opentinker.envs.runtime.watchdog import watch
from opentinker.envs.threads import in_daemon_thread
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.config import Settings
from opentinker.shared.data.readable_paths import Readable
from opentinker.shared.messaging.subjects import (
    ENV_CHECK,
    ENV_CLOSE,
    ENV_OPEN,
    ENV_ROWS,
    ENV_STEP,
    SANDBOX_CHECK,
    SANDBOX_OPEN,
    SANDBOX_ROWS,
)
from opentinker.shared.runtime.service import Context, first_failure
from opentinker.shared.runtime.telemetry import Reporter
from opentinker.shared.runtime.timeline import LanesByJob
from opentinker.shared.runtime.worker_info import worker_info
from opentinker.shared.security.egress import Egress
from opentinker.shared.types.core import Ending, Pool
from opentinker.shared.types.env_protocol import (
    REMOTE,
    EnvCheck,
    EnvCheckReply,
    EnvRows,
    EnvRowsReply,
    OpenSession,
    SessionReply,
)
from opentinker.shared.types.errors import SpecError
from opentinker.shared.types.workers import WorkerInfo

QUEUE = "env"
BLOCKED_TTLS = 2
"""An environment that blocks the event loop for this many times `worker_ttl_s` ends the process."""

GLUE_S = 0.05
"""Timeline spans closer than this are merged: turns of many sessions leave many short gaps, on many env workers."""


async def serve(ctx: Context) -> None:
    settings = ctx.settings
    Egress(tuple(settings.env_egress_allow)).publish()
    info = worker_info(ctx.worker, Pool.ENV)
    sandboxes = await Sandboxes.open(settings)
    host = ChildPool(
        children=settings.env_children,
        per_child=settings.env_sessions_per_child,
        modules=settings.env_modules,
        sandboxes=sandboxes,
        interpreters=Interpreters(settings.env_interpreters),
    )
    resolver = Resolver(modules=settings.env_modules)
    tool_factory = ToolFactory(settings)
    lanes = LanesByJob(ctx.bus, ctx.worker, glue_s=GLUE_S)
    sessions = Sessions(
        f"{info.id}-{info.incarnation}",
        limit=settings.env_sessions,
        resolver=resolver,
        host=host,
        tool_factory=tool_factory,
        lanes=lanes,
        import_timeout_s=settings.env_import_timeout_s,
    )
    try:
        await first_failure(
            {
                "beat": _beat(ctx, info, sessions, sandboxes.unavailable),
                "serve": _serve(ctx, sessions, resolver, host, sandboxes, tool_factory),
                "owners": _abandon_orphans(ctx, sessions),
                "report": Reporter(ctx.bus, ctx.worker, sessions.meters).run(),
                "timeline": lanes.run(),
                "watchdog": watch(BLOCKED_TTLS * settings.worker_ttl_s),
            }
        )
    finally:
        try:
            await lanes.report()
        finally:
            await host.close()
            await tool_factory.close()
            await sandboxes.close()
            await close_boxes()
            await ctx.store.leave(info)


async def _serve(
    ctx: Context,
    sessions: Sessions,
    resolver: Resolver,
    host: ChildPool,
    sandboxes: Sandboxes,
    tool_factory: ToolFactory,
) -> None:
    """Answer requests until the service stops, then drain."""
    bus = ctx.bus

    async def opened(request: OpenSession) -> SessionReply:
        if why := await _why_closed(ctx.settings, request):
            return SessionReply(worker=sessions.worker, failure=Ending.ENV_ERROR, error=why)
        return await sessions.open(request)

    async def checked(request: EnvCheck) -> EnvCheckReply:
        if why := await _why_closed(ctx.settings, request):
            return EnvCheckReply(errors=[{"field": "environment.config", "value": None, "problem": why}])
        reply = await check_environment(request, resolver, host)
        mistakes = await tool_factory.check(request.tools)
        return msgspec.structs.replace(reply, errors=[*reply.errors, *mistakes])

    async def listed(request: EnvRows) -> EnvRowsReply:
        if why := await _why_closed(ctx.settings, request):
            return EnvRowsReply(problem=why)
        reply = await list_rows_of(request, resolver, host)
        return reply if reply.count is None else await tool_factory.offer(request, reply)

    steps = [
        await bus.serve(ENV_STEP, sessions.step, worker=sessions.worker),
        await bus.serve(ENV_CLOSE, sessions.close, worker=sessions.worker),
    ]
    opens = [
        await bus.serve(ENV_OPEN, opened, QUEUE, environment=name)
        for name in (["*"] if resolver.modules else [*BUILT_IN, REMOTE])
    ]
    opens.append(await bus.serve(ENV_CHECK, checked, QUEUE))
    opens.append(await bus.serve(ENV_ROWS, listed, QUEUE))
    if not sandboxes.unavailable:
        opens.append(await bus.serve(SANDBOX_OPEN, sessions.open, QUEUE))
        opens.append(await bus.serve(SANDBOX_CHECK, checked, QUEUE))
        opens.append(await bus.serve(SANDBOX_ROWS, listed, QUEUE))
    await bus.flush()  # from here on the server sends us requests
    ctx.ready()
    await ctx.stopping.wait()
    sessions.draining = True
    for subscription in opens:
        await subscription.drain()
    left = await sessions.drain(ctx.settings.drain_s)
    for subscription in steps:
        await subscription.drain()
    ctx.log.info("drained", given_up=left)


async def _why_closed(settings: Settings, request: OpenSession | EnvCheck) -> str:
    """Return why an environment may not open the paths in its config, or an empty text. A sandbox contains none of our
    files and is not checked."""
    if request.isolation == "sandbox" or not request.config:
        return ""
    find_mistakes = Readable(settings, request.own_jobs).mistakes_in
    return "; ".join(
        f"{m['field']}: {m['value']} {m['problem']}" for m in await asyncio.to_thread(find_mistakes, request.config)
    )


async def _beat(ctx: Context, info: WorkerInfo, sessions: Sessions, no_sandbox: str) -> None:
    while True:
        detail = {
            "sessions": sessions.active,
            "load": round(sessions.load, 3),
            "capacity": sessions.limit,
            "environments": sorted(BUILT_IN),
            "no_sandbox": no_sandbox,
        }
        ctx.detail.update(detail)
        status = "draining" if sessions.draining else "ready" if ctx.is_ready else "loading"
        await ctx.store.beat(msgspec.structs.replace(info, status=status, detail=detail), ctx.settings.worker_ttl_s)
        await sleep(ctx.settings.heartbeat_s)


async def _abandon_orphans(ctx: Context, sessions: Sessions) -> None:
    """End episodes whose rollout worker was dead in two consecutive checks. No other worker continues them, and until
    their deadline they would occupy capacity and delay a drain."""
    gone: set[str] = set()
    while True:
        await sleep(ctx.settings.worker_ttl_s)
        dead = {owner for owner in sessions.owners() if not await ctx.store.lives(*owner.rsplit("/", 1))}
        for owner in dead & gone:
            await sessions.abandon(owner)
        gone = dead


def _is_played_here(request: EnvCheck, host: ChildPool) -> bool:
    """Return whether this process may import the environment."""
    return request.isolation == "process" and not host.interpreters.of(request.name)


async def list_rows_of(request: EnvRows, resolver: Resolver, host: ChildPool) -> EnvRowsReply:
    """List rows where sessions would run, as `check_environment`: here in a thread."""
    try:
        if _is_played_here(request, host) and not (host.has_children and (await resolver.find(request.name)).blocking):
            return await in_daemon_thread(
                partial(list_rows, request.name, request, modules=resolver.modules), "environment-rows"
            )
        return await host.rows(request)
    except SpecError as error:
        return EnvRowsReply(problem="; ".join(f"{m['field']}: {m['problem']}" for m in error.mistakes))


async def check_environment(request: EnvCheck, resolver: Resolver, host: ChildPool) -> EnvCheckReply:
    """Return every mistake in the name and the config, checked where sessions would run: blocking environments in
    children, whose libraries are never imported here."""
    if _is_played_here(request, host):
        by_name = msgspec.structs.replace(request, config=None)
        named = await check_request(resolver.check, resolver.find, by_name)
        if named.errors or request.config is None:
            return named
        if not (host.has_children and (await resolver.find(request.name)).blocking):
            return await check_request(resolver.check, resolver.find, request)
    try:
        return await host.check(request)
    except SpecError as error:
        return EnvCheckReply(errors=error.mistakes)
