"""A spec is looked at as if it were submitted, and nothing comes of it: mistakes, an episode of its environment, and
who would do the work.

validate   consumes a spec; asks env workers (ENV_CHECK, one episode by ENV_OPEN, ENV_STEP); produces a report
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

from aiohttp import web

from opentinker.services.scheduler.gate import tenant_of
from opentinker.services.scheduler.problems import json_response, read_json
from opentinker.services.scheduler.submission import Mistakes, look_at
from opentinker.shared.env_client import EnvClient
from opentinker.shared.errors import SpecError
from opentinker.shared.service import Context
from opentinker.shared.sessions import Policy, SessionReply, StepSession
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.frozen import is_scored
from opentinker.shared.types import Pool, StopReason

EPISODE_S = 30.0
TURNS = 4
SAID = "0"
"""What the episode is answered with, whatever it asks."""
SHOWN = 2000
"""Characters of what the environment said."""
Check = dict[str, Any]


class Validating:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    async def validate(self, request: web.Request) -> web.Response:
        return json_response(await report_on(self.ctx, await read_json(request), tenant_of(request)))


async def report_on(ctx: Context, data: Any, tenant: str) -> dict[str, Any]:
    """`valid`, `mistakes` as of a submission, `checks` (what, found, result: ok | note | bad, hint), `messages` of the
    environment's first turn."""
    mistakes: Mistakes = []
    spec: JobSpec | None = None
    try:
        spec = parse_spec(data)
    except SpecError as error:
        mistakes += error.mistakes
    asked, _ = await look_at(ctx, data, spec, tenant, mistakes)
    if spec is None or mistakes:
        return {"valid": False, "mistakes": mistakes, "checks": [], "messages": []}
    checks: list[Check] = [_check("spec", f"{spec.name}, of kind {spec.kind}")]
    messages: list[dict[str, str]] = []
    if spec.environment.name:
        if asked.answered:
            name = asked.check.name if asked.check is not None else spec.environment.name
            played, messages = await _episode(ctx, spec, name, tenant)
            checks.append(played)
        else:
            hint = "start one: it is checked at the first episode otherwise"
            checks.append(_check("environment", "no env worker answered", "note", hint))
    checks += await _workers(ctx, spec)
    valid = not any(check["result"] == "bad" for check in checks)
    return {"valid": valid, "mistakes": [], "checks": checks, "messages": messages}


def _check(what: str, found: str, result: str = "ok", hint: str = "") -> Check:
    return {"what": what, "found": found, "result": result, "hint": hint}


async def _episode(ctx: Context, spec: JobSpec, name: str, tenant: str) -> tuple[Check, list[dict[str, str]]]:
    """The first start state, a few turns of it, whatever is said."""
    client, session = EnvClient(ctx.bus, tenant=tenant), f"validate-{uuid.uuid4().hex}"
    policy = Policy(model=spec.model.base, context_length=spec.rollout.context_length or 0)
    messages: list[dict[str, str]] = []
    worker, turns, rewards = "", 0, 0.0
    try:
        async with asyncio.timeout(EPISODE_S):
            reply = await client.open(
                job="validate",
                session=session,
                environment=name,
                isolation=spec.environment.isolation or "process",
                config=spec.environment.config,
                row=0,
                seed=0,
                deadline_s=EPISODE_S,
                policy=policy,
                tools=[tool.model_dump() for tool in spec.environment.tools],
                tool_turns=spec.environment.tool_turns,
            )
            worker = reply.worker
            messages = [{"role": said.role, "content": said.text[:SHOWN]} for said in reply.messages]
            while reply.failure is None and not reply.done and not reply.wants_tokens and turns < TURNS:
                reply = await client.step(worker, _step(session, turns, reply))
                rewards, turns = rewards + reply.reward, turns + 1
    except TimeoutError:
        return _bad(f"no answer within {EPISODE_S:g} s after {turns} turns"), messages
    if worker and not reply.done:
        await client.close(worker=worker, session=session)
    if reply.failure is not None:
        return _bad(f"{reply.failure} after {turns} turns: {reply.error[-500:]}"), messages
    how = "and is done" if reply.done else "and goes on"
    return _check(
        "episode", f"begins with {len(messages)} messages, {turns} turns, reward {rewards:g}, {how}"
    ), messages


def _step(session: str, turn: int, asked: SessionReply) -> StepSession:
    return StepSession(session=session, turn=turn, seat=asked.seat, text=SAID, stop=StopReason.EOS)


def _bad(found: str) -> Check:
    return _check("episode", found, "bad", "see to the environment or its config: opentinker env check plays it alone")


async def _workers(ctx: Context, spec: JobSpec) -> list[Check]:
    """Whether those are there, and free, that the job needs."""
    workers = await ctx.store.workers()
    alive = Counter(worker.pool for worker in workers)
    free = Counter(worker.pool for worker in workers if worker.job is None)
    needs: dict[Pool, int] = {}
    if spec.kind not in ("inference", "eval"):
        needs[Pool.TRAINER] = 1
    if spec.kind in ("rl", "inference", "eval"):
        needs[Pool.ROLLOUT] = spec.resources.rollout_workers
    checks = [_of_pool(pool, wanted, alive[pool], free[pool]) for pool, wanted in needs.items()]
    shared = [Pool.ENV] if spec.environment.name and not spec.environment.name.startswith("served:") else []
    shared += [Pool.REFERENCE] if is_scored(spec.model_dump()) else []
    return checks + [_of_pool(pool, 1, alive[pool], alive[pool]) for pool in shared]


def _of_pool(pool: Pool, wanted: int, alive: int, free: int) -> Check:
    what, found = f"{pool} workers", f"{wanted} wanted, {alive} running, {free} free"
    if not alive:
        return _check(what, found, "note", "the job waits until one runs")
    if not free:
        return _check(what, found, "note", "the job waits until one is free")
    short = free < wanted
    return _check(what, found, "note" if short else "ok", "it begins with fewer" if short else "")
