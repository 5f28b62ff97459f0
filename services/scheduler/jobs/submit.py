"""Turns a submitted spec into a job in the queue, or returns every mistake in it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import string
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from opentinker.services.scheduler.jobs import check_adapters, check_environment, check_model
from opentinker.services.scheduler.jobs import check_start_checkpoint as starting
from opentinker.services.scheduler.jobs.check_dataset import absolute, check_data
from opentinker.services.scheduler.jobs.disk_threads import ReferencesAway, on_disk
from opentinker.shared.config import Settings
from opentinker.shared.data.dry_run import loads_weights, mistake_in
from opentinker.shared.data.readable_paths import readable_by, resolved
from opentinker.shared.durable_files import local_path, not_on_hub
from opentinker.shared.messaging.subjects import WAKE
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, ModelSpec, StartSpec, parse_spec
from opentinker.shared.types.errors import SpecError

_ALPHABET = string.ascii_lowercase + string.digits
Mistakes = list[dict[str, Any]]


class Found(NamedTuple):
    """References of a spec: its environment, start checkpoint, and served adapters."""

    asked: check_environment.EnvironmentCheck = check_environment.EnvironmentCheck()
    chosen: starting.SourceCheckpoint | None = None
    adapters: check_adapters.Found = ()


def new_job_id() -> str:
    return "j-" + "".join(secrets.choice(_ALPHABET) for _ in range(10))


async def submit(
    ctx: Context, data: Any, tenant: str, idempotency: str = "", *, key: str = "", trace: str = ""
) -> tuple[str, bool]:
    """`key` and `trace` as in JobRecord.

    Returns the job's id and whether an equal request with the same key had made it before.

    Equal is what is written, with its defaults: what the checks look at may have changed or gone since then.
    Raises SpecError with every mistake, Conflict if the key was used for another spec.
    """
    spec, body_hash, mistakes = _read(data)
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
    if spec.kind == "inference":
        plain["serving"]["idle_s"] = kept_idle_s(spec, ctx.settings)
    asked = found.asked
    if asked.check is not None:
        plain["environment"]["name"] = asked.check.name
    new = new_job_id()
    await _keep(ctx, plain, found, tenant, new)
    id = await ctx.store.create_job(
        id=new, spec=plain, tenant=tenant, idempotency=idempotency, body_hash=body_hash, key=key, trace=trace
    )
    if id != new:
        await asyncio.to_thread(starting.drop, ctx.settings.data_dir, new)
    if id == new and asked.check is not None and not asked.answered:
        await ctx.store.update(
            id,
            event="environment_unchecked",
            detail={"why": "no env worker answered; it is checked at the first episode"},
        )
    await ctx.bus.emit(WAKE, {"job": id}, who="scheduler")
    return id, id != new


def _check_priority(ctx: Context, spec: JobSpec | None, tenant: str) -> Mistakes:
    """Check the priority against the operator's limit for this tenant."""
    limits = ctx.settings.tenants.get(tenant) or ctx.settings.tenants.get("*")
    if spec is None or limits is None or spec.resources.priority <= limits.max_priority:
        return []
    problem = f"may be at most {limits.max_priority} for your jobs here (max_priority of the scheduler's tenants)"
    return [{"field": "resources.priority", "value": spec.resources.priority, "problem": problem}]


def kept_idle_s(spec: JobSpec, settings: Settings) -> float | None:
    """Return after which idle time an inference job ends: its own setting, or the operator's."""
    if spec.serving.idle_s is not None or settings.inference_idle_s is None:
        return spec.serving.idle_s
    return settings.inference_idle_s + (spec.serving.sleep_s or 0.0)


def _read(data: Any) -> tuple[JobSpec | None, str, Mistakes]:
    """The spec, if it is one, and its hash, if it can be stored."""
    spec: JobSpec | None = None
    try:
        spec = parse_spec(data)
        return spec, _hash(spec), []
    except SpecError as error:
        return spec, "", error.mistakes


