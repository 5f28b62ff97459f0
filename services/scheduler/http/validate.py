"""Validates a spec as a submission would, without creating a job: reports its mistakes, plays an episode of its
environment, and names the workers that would run it.

validate   consumes a spec; asks env workers (ENV_CHECK, one episode by ENV_OPEN, ENV_STEP); produces a report
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

from aiohttp import web

from opentinker.services.scheduler.http.auth import tenant_of
from opentinker.services.scheduler.http.errors import json_response
from opentinker.services.scheduler.http.route_decorator import Choice, Route
from opentinker.services.scheduler.http.spec_body import read_spec
from opentinker.services.scheduler.jobs.check_environment import EnvironmentCheck
from opentinker.services.scheduler.jobs.check_model import resolved_base
from opentinker.services.scheduler.jobs.choose_trainer import choose_trainer
from opentinker.services.scheduler.jobs.data_size import planned_steps
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.services.scheduler.jobs.rough_estimate import rough_estimate
from opentinker.services.scheduler.jobs.submit import Mistakes, check_references, kept_idle_s
from opentinker.services.scheduler.placement import forecast
from opentinker.services.scheduler.placement.estimate import estimate, measured_beside
from opentinker.services.scheduler.sweeps.submission import checked_sweep
from opentinker.services.scheduler.sweeps.sweep_estimate import estimate_sweep
from opentinker.shared import api_types
from opentinker.shared.api_types import Check, JobEstimate, Mistake, Said, Validation
from opentinker.shared.data import dry_run
from opentinker.shared.data.dry_run import NOT_LOOKED_AT, check
from opentinker.shared.data.dry_run_policies import of_policies, policies
from opentinker.shared.messaging.env_client import EnvClient
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec, ModelSpec, parse_spec
from opentinker.shared.spec.matches.seats import bots_of
from opentinker.shared.spec.rollout import ELSEWHERE
from opentinker.shared.spec.sweeps.children import SubmittedSpec, Sweep, parse_sweep
from opentinker.shared.types.core import StopReason
from opentinker.shared.types.env_protocol import OpenSession, Policy, SeatAction, SessionReply, StepSession
from opentinker.shared.types.error_text import error_sentence
from opentinker.shared.types.errors import SpecError, plural
from opentinker.shared.types.sweeps import is_sweep

EPISODE_S = 30.0
ELSEWHERE_S = 5.0
"""Time limit for an environment that its user runs, whose server may be silent."""
TURNS = 4
SAID = "0"
"""Answer to every turn of the episode."""
SHOWN = 2000
"""Characters shown of the environment's messages."""
NO_PROMPTS = "the server renders no prompts: loading a tokenizer would block other requests"


SCOPE = Choice(
    "scope",
    "What is looked at: everything; what the queue would do and the estimate, without an episode; or the text alone.",
    among=("all", "queue", "spec"),
)


class ValidateApi:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    @Route(
        "POST", "/v1/validate", Action.JOBS_WRITE, parameters=(SCOPE,), body=SubmittedSpec, answer=api_types.Validation
    )
    async def validate(self, request: web.Request) -> web.Response:
        """Validate a spec without submitting it: check it, play one episode, and estimate what it takes.

        For a sweep, the table and all values are checked, and an episode of the first job is played."""
        scope = SCOPE.read(request)
        return json_response(await report_on(self.ctx, await read_spec(request), tenant_of(request), scope))


async def report_on(ctx: Context, data: Any, tenant: str, scope: str = "all") -> Validation:
    """`scope`: `all`: play an episode and look at the model and the rows too; `spec`: at nothing but the spec."""
    mistakes: Mistakes = []
    spec: JobSpec | None = None
    sweep: Sweep | None = None
    asked = EnvironmentCheck()
    try:
        spec, sweep = await asyncio.to_thread(_read, data)
        if sweep is not None and scope != "spec":
            asked = (await checked_sweep(ctx, sweep, tenant)).found.asked
    except SpecError as error:
        mistakes = error.mistakes
    if scope != "spec" and not is_sweep(data):
        asked, *_ = await check_references(ctx, data, spec, tenant, mistakes)
    if spec is None or mistakes:
        return _report(mistakes, [])
    named = check("spec", f"{spec.name}, of kind {spec.kind}")
    if scope == "spec":
        return _report([], [named])
    checks, messages = await _checks_of(ctx, spec, tenant, asked) if scope == "all" else ([], [])
    checks.insert(0, named)
    placed = await _placed(ctx, spec)
    checks += await forecast.forecast_start(ctx, placed, tenant)
    if sweep is None:
        return _report([], checks, messages, await _estimate(ctx, spec, placed, tenant))
    checks.insert(1, check("sweep", f"{sweep.size}; the checks below are for the first one"))

    async def of_job(one: JobSpec) -> JobEstimate | None:
        return await _estimate(ctx, one, await _placed(ctx, one), tenant)

    return _report([], checks, messages, await estimate_sweep(ctx.settings, sweep, of_job))


async def _estimate(ctx: Context, spec: JobSpec, placed: JobSpec, tenant: str) -> JobEstimate | None:
    steps = await on_disk(ctx, planned_steps, placed)
    if found := await estimate(ctx, spec, steps, tenant):
        return found
    measured = await measured_beside(ctx, spec, tenant)
    return await on_disk(ctx, rough_estimate, ctx.settings, placed, steps, measured)


