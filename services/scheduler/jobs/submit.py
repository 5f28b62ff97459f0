"""Turns a submitted spec into a job in the queue, or returns every mistake in it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import string
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from opentinker.services.scheduler.jobs import (
    check_adapters,
    check_environment,
    check_model,
    check_seats,
    kept_checkpoints,
)
from opentinker.services.scheduler.jobs import check_start_checkpoint as starting
from opentinker.services.scheduler.jobs.check_dataset import absolute, check_data
from opentinker.services.scheduler.jobs.check_gpus import check_gpus
from opentinker.services.scheduler.jobs.choose_trainer import choose_trainer
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway, on_disk
from opentinker.services.scheduler.jobs.opponent_names import names_of_opponents, settle_metrics
from opentinker.services.scheduler.notifications.delivery import check_notify
from opentinker.shared.config import Settings
from opentinker.shared.data.dry_run import loads_weights
from opentinker.shared.data.readable_paths import readable_by
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, StartSpec, parse_spec
from opentinker.shared.spec.matches.policies import spec_of
from opentinker.shared.spec.matches.pools import mistakes_in_pools
from opentinker.shared.spec.matches.seats import MAX_POLICIES
from opentinker.shared.state.notifications import Notifications
from opentinker.shared.state.redis_script import UNFENCED
from opentinker.shared.types.errors import Conflict, SpecError
from opentinker.shared.types.manifest import adapter_of, frozen_of, start_of
from opentinker.shared.types.mistakes import mistake, right_parts, written

_ALPHABET = string.ascii_lowercase + string.digits
Mistakes = list[dict[str, Any]]


class Found(NamedTuple):
    """References of a spec: its environment, start checkpoint, served adapters, and checkpoints that play in it."""

    asked: check_environment.EnvironmentCheck = check_environment.EnvironmentCheck()
    chosen: starting.SourceCheckpoint | None = None
    of_policies: Mapping[str, starting.SourceCheckpoint] = MappingProxyType({})
    """Checkpoints that policies start from."""
    adapters: check_adapters.Found = ()
    players: check_seats.Found = MappingProxyType({})


def new_id(kind: str) -> str:
    """`kind`: j for jobs, s for sweeps."""
    return f"{kind}-" + "".join(secrets.choice(_ALPHABET) for _ in range(10))


async def submit(
    ctx: Context,
    data: Any,
    tenant: str,
    idempotency: str = "",
    *,
    key: str = "",
    trace: str = "",
    leader: int = UNFENCED,
    stored: bool = False,
) -> tuple[str, bool]:
    """`key` and `trace` as in JobRecord; `leader`: number of the leadership that the job is submitted under; `stored`:
    the spec is of a sweep that was accepted, maybe by an earlier release.

    Returns the job's id and whether an equal request with the same key had made it before.

    Equal is what is written, with its defaults: what the checks read may have changed or gone since then.
    Raises SpecError with every mistake, Conflict if the key was used for another spec; Fenced: another scheduler leads.
    """
    spec, body_hash, mistakes = await asyncio.to_thread(_read, data, stored)  # a body may hold 100,000 names
    if spec is not None and idempotency and not mistakes:
        made = await ctx.store.find_idempotent(tenant, idempotency, body_hash)
        if made is not None:
            await ctx.bus.emit(WAKE, {"job": made}, who="scheduler")
            return made, True
    found = await check_references(ctx, data, spec, tenant, mistakes)
    if spec is None or mistakes:
        raise SpecError(mistakes)
    plain = spec.model_dump(mode="json")
    await on_disk(ctx, _make_absolute, plain, spec)
    plain["resources"]["trainer"] = await choose_trainer(ctx, spec, plain)
    if spec.kind == "inference":
        plain["serving"]["idle_s"] = kept_idle_s(spec, ctx.settings)
    asked = found.asked
    if asked.check is not None:
        plain["environment"]["name"] = asked.check.name
    new = new_id("j")
    try:
        settle_metrics(plain, names_of_opponents(spec, found.players))
        await _keep_references(ctx, plain, found, tenant, new)
        if spec.notify:
            await Notifications(ctx.store.redis).follow(new, time.time())
        id = await ctx.store.create_job(
            id=new,
            spec=plain,
            tenant=tenant,
            idempotency=idempotency,
            body_hash=body_hash,
            key=key,
            trace=trace,
            leader=leader,
        )
    except (SpecError, Conflict):  # after any other error the job may be stored; if it is not, the sweep removes it
        kept_checkpoints.forget(ctx, new)
        raise
    if id != new:
        kept_checkpoints.forget(ctx, new)
    elif asked.check is not None and not asked.answered:
        detail = {"why": "no env worker answered; it is checked at the first episode"}
        await ctx.store.update(id, event="environment_unchecked", detail=detail)
    await ctx.bus.emit(WAKE, {"job": id}, who="scheduler")
    return id, id != new


def _check_priority(ctx: Context, spec: JobSpec | None, tenant: str) -> Mistakes:
    """Check the priority against the operator's limit for this tenant."""
    limits = ctx.settings.tenants.get(tenant) or ctx.settings.tenants.get("*")
    if spec is None or limits is None or spec.resources.priority <= limits.max_priority:
        return []
    problem = f"may be at most {limits.max_priority} for your jobs here (max_priority of the scheduler's tenants)"
    return [mistake("resources.priority", spec.resources.priority, problem)]