async def _keep(ctx: Context, plain: dict[str, Any], found: Found, tenant: str, new: str) -> None:
    """Keep the job's references for it. Raises SpecError if one has gone since it was checked."""
    asked, chosen = found.asked, found.chosen
    if (start := plain.get("start")) is not None and (live := StartSpec.model_validate(start)).live:
        plain["model"] = starting.followed(plain, await ctx.store.job(live.job))
    if chosen is not None:
        plain |= await asyncio.to_thread(_started, plain, chosen)
        if problem := await asyncio.to_thread(starting.keep, chosen, ctx.settings.data_dir, new):
            raise SpecError([{"field": "start.from", "value": chosen.name, "problem": problem}])
    for place, (name, adapter) in enumerate(found.adapters):
        plain["serving"]["adapters"][place]["from"] = adapter.name
        if problem := await asyncio.to_thread(starting.keep, adapter, ctx.settings.data_dir, new, name):
            field = f"serving.adapters.{place}.from"
            raise SpecError([{"field": field, "value": adapter.name, "problem": problem}])
    if asked.check is not None and (gone := await check_environment.gone(ctx, asked.check, tenant)):
        await asyncio.to_thread(starting.drop, ctx.settings.data_dir, new)
        raise SpecError(gone)


async def check_references(ctx: Context, data: Any, spec: JobSpec | None, tenant: str, mistakes: Mistakes) -> Found:
    """Check everything that a spec refers to, and append to `mistakes`. `spec`: of `data`, None if it is invalid.

    Raises ReferencesAway after `submission_check_timeout_s`.
    """
    limit_s = ctx.settings.submission_check_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await _check_references(ctx, data, spec, tenant, mistakes)
    except TimeoutError:
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
            families = tasks.create_task(check_model.look_at(ctx, spec))
            starts = tasks.create_task(_check_start(ctx, _start(data, spec), spec, tenant))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    asked, files, (wrong_start, chosen) = asking.result(), looking.result(), starts.result()
    wrong_adapters, beside = await check_adapters.look_at(ctx, data, spec, files.base, tenant)
    mistakes += _check_priority(ctx, spec, tenant) + families.result()
    mistakes += asked.mistakes + files.model + wrong_start + wrong_adapters + files.frozen + files.data
    return Found(asked, chosen, beside)


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
        "" if spec is None else _resolved(spec.model.base),
        [] if base is None else _check_model(base, model, weights),
        _check_frozen(data),
        [] if spec is None or spec.data is None else check_data(spec.data, spec.kind),
    )


def _started(plain: dict[str, Any], chosen: starting.SourceCheckpoint) -> dict[str, Any]:
    """Blocking. The parts of a spec that say which checkpoint it is, and, where nothing is trained, which adapter."""
    model = plain["model"]
    adapter = starting.adapter_in(chosen) if plain["kind"] in ("inference", "eval") else None
    if adapter is not None:
        model = {**model, "lora": adapter.model_dump(mode="json")}
    return {"model": model, "start": {**plain["start"], "from": chosen.name}}


def _make_absolute(plain: dict[str, Any], spec: JobSpec) -> None:
    """Blocking. The paths in a stored spec, of models and of data."""
    named = (plain["model"], plain.get("teacher"), plain.get("value_model"), *plain.get("reward_models", []))
    for part in filter(None, named):
        part["base"] = _resolved(part["base"])
    if spec.data is not None:
        plain["data"] |= absolute(spec.data)


