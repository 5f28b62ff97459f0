"""Turns the spec of a sweep into a sweep that runs, or returns every mistake in it."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.services.scheduler.jobs import check_start_checkpoint as starting
from opentinker.services.scheduler.jobs.check_seats import AGAINST, settle_player
from opentinker.services.scheduler.jobs.opponent_names import (
    names_of_opponents,
    settle_metrics,
    settled_path,
    settled_value,
)
from opentinker.services.scheduler.jobs.submit import Found, Mistakes, check_references, new_id
from opentinker.shared.data import uploads
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.matches.seats import all_players
from opentinker.shared.spec.start import Origin
from opentinker.shared.spec.sweeps.children import Settings, Sweep, child_of, first_of, of_parameter, parse_sweep
from opentinker.shared.spec.sweeps.table import SweepParameter
from opentinker.shared.state.sweeps import SweepStore
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.metric_names import with_opponents
from opentinker.shared.types.mistakes import mistake
from opentinker.shared.types.sweeps import SweepRecord, SweepState

MAX_ACTIVE = 100
"""Sweeps of a tenant that run at the same time."""
REFERRING = {"model", "environment", "data", "start", "seats", "teacher", "reward_models", "value_model", "policies"}
REFERRING |= {"validation", "resources"}
"""Tables whose values are compared with what the server has: models, files, environments, checkpoints, priorities."""
MAX_CHECKED = 64
"""Values that are checked at submission; of further ones the references are found, and the rest is checked when their
jobs are submitted."""
AT_ONCE = 4
Place = tuple[str, ...]
"""Path of a setting."""


class Checked(NamedTuple):
    """What a sweep refers to."""

    found: Found
    """That of the first job."""
    parameters: dict[str, SweepParameter]
    """With the versions and steps that were found for their values."""
    uses: list[str]
    """These versions and steps, and those that are the same for all jobs."""


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
    found, parameters, uses = await checked_sweep(ctx, sweep, tenant)
    base, names = _pinned(sweep, found), _opponents(sweep, found)
    settle_metrics(base, names)
    metric = with_opponents(str(sweep.table.metric), names)
    table = sweep.table.model_copy(update={"metric": metric, "parameters": _settled(parameters, names)})
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
        uses=uses,
        planned=sweep.most_trials,
    )
    id = await store.create(record, idempotency, body_hash)
    return id, id != new


async def checked_sweep(ctx: Context, sweep: Sweep, tenant: str) -> Checked:
    """Check what the jobs refer to. Raises SpecError."""
    first, uses = first_of(sweep.table), set[str]()
    found, mistakes = await _checked(ctx, sweep, first, tenant)
    if mistakes:
        raise SpecError([of_parameter(one, sweep.table) for one in mistakes])
    limit = asyncio.Semaphore(AT_ONCE)

    async def look(path: str, value: Any, *, whole: bool) -> tuple[Any, Mistakes]:
        """Return the value with what was found for it, and the mistakes in it."""
        settings = {**first, path: value}
        async with limit:
            if whole:
                one, wrong = await _checked(ctx, sweep, settings, tenant)
                names = _names(one)
            else:
                names, wrong = await _looked_up(ctx, sweep, settings, path, tenant)
        uses.update(_uses(names))
        return _with_names(path, value, names), [{**of_parameter(one, sweep.table), "value": value} for one in wrong]

    refer = {path: one for path, one in sweep.table.parameters.items() if path.partition(".")[0] in REFERRING}
    others = [(path, value) for path, one in refer.items() for value in one.ends[1:]]
    answers = await asyncio.gather(
        *(look(path, value, whole=number < MAX_CHECKED) for number, (path, value) in enumerate(others))
    )
    if mistakes := [one for _, wrong in answers for one in wrong]:
        raise SpecError(mistakes)
    parameters, rest = dict(sweep.table.parameters), iter([value for value, _ in answers])
    for path, one in refer.items():
        values = [_with_names(path, one.ends[0], _names(found)), *(next(rest) for _ in one.ends[1:])]
        mistakes += _repeated(path, one.ends, values)
        if one.values is not None:
            parameters[path] = one.model_copy(update={"values": values})
    if mistakes:
        raise SpecError(mistakes)
    return Checked(found, parameters, sorted({*uses, *_uses(_names(found))}))


def _repeated(path: str, written: Iterable[Any], values: list[Any]) -> Mistakes:
    """Return the values that were found to be the same as an earlier one."""
    return [
        mistake(f"sweep.parameters.{path}", text, "is the same as another value: leave one of them out")
        for place, (text, value) in enumerate(zip(written, values, strict=True))
        if value != text and value in [*values[:place], *values[place + 1 :]]
    ]


async def _checked(ctx: Context, sweep: Sweep, settings: Settings, tenant: str) -> tuple[Found, Mistakes]:
    mistakes: Mistakes = []
    data = child_of(sweep.table, sweep.base, settings)
    found = await check_references(ctx, data, parse_spec(data), tenant, mistakes)
    return found, mistakes


async def _looked_up(
    ctx: Context, sweep: Sweep, settings: Settings, path: str, tenant: str
) -> tuple[dict[Place, str], Mistakes]:
    """Find the upload and the checkpoints that the setting `path` names, and nothing else."""
    spec = parse_spec(child_of(sweep.table, sweep.base, settings))
    names: dict[Place, str] = {}
    mistakes: Mistakes = []
    name = spec.environment.name
    if _is_below(("environment", "name"), path) and uploads.is_upload(name):
        try:
            exact = await asyncio.to_thread(Uploads.of(ctx.settings).resolve, name, tenant)
            names["environment", "name"] = str(exact)
        except SpecError as error:
            mistakes += error.mistakes
    for place, origin in _origins(spec).items():
        if _is_below(place, path):
            found = await starting.find(ctx, origin, tenant)
            if isinstance(found, str):
                mistakes.append(mistake(".".join(place), origin.checkpoint, found))
            else:
                names[place] = found.name
    return names, mistakes


def _origins(spec: JobSpec) -> dict[Place, Origin]:
    """Return the checkpoints that a spec names."""
    found: dict[Place, Origin] = {} if spec.start is None else {("start", "from"): spec.start}
    for name, policy in spec.policies.items():
        if policy.start is not None:
            found["policies", name, "start", "from"] = policy.start
    for place, player in all_players(spec).items():
        if player.frozen is not None:
            found[_of_player(place)] = Origin.model_validate({"from": player.frozen})
    return found


def _names(found: Found) -> dict[Place, str]:
    """Return the version of the environment and the checkpoints that were found, by the settings that name them."""
    names: dict[Place, str] = {}
    if found.asked.check is not None:
        names["environment", "name"] = found.asked.check.name
    if found.chosen is not None:
        names["start", "from"] = found.chosen.name
    names |= {("policies", name, "start", "from"): source.name for name, source in found.of_policies.items()}
    return names | {_of_player(place): player.source.name for place, player in found.players.items()}


def _uses(names: Mapping[Place, str]) -> list[str]:
    """Return these names but those of environments that are no uploads."""
    return [name for place, name in names.items() if place != ("environment", "name") or uploads.is_upload(name)]


def _of_player(place: str) -> Place:
    """`place`: of a player, as in check_seats.Found; a seat's name may have dots."""
    if place.startswith(AGAINST):
        return (*place.split("."), "frozen")
    table, _, seat = place.partition(".")
    return table, seat, "frozen"