def kept_idle_s(spec: JobSpec, settings: Settings) -> float | None:
    """Return after which idle time an inference job ends: its own setting, or the operator's."""
    if spec.serving.idle_s is not None or settings.inference_idle_s is None:
        return spec.serving.idle_s
    return settings.inference_idle_s + (spec.serving.sleep_s or 0.0)


def _read(data: Any, stored: bool) -> tuple[JobSpec | None, str, Mistakes]:
    """The spec, if it is one, and its hash, if it can be stored."""
    spec: JobSpec | None = None
    try:
        spec = parse_spec(data, stored=stored)
        text = orjson.dumps(spec.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
    except SpecError as error:
        return None, "", error.mistakes
    except TypeError as error:
        return spec, "", [mistake("(whole spec)", None, f"cannot be stored: {error}")]
    return spec, hashlib.sha256(text).hexdigest(), []


async def _keep_references(ctx: Context, plain: dict[str, Any], found: Found, tenant: str, new: str) -> None:
    """Keep checkpoints that the job starts from, serves or plays against. Raises SpecError if one has gone since it was
    checked."""
    asked, chosen, data_dir = found.asked, found.chosen, ctx.settings.data_dir
    if (start := plain.get("start")) is not None and (live := StartSpec.model_validate(start)).live:
        plain["model"] = starting.followed(plain, await ctx.store.job(live.job))
    references = []
    if chosen is not None:
        plain |= await on_disk(ctx, _started, plain, chosen)
        references.append(kept_checkpoints.Reference("start.from", chosen, start_of(data_dir, new)))
    for name, source in found.of_policies.items():
        plain["policies"][name]["start"]["from"] = source.name
        kept = start_of(data_dir, new, name)
        references.append(kept_checkpoints.Reference(f"policies.{name}.start.from", source, kept))
    for number, (name, adapter) in enumerate(found.adapters):
        plain["serving"]["adapters"][number]["from"] = adapter.name
        kept = adapter_of(data_dir, new, name)
        references.append(kept_checkpoints.Reference(f"serving.adapters.{number}.from", adapter, kept))
    for place, (source, model) in found.players.items():
        check_seats.settle_player(plain, place, {"frozen": source.name, "model": model})
        kept = frozen_of(data_dir, new, source.name)
        if not any(reference.place == kept for reference in references):
            references.append(kept_checkpoints.Reference(f"{place}.frozen", source, kept))
    if references and (mistakes := await kept_checkpoints.keep(ctx, references, new, tenant)):
        raise SpecError(mistakes)
    if asked.check is not None and (gone := await check_environment.gone(ctx, asked.check, tenant)):
        raise SpecError(gone)


async def check_references(ctx: Context, data: Any, spec: JobSpec | None, tenant: str, mistakes: Mistakes) -> Found:
    """Check everything that a spec refers to, and append to `mistakes`. `spec`: of `data`, None if it is invalid.

    Raises ReferencesAway after `submission_check_timeout_s`.
    """
    limit_s = ctx.settings.submission_check_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await _check_references(ctx, data, spec, tenant, mistakes)
    except TimeoutError:
        if not limit.expired():  # something else timed out
            raise
        environment = "" if spec is None else spec.environment.name
        what = f"environment {environment!r}, " if environment else ""
        problem = f"{what}files and checkpoints that the spec refers to were not checked within {limit_s:g} s"
        raise ReferencesAway(problem) from None


async def _check_references(ctx: Context, data: Any, spec: JobSpec | None, tenant: str, mistakes: Mistakes) -> Found:
    readable = await readable_by(ctx.store, ctx.settings, tenant, data, partial(on_disk, ctx))
    if wrong_places := await on_disk(ctx, readable.mistakes_in, data, files=True):  # no other check reads those
        mistakes += wrong_places
        return Found()
    try:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                check_environment.check_environment(ctx, data, spec, tenant, mistakes, readable.own)
            )
            looking = tasks.create_task(on_disk(ctx, _check_files, data, spec))
            families = tasks.create_task(check_model.check_model(ctx, spec))
            gpus = tasks.create_task(check_gpus(ctx, spec))
            starts = tasks.create_task(_check_start(ctx, _start(data, spec), spec, tenant))
            others = tasks.create_task(_check_policies(ctx, data, spec, tenant))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    asked, files, (wrong_start, chosen) = asking.result(), looking.result(), starts.result()
    wrong_policies, of_policies = others.result()
    wrong_adapters, beside = await check_adapters.check_adapters(ctx, data, spec, files.base, tenant)
    wrong_seats, frozen = await check_seats.check_frozen_seats(ctx, data, spec, tenant)
    mistakes += await check_seats.check_url_seats(ctx, data, spec, tenant)
    mistakes += await check_notify(ctx.settings, spec)
    mistakes += mistakes_in_pools(spec) if spec is not None else []
    mistakes += _check_priority(ctx, spec, tenant) + families.result() + gpus.result()
    mistakes += asked.mistakes + files.model + wrong_start + wrong_policies + wrong_adapters + wrong_seats
    mistakes += files.frozen + files.data
    return Found(asked, chosen, of_policies, beside, frozen)


