"""The environment of a submitted job or of a pushed package: which version it is, and what an env worker says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.data import uploads
from opentinker.shared.messaging.bus import NoReply, NoResponders
from opentinker.shared.messaging.subjects import ENV_CHECK, SANDBOX_CHECK, SERVED_CHECK
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import EnvironmentSpec, JobSpec, ValidationSpec
from opentinker.shared.spec.evaluation import ambiguous_opponents
from opentinker.shared.spec.matches.opposition import opposed
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.seats import SeatSpec, SeatTable, bots_of, mistakes_in_seats
from opentinker.shared.spec.tree_sampling import is_tree
from opentinker.shared.types.codec import WireError
from opentinker.shared.types.core import Pool
from opentinker.shared.types.env_protocol import SERVED, EnvAbout, EnvCheck, EnvCheckReply, is_url
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.mistakes import right_parts, written

ENV_CHECK_S = 15.0
"""Time limit for an env worker that is busy, or whose libraries take long to import; a missing one is reported
immediately."""
URL_CHECK_S = 5.0
"""Time limit for an environment at a URL, whose server may be silent."""
SANDBOX_CHECK_S = 20.0
"""A virtual environment may have to be made first. Less than a client waits for an answer."""
SERVED_CHECK_S = 12.0
SERVED_S = 4.0
"""Whoever has lost its connection is back by then."""
POLL_S = 0.2
Mistakes = list[dict[str, Any]]


@dataclass
class EnvironmentCheck:
    check: EnvCheck | None = None
    """The check request, with the exact version of an upload; None if nothing could be checked."""
    answered: bool = False
    """Whether an env worker did."""
    mistakes: Mistakes = field(default_factory=list)
    seats: list[str] = field(default_factory=list)
    """Seats with this config; empty if they are not known."""


async def check_environment(
    ctx: Context, data: Any, spec: JobSpec | None, tenant: str, known: Mistakes, own_jobs: Collection[str]
) -> EnvironmentCheck:
    """Check the environment that `data` names, even if other parts of it are wrong (`spec` None)."""
    table = SeatTable.as_written(data) if spec is None else SeatTable.of(spec)
    check = _named(data, spec, table, sorted(own_jobs))
    if check is None or any(mistake["field"].startswith("environment.") for mistake in known):
        return EnvironmentCheck()
    if uploads.is_upload(check.name):
        held = Uploads.of(ctx.settings)
        try:
            exact = await asyncio.to_thread(held.resolve, check.name, tenant)
        except SpecError as error:
            return EnvironmentCheck(mistakes=error.mistakes)
        check = msgspec.structs.replace(check, name=str(exact), isolation="sandbox")
    reply = await ask(ctx, check, tenant)
    if reply is None:
        return EnvironmentCheck(check)
    mistakes, seats = reply.errors, reply.seats
    if table is not None:
        wrong, seats = await _of_seats(ctx, check, table, reply, tenant)
        mistakes = mistakes + wrong
    validation = _validation(data, spec)
    if table is not None and validation is not None:
        policy = next(iter(table.policies), "")
        teams = spec_of(spec, policy).algorithm.team if spec else None
        opposed_by = partial(opposed, table.seats, policy, teams=teams)
        mistakes = mistakes + await _of_evaluations(ctx, check, opposed_by, validation, [*known, *mistakes], tenant)
    if spec is not None and not any(mistake["field"].startswith("seats") for mistake in mistakes):
        mistakes = mistakes + await asyncio.to_thread(ambiguous_opponents, spec, seats)
    return EnvironmentCheck(check, True, mistakes, seats)


async def _of_seats(
    ctx: Context, check: EnvCheck, table: SeatTable, reply: EnvCheckReply, tenant: str
) -> tuple[Mistakes, list[str]]:
    """Compare [seats] with those of the environment, which are returned too, also if bots of [seats] are wrong.
    `reply`: to the check."""
    wrong = {one["field"] for one in reply.errors}
    if wrong and check.bots and all(field.startswith("seats") for field in wrong):
        without_bots = await ask(ctx, msgspec.structs.replace(check, bots={}), tenant)
        reply = reply if without_bots is None else without_bots
    if not reply.seats:
        return [], []
    found = await asyncio.to_thread(mistakes_in_seats, table, reply.seats)
    return [one for one in found if one["field"] not in wrong], reply.seats


async def gone(ctx: Context, check: EnvCheck, tenant: str) -> Mistakes:
    """An upload whose version was deleted, or had to make room for another, while it was looked at."""
    if uploads.is_upload(check.name):
        try:
            await asyncio.to_thread(Uploads.of(ctx.settings).resolve, check.name, tenant)
        except SpecError as error:
            return error.mistakes
    return []


async def describe(ctx: Context, name: str, tenant: str) -> EnvAbout:
    """Return what the author of an environment says about it. Raises SpecError, Conflict if no env worker answers."""
    check = EnvCheck(name=name, config=None, describe=True)
    if uploads.is_upload(name):
        exact = await asyncio.to_thread(Uploads.of(ctx.settings).resolve, name, tenant)
        check = msgspec.structs.replace(check, name=str(exact), isolation="sandbox")
    reply = await ask(ctx, check, tenant)
    if reply is None:
        raise Conflict(f"no env worker answers for {name[:200]!r}; start one, or try again")
    if reply.errors:
        raise SpecError(reply.errors)
    return reply.about or EnvAbout()


async def _of_evaluations(
    ctx: Context,
    check: EnvCheck,
    opposed_by: Callable[[SeatSpec], Mapping[str, SeatSpec]],
    validation: ValidationSpec,
    known: Mistakes,
    tenant: str,
) -> Mistakes:
    """Check the config overrides of evaluations, and the bots that they are played against. `opposed_by`: returns the
    players of an evaluation against one, blocking; `known`: mistakes in the environment and [seats], which are not
    reported again."""
    fields = {one["field"] for one in known}
    if "environment.name" in fields:
        return []
    found: Mistakes = []
    own = msgspec.structs.replace(check, config={**(check.config or {}), **validation.config}, tools=[])
    if validation.config:
        has_wrong_seats = any(field.startswith("seats") for field in fields)
        reply = await ask(ctx, msgspec.structs.replace(own, bots={}) if has_wrong_seats else own, tenant)
        wrong = [] if reply is None else [one for one in reply.errors if not _is_inherited(one, validation, known)]
        fields |= {one["field"] for one in wrong}
        found = [{**m, "field": m["field"].replace("environment.config", "validation.config", 1)} for m in wrong]
    for place, opponent in enumerate(validation.against):
        if opponent.bot is None:
            continue
        seats = bots_of(await asyncio.to_thread(opposed_by, opponent))
        theirs = {f"seats.{seat}.bot" for seat, bot in seats.items() if bot == opponent.bot}
        reply = await ask(ctx, msgspec.structs.replace(own, bots=seats), tenant)
        errors = [] if reply is None else reply.errors
        problems = {m["problem"] for m in errors if m["field"] in theirs or m["field"] not in fields}
        at = f"validation.against.{place}.bot"
        found += [{"field": at, "value": opponent.metric_name, "problem": problem} for problem in sorted(problems)]
    return found


def _is_inherited(one: dict[str, Any], validation: ValidationSpec, known: Mistakes) -> bool:
    """Return whether a mistake in the config of evaluations is one of `known`, in a setting that they do not
    override."""
    setting = one["field"].removeprefix("environment.config.").partition(".")[0]
    said = {(other["field"], other["problem"]) for other in known}
    return setting not in validation.config and (one["field"], one["problem"]) in said


async def ask(ctx: Context, check: EnvCheck, tenant: str) -> EnvCheckReply | None:
    """Return an env worker's answer; None if none answered. An isolation level that no running worker has is a mistake,
    and so is a user's environment that is not served."""
    if check.name.startswith(SERVED):
        return await _served(ctx, check, tenant)
    sandboxed = check.isolation == "sandbox"
    call, within_s = (SANDBOX_CHECK, SANDBOX_CHECK_S) if sandboxed else (ENV_CHECK, ENV_CHECK_S)
    try:
        return await ctx.bus.request(call, check, min(within_s, URL_CHECK_S) if is_url(check.name) else within_s)
    except NoResponders:
        return await _without_sandboxes(ctx) if sandboxed else None
    except (NoReply, WireError):
        return None