def _is_below(place: Place, path: str) -> bool:
    parts = tuple(path.split("."))
    return place[: len(parts)] == parts


def _with_names(path: str, value: Any, names: Mapping[Place, str]) -> Any:
    """Return a value of the setting `path` with these names in it."""
    changed = copy.deepcopy(value)
    for place, name in names.items():
        if not _is_below(place, path):
            continue
        *above, last = place[path.count(".") + 1 :] or [""]
        if not last:
            return name
        table = changed
        for part in above:
            table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
        table[last] = name
    return changed


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


def _opponents(sweep: Sweep, found: Found) -> dict[str, str]:
    """Return the names of the opponents that are the same for all jobs, as in names_of_opponents."""
    players = {place: one for place, one in found.players.items() if not _is_varied(f"{place}.frozen", sweep)}
    return names_of_opponents(parse_spec(sweep.first_job), players)


def _settled(parameters: Mapping[str, SweepParameter], names: Mapping[str, str]) -> dict[str, SweepParameter]:
    """Return parameters with the metrics that jobs report. Raises SpecError."""
    settled: dict[str, SweepParameter] = {}
    mistakes: Mistakes = []
    for path, one in parameters.items():
        if (new := settled_path(path, names)) in settled or (new != path and new in parameters):
            problem = f"is of the same metric as {new}: leave one of them out"
            mistakes.append(mistake(f"sweep.parameters.{path}", None, problem))
        settled[new] = one
        if one.values is not None:
            values = [settled_value(path, value, names) for value in one.values]
            mistakes += _repeated(path, one.values, values)
            settled[new] = one.model_copy(update={"values": values})
    if mistakes:
        raise SpecError(mistakes)
    return settled