async def _placed(ctx: Context, spec: JobSpec) -> JobSpec:
    """Return the spec with its trainer chosen, as it would be submitted."""

    async def resolved(model: ModelSpec) -> ModelSpec:
        return model.model_copy(update={"base": await on_disk(ctx, resolved_base, model.base)})

    own = {name: one.model_copy(update={"model": await resolved(one.model)}) for name, one in spec.policies.items()}
    placed = spec.model_copy(update={"model": await resolved(spec.model), "policies": own})
    trainer = await choose_trainer(ctx, placed, placed.model_dump(mode="json"))
    return placed.model_copy(update={"resources": spec.resources.model_copy(update={"trainer": trainer})})


def _read(data: Any) -> tuple[JobSpec, Sweep | None]:
    """Blocking. Return the job of a spec; of a sweep its first job, and the sweep. Raises SpecError."""
    if not is_sweep(data):
        return parse_spec(data), None
    sweep = parse_sweep(data)
    return parse_spec(sweep.first_job), sweep


def _report(
    mistakes: Mistakes, checks: list[Check], messages: list[Said] | None = None, taken: JobEstimate | None = None
) -> Validation:
    return {
        "valid": not mistakes and not any(one["result"] == "bad" for one in checks),
        "mistakes": cast(list[Mistake], mistakes),
        "checks": checks,
        "messages": messages or [],
        "estimate": taken,
    }


async def _checks_of(
    ctx: Context, spec: JobSpec, tenant: str, asked: EnvironmentCheck
) -> tuple[list[Check], list[Said]]:
    """Return every check of a job whose spec and references are right, and the first messages of its environment."""
    checks: list[Check] = []
    messages: list[Said] = []
    if spec.environment.name:
        if asked.answered:
            name = asked.check.name if asked.check is not None else spec.environment.name
            own_jobs = [] if asked.check is None else asked.check.own_jobs
            client = EnvClient(ctx.bus, tenant=tenant, own_jobs=own_jobs)
            played, messages = await _episode(client, spec, name)
            checks.append(played)
        else:
            hint = "start one: it is checked at the first episode otherwise"
            checks.append(check("environment", "no env worker answered", "note", hint))
    checks += await on_disk(ctx, of_policies, spec, dry_run.model)
    checks += await on_disk(ctx, policies, spec)
    checks.append(
        check("prompt", f"{NOT_LOOKED_AT}{NO_PROMPTS}", "note", "opentinker validate renders it, with the model here")
    )
    checks += await on_disk(ctx, dry_run.rows, spec, here=False)
    if spec.kind == "inference":
        checks.append(_kept(kept_idle_s(spec, ctx.settings), own=spec.serving.idle_s is not None))
    return checks, messages


def _kept(idle_s: float | None, *, own: bool) -> Check:
    if idle_s is None:
        found = "until it is completed or cancelled, even if idle"
        return check("kept", found, hint="serving.idle_s ends it when idle")
    whose = "serving.idle_s" if own else "this server's inference_idle_s; serving.idle_s is the job's own"
    return check("kept", f"until it has been idle for {idle_s:g} s ({whose})")


async def _episode(client: EnvClient, spec: JobSpec, name: str) -> tuple[Check, list[Said]]:
    """Play a few turns of the first start state, with the same answer to each."""
    session = f"validate-{uuid.uuid4().hex}"
    within_s = ELSEWHERE_S if name.startswith(ELSEWHERE) else EPISODE_S
    request = OpenSession(
        job="validate",
        session=session,
        environment=name,
        isolation=spec.environment.isolation or "process",
        config=spec.environment.config,
        row=0,
        seed=0,
        deadline_s=within_s,
        policy=Policy(model=spec.model.base, context_length=spec.rollout.context_length or 0),
        tools=[tool.model_dump() for tool in spec.environment.tools],
        tool_turns=spec.environment.tool_turns,
        bots=bots_of(spec.seats),
    )
    messages: list[Said] = []
    worker, turns, rewards = "", 0, 0.0
    try:
        async with asyncio.timeout(within_s):
            reply = await client.open(request)
            worker = reply.worker
            first = reply.prompts[0]
            messages = [{"role": said.role, "content": said.text[:SHOWN]} for said in first.messages]
            while reply.failure is None and not reply.done and not reply.wants_tokens and turns < TURNS:
                reply = await client.step(worker, _step(session, turns, reply))
                others = sum(sum(parts.values()) for parts in reply.rewards.values())
                rewards, turns = rewards + reply.reward + others, turns + 1
    except TimeoutError:
        return _bad(f"no answer within {within_s:g} s after {plural(turns, 'turn')}"), messages
    if worker and not reply.done:
        await client.close(worker=worker, session=session)
    if reply.failure is not None:
        return _bad(f"{reply.failure} after {plural(turns, 'turn')}: {error_sentence(reply.error)}"), messages
    how = "and is done" if reply.done else "and continues"
    return check(
        "episode", f"begins with {plural(len(messages), 'message')}, {plural(turns, 'turn')}, reward {rewards:g}, {how}"
    ), messages


def _step(session: str, turn: int, asked: SessionReply) -> StepSession:
    actions = [SeatAction(seat=prompt.seat, text=SAID, stop=StopReason.EOS) for prompt in asked.prompts]
    return asked.step(session, turn, actions)


def _bad(found: str) -> Check:
    return check("episode", found, "bad", "check the environment and its config: `opentinker env check` plays it alone")