async def _served(ctx: Context, check: EnvCheck, tenant: str) -> EnvCheckReply:
    """Ask a process of this tenant that serves the environment. Reconnecting ones, to us or to another scheduler, are
    waited for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SERVED_S
    while loop.time() < deadline:
        try:
            keys = {"tenant": tenant, "environment": check.name}
            return await ctx.bus.request(SERVED_CHECK, check, SERVED_CHECK_S, **keys)
        except NoResponders:
            await sleep(POLL_S)
    name = check.name.removeprefix(SERVED)
    problem = f"no process serves it now: start `opentinker env serve module:Class --name {name}` and submit again"
    return EnvCheckReply(errors=[{"field": "environment.name", "value": check.name, "problem": problem}])


async def _without_sandboxes(ctx: Context) -> EnvCheckReply | None:
    """Refuse what no env worker can sandbox; None where no env worker runs yet: it may have them."""
    reasons = [str(w.detail.get("no_sandbox", "")) for w in await ctx.store.workers() if w.pool == Pool.ENV]
    if not any(reasons):
        return None
    problem = f"none of the {len(reasons)} env workers has sandboxes: {next(filter(None, reasons))}"
    return EnvCheckReply(errors=[{"field": "environment.isolation", "value": "sandbox", "problem": problem}])


def _validation(data: Any, spec: JobSpec | None) -> ValidationSpec | None:
    """Return [validation] of a spec, also of one that is wrong elsewhere."""
    if spec is not None:
        return spec.validation
    return right_parts(ValidationSpec, {0: written(data, "validation")}).get(0)


def _named(data: Any, spec: JobSpec | None, table: SeatTable | None, own_jobs: list[str]) -> EnvCheck | None:
    if spec is not None and not spec.environment.name:
        return None
    raw = {0: written(data, "environment")}
    part = right_parts(EnvironmentSpec, raw).get(0) if spec is None else spec.environment
    if part is None:
        return None
    return EnvCheck(
        name=part.name,
        config=part.config,
        isolation=part.isolation or "process",
        tools=[tool.model_dump() for tool in part.tools],
        own_jobs=own_jobs,
        bots={} if table is None else bots_of(table.seats),
        forks=spec is not None and is_tree(spec),
    )
