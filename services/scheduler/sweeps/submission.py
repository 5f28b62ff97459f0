"""Turns the spec of a sweep into a sweep that runs, or returns every mistake in it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import orjson

from opentinker.services.scheduler.jobs.check_seats import AGAINST, settle_player
from opentinker.services.scheduler.jobs.submit import Found, Mistakes, check_references, new_id
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import parse_spec
from opentinker.shared.spec.matches.seats import all_players
from opentinker.shared.spec.sweeps.children import Settings, Sweep, child_of, first_of, of_parameter, parse_sweep
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.sweeps import SweepRecord, SweepState

MAX_ACTIVE = 100
"""Sweeps of a tenant that run at the same time."""
REFERRING = {"model", "environment", "data", "start", "seats", "teacher", "reward_models", "value_model", "policies"}
REFERRING |= {"validation", "resources"}
"""Tables whose values are compared with what the server has: models, files, environments, checkpoints, priorities."""
MAX_CHECKED = 64
"""Values that are checked at submission; further ones when their jobs are submitted."""
AT_ONCE = 4


async def submit_sweep(
    ctx: Context, data: Any, tenant: str, idempotency: str = "", *, key: str = "", trace: str = ""
) -> tuple[str, bool]:
    """Return the sweep's id, and whether an equal request with the same key had made it before.

    Raises SpecError with every mistake, Conflict: the idempotency key was used for another body, or the tenant has
    MAX_ACTIVE sweeps.
    """
    sweep = await asyncio.to_thread(parse_sweep, data)
    body_hash = hashlib.sha256(orjson.dumps(data, option=orjson.OPT_SORT_KEYS)).hexdigest()
    store = SweepStore(ctx.store.redis)
    if idempotency and (made := await store.find_idempotent(tenant, idempotency, body_hash)) is not None:
        return made, True
    if (active := await store.count_active(tenant)) >= MAX_ACTIVE:
        raise Conflict(f"you have {active} running sweeps; {MAX_ACTIVE} are allowed: cancel one or wait")
    found = await checked_sweep(ctx, sweep, tenant)
    base = _pinned(sweep, found)
    table = sweep.table.model_copy(update={"metric": _metric(sweep, found)})
    spec, now, new = parse_spec(sweep.first_job), time.time(), new_id("s")
    record = SweepRecord(
        id=new,
        tenant=tenant,
        name=spec.name,
        project=spec.project,
        tags=spec.tags,
        notes=spec.notes,
        kind=base.get("kind", "rl"),
        model="" if _is_varied("model.base", sweep) else spec.model.base,
        environment="" if _is_varied("environment.name", sweep) else _environment(base),
        state=SweepState.RUNNING,
        created=now,
        updated=now,
        key=key,
        method=table.method,
        metric=str(table.metric),
        goal=str(table.goal),
        trace=trace,
        table=table.model_dump(mode="json"),
        base=base,
        planned=sweep.most_trials,
    )
    id = await store.create(record, idempotency, body_hash)
    return id, id != new


async def checked_sweep(ctx: Context, sweep: Sweep, tenant: str) -> Found:
    """Check what the jobs refer to, and return what the first one does. Raises SpecError."""
    first = first_of(sweep.table)
    found, mistakes = await _checked(ctx, sweep, first, tenant)
    if mistakes:
        raise SpecError([of_parameter(one, sweep.table) for one in mistakes])
    limit = asyncio.Semaphore(AT_ONCE)

    async def look(path: str, value: Any) -> Mistakes:
        async with limit:
            _, wrong = await _checked(ctx, sweep, {**first, path: value}, tenant)
        return [{**of_parameter(one, sweep.table), "value": value} for one in wrong]

    refer = {path: one for path, one in sweep.table.parameters.items() if path.partition(".")[0] in REFERRING}
    others = [(path, value) for path, one in refer.items() for value in one.ends[1:]]
    wrong = await asyncio.gather(*(look(path, value) for path, value in others[:MAX_CHECKED]))
    if mistakes := [one for each in wrong for one in each]:
        raise SpecError(mistakes)
    return found


async def _checked(ctx: Context, sweep: Sweep, settings: Settings, tenant: str) -> tuple[Found, Mistakes]:
    mistakes: Mistakes = []
    data = child_of(sweep.table, sweep.base, settings)
    found = await check_references(ctx, data, parse_spec(data), tenant, mistakes)
    return found, mistakes


def _pinned(sweep: Sweep, found: Found) -> dict[str, Any]:
    """Return the spec of the jobs, naming the version of the environment and the checkpoints that were found, so that
    all jobs have the same."""
    pins = {f"policies.{name}.start.from": source.name for name, source in found.of_policies.items()}
    if found.asked.check is not None:
        pins["environment.name"] = found.asked.check.name
    if found.chosen is not None:
        pins["start.from"] = found.chosen.name
    same = {setting: value for setting, value in pins.items() if not _is_varied(setting, sweep)}
    base = child_of(sweep.table, sweep.base, same)
    for place, player in found.players.items():
        if not _is_varied(f"{place}.frozen", sweep):
            settle_player(base, place, {"frozen": player.source.name})
    return base


def _environment(base: dict[str, Any]) -> str:
    """Return the environment's name, with the version that was found."""
    return str(base.get("environment", {}).get("name", ""))


def _is_varied(setting: str, sweep: Sweep) -> bool:
    return any(f"{setting}.".startswith(f"{path}.") for path in sweep.table.parameters)


def _metric(sweep: Sweep, found: Found) -> str:
    """Return the metric by the name that jobs report, which has the opponent's step instead of `latest`."""
    name = f"{sweep.table.metric}/"
    written = all_players(parse_spec(sweep.first_job))
    for place, player in found.players.items():
        if place.startswith(AGAINST) and not _is_varied(f"{place}.frozen", sweep):
            name = name.replace(f"/{written[place].frozen}/", f"/{player.source.name}/")
    return name.removesuffix("/")