class Files(NamedTuple):
    """Local files of a spec: the resolved base model, and the mistakes in each reference."""

    base: str
    model: Mistakes
    frozen: Mistakes
    data: Mistakes


def _check_files(data: Any, spec: JobSpec | None) -> Files:
    """Blocking."""
    base = _base(data, spec)
    model, weights = (None, False) if spec is None else (spec.model, loads_weights(spec))
    return Files(
        "" if spec is None else check_model.resolved_base(spec.model.base),
        ([] if base is None else check_model.mistakes_in_model(base, model, weights)) + _mistakes_in_policies(spec),
        check_model.mistakes_in_frozen_models(data),
        [] if spec is None or spec.data is None else check_data(spec.data, spec.kind),
    )


def _mistakes_in_policies(spec: JobSpec | None) -> Mistakes:
    """Blocking. Check the models of policies that have another than the job."""
    own = {} if spec is None else {name: policy.model for name, policy in spec.policies.items()}
    found = []
    for name, model in own.items():
        if spec is not None and model != spec.model:
            wrong = check_model.mistakes_in_model(model.base, model, loads_weights(spec))
            found += [{**one, "field": f"policies.{name}.{one['field']}"} for one in wrong]
    return found


def _started(plain: dict[str, Any], chosen: starting.SourceCheckpoint) -> dict[str, Any]:
    """Blocking. The parts of a spec that say which checkpoint it is, and, where nothing is trained, which adapter."""
    model = plain["model"]
    adapter = starting.adapter_in(chosen) if plain["kind"] in ("inference", "eval") else None
    if adapter is not None:
        model = {**model, "lora": adapter.model_dump(mode="json")}
    return {"model": model, "start": {**plain["start"], "from": chosen.name}}


def _make_absolute(plain: dict[str, Any], spec: JobSpec) -> None:
    """Blocking. The paths in a stored spec, of models and of data."""
    tables = (plain, *plain.get("policies", {}).values())
    named = [table.get(part) for table in tables for part in ("model", "teacher", "value_model")]
    for part in filter(None, [*named, *plain.get("reward_models", [])]):
        part["base"] = check_model.resolved_base(part["base"])
    if spec.data is not None:
        plain["data"] |= absolute(spec.data)


def _start(data: Any, spec: JobSpec | None) -> StartSpec | None:
    return right_parts(StartSpec, {0: written(data, "start")}).get(0) if spec is None else spec.start


async def _check_start(
    ctx: Context, start: StartSpec | None, spec: JobSpec | None, tenant: str
) -> tuple[Mistakes, starting.SourceCheckpoint | None]:
    """The checkpoint to start from, compared with a spec that is right otherwise."""
    if start is None:
        return [], None
    if start.live:
        base = "" if spec is None else await on_disk(ctx, check_model.resolved_base, spec.model.base)
        wrong = await starting.mistakes_in_live(ctx, start, spec, base, tenant)
        return [{**one, "value": one["value"] or start.checkpoint} for one in wrong], None
    found = await starting.find(ctx, start, tenant)
    if isinstance(found, str):
        return [mistake("start.from", start.checkpoint, found)], None
    if spec is None:
        return [], found
    base = await on_disk(ctx, check_model.resolved_base, spec.model.base)
    wrong = await on_disk(ctx, starting.mistakes_in, found, spec, base)
    return [{**one, "value": start.checkpoint} for one in wrong], found


async def _check_policies(
    ctx: Context, data: Any, spec: JobSpec | None, tenant: str
) -> tuple[Mistakes, dict[str, starting.SourceCheckpoint]]:
    """The checkpoints that policies start from. `data`: the spec as it was sent."""
    if spec is None:
        listed = written(data, "policies")
        named = list(islice((listed if isinstance(listed, dict) else {}).items(), MAX_POLICIES))
        starts = right_parts(StartSpec, {name: written(policy, "start") for name, policy in named})
    else:
        starts = {name: own.start for name, own in spec.policies.items() if own.start is not None}
    mistakes: Mistakes = []
    found: dict[str, starting.SourceCheckpoint] = {}
    for name, start in starts.items():
        if start.live:  # the spec is wrong
            continue
        wrong, chosen = await _check_start(ctx, start, None if spec is None else spec_of(spec, name), tenant)
        mistakes += [{**one, "field": f"policies.{name}.{one['field']}"} for one in wrong]
        if chosen is not None:
            found[name] = chosen
    return mistakes, found


def _base(data: Any, spec: JobSpec | None) -> str | None:
    base = written(data, "model", "base") if spec is None else spec.model.base
    return base if isinstance(base, str) and base else None