def _hash(spec: JobSpec) -> str:
    """Raises SpecError."""
    try:
        return hashlib.sha256(orjson.dumps(spec.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()
    except TypeError as error:
        raise SpecError([{"field": "(whole spec)", "value": None, "problem": f"cannot be stored: {error}"}]) from None


def _start(data: Any, spec: JobSpec | None) -> StartSpec | None:
    if spec is not None:
        return spec.start
    try:
        return StartSpec.model_validate(data.get("start")) if isinstance(data, dict) else None
    except ValidationError:
        return None  # not given, or among the mistakes already


async def _check_start(
    ctx: Context, start: StartSpec | None, spec: JobSpec | None, tenant: str
) -> tuple[Mistakes, starting.SourceCheckpoint | None]:
    """The checkpoint to start from, compared with a spec that is right otherwise."""
    if start is None:
        return [], None
    if start.live:
        base = "" if spec is None else await on_disk(ctx, _resolved, spec.model.base)
        wrong = await starting.mistakes_in_live(ctx, start, spec, base, tenant)
        return [{**mistake, "value": mistake["value"] or start.checkpoint} for mistake in wrong], None
    found = await starting.find(ctx, start, tenant)
    if isinstance(found, str):
        return [{"field": "start.from", "value": start.checkpoint, "problem": found}], None
    if spec is None:
        return [], found
    base = await on_disk(ctx, _resolved, spec.model.base)
    wrong = await on_disk(ctx, starting.mistakes_in, found, spec, base)
    return [{**mistake, "value": start.checkpoint} for mistake in wrong], found


def _base(data: Any, spec: JobSpec | None) -> str | None:
    if spec is not None:
        return spec.model.base
    part = data.get("model") if isinstance(data, dict) else None
    base = part.get("base") if isinstance(part, dict) else None
    return base if isinstance(base, str) and base else None


def _resolved(base: str) -> str:
    path = local_path(base)
    return base if path is None else str(resolved(path))


def _check_model(base: str, model: ModelSpec | None, weights: bool) -> Mistakes:
    """Check a local model without loading it; `weights`: those will be loaded too. Blocking."""
    path = local_path(base) if base else None
    if path is None:
        why = not_on_hub(base) if base else None
        return [_mistake(base, why)] if why else []
    try:
        if why := mistake_in(path, weights):
            return [_mistake(base, why)]
        if model is not None and model.chat_template == "model" and _lacks_template(path):
            problem = f'the tokenizer in {base} has no chat template; use one that has, or chat_template = "plain"'
            return [{"field": "model.chat_template", "value": "model", "problem": problem}]
    except OSError as error:
        return [_mistake(base, error.strerror or str(error))]
    return []


def _check_frozen(data: Any) -> Mistakes:
    """Blocking. Of the models that reference-forward will load, even if other parts of the spec are wrong."""
    if not isinstance(data, dict):
        return []
    found = [
        {**mistake, "field": "teacher.base"} for mistake in _check_model(_name_in(data.get("teacher")), None, True)
    ]
    base = _name_in(data.get("value_model"))
    wrong = _check_model(base, None, True) or _check_classifier(base, "token")
    found += [{**mistake, "field": "value_model.base"} for mistake in wrong]
    judges = data.get("reward_models")
    for i, judge in enumerate(judges if isinstance(judges, list) else []):
        base = _name_in(judge)
        wrong = _check_model(base, None, True) or _check_classifier(base, "sequence") or _check_template(base)
        found += [{**mistake, "field": f"reward_models.{i}.base"} for mistake in wrong]
    return found


def _name_in(part: Any) -> str:
    base = part.get("base") if isinstance(part, dict) else None
    return base if isinstance(base, str) else ""


def _check_classifier(base: str, kind: str) -> Mistakes:
    """Check a local directory with a config.json. `kind`: what the model classifies."""
    path = local_path(base) if base else None
    if path is None:
        return []
    try:
        architectures = orjson.loads((path / "config.json").read_bytes()).get("architectures") or []
        if not any(str(name).endswith(f"For{kind.title()}Classification") for name in architectures):
            said = ", ".join(map(str, architectures)) or "no architecture"
            return [_mistake(base, f"is no {kind} classifier: its config.json says {said}")]
    except (OSError, AttributeError, TypeError, orjson.JSONDecodeError):
        return []  # reference-forward has more to say about such a file than we
    return []


def _check_template(base: str) -> Mistakes:
    """Check the chat template of a local directory."""
    path = local_path(base) if base else None
    if path is None or not _lacks_template(path):
        return []
    return [_mistake(base, "has no chat template: add the one that it was trained with as chat_template.jinja")]


def _lacks_template(path: Path) -> bool:
    config = path / "tokenizer_config.json"
    if (path / "chat_template.jinja").exists() or (path / "chat_template.json").exists() or not config.is_file():
        return False
    try:
        return not orjson.loads(config.read_bytes()).get("chat_template")
    except (orjson.JSONDecodeError, AttributeError):
        return False  # the loader has more to say about such a file than we


def _mistake(base: str, problem: str) -> dict[str, Any]:
    return {"field": "model.base", "value": base, "problem": problem}
