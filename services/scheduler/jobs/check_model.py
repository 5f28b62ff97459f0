"""Refuses a submitted spec whose models no worker could load, judged by the files of local directories."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.shared.data.dry_run import is_served, loads_weights, mistake_in
from opentinker.shared.data.model_families import (
    VISION_FAMILIES,
    indivisible,
    read_config,
    unsupported_family,
    unsupported_on_cpu,
)
from opentinker.shared.data.readable_paths import resolved
from opentinker.shared.durable_files import local_path, not_on_hub
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import JobSpec, ModelSpec
from opentinker.shared.spec.engines import SHARED
from opentinker.shared.spec.matches.seats import MAX_POLICIES
from opentinker.shared.spec.train import engine_ranks
from opentinker.shared.types.core import Pool
from opentinker.shared.types.mistakes import written

Mistakes = list[dict[str, Any]]


async def check_model(ctx: Context, spec: JobSpec | None) -> Mistakes:
    """Check local model directories, if the whole spec is valid."""
    if spec is None or not loads_weights(spec):
        return []
    served = is_served(spec)
    models = {"model": spec.model}
    models |= {f"policies.{name}.model": policy.model for name, policy in spec.policies.items()}
    found: list[tuple[str, Any, str]] = []
    for field, model in models.items():
        config = await on_disk(ctx, config_of, model.base)
        problem = unsupported_family(config, served=served)
        if not problem and served and await _only_cpus(ctx, spec):
            problem = unsupported_on_cpu(config)
        if not problem and served and (problem := indivisible(config, engine_ranks(spec))):
            found.append(("rollout.tensor_parallel", engine_ranks(spec), f"does not fit: {model.base} {problem}"))
            continue
        found.append((f"{field}.base", model.base, problem or _unshareable(config, spec)))
        if model.train_vision and config and config.get("model_type") not in VISION_FAMILIES:
            problem = f"does not apply: {model.base} is a {config.get('model_type')} model, without a vision tower here"
            found.append((f"{field}.train_vision", True, problem))
    teachers = {f"policies.{name}.teacher.base": policy.teacher for name, policy in spec.policies.items()}
    for field, teacher in {"teacher.base": spec.teacher, **teachers}.items():
        if teacher is not None and (field == "teacher.base" or teacher != spec.teacher):
            problem = unsupported_family(await on_disk(ctx, config_of, teacher.base), served=False)
            found.append((field, teacher.base, problem))
    return [{"field": field, "value": value, "problem": problem} for field, value, problem in found if problem]


def config_of(base: str) -> dict[str, Any]:
    path = local_path(base)
    return {} if path is None else read_config(path)


def _unshareable(config: dict[str, Any], spec: JobSpec) -> str:
    """Return why jobs cannot share a trainer with this model as their base; empty if they can, or do not."""
    if spec.resources.trainer != "shared" or config.get("model_type") not in VISION_FAMILIES:
        return ""
    return f"is a vision model, whose adapters cannot share a base yet; take resources.trainer = 'own' ({SHARED})"


async def _only_cpus(ctx: Context, spec: JobSpec) -> bool:
    """There are rollout workers, and none has a GPU; those that the scheduler would start may have some."""
    if ctx.settings.launcher != "none" or spec.resources.rollout_gpus:
        return False
    gpus = [worker.gpus for worker in await ctx.store.workers() if worker.pool == Pool.ROLLOUT]
    return bool(gpus) and not any(gpus)


def resolved_base(base: str) -> str:
    path = local_path(base)
    return base if path is None else str(resolved(path))


def mistakes_in_model(base: str, model: ModelSpec | None, weights: bool) -> Mistakes:
    """Return the mistakes in a local model without loading it; `weights`: check its weight files too. Blocking."""
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


def mistakes_in_frozen_models(data: Any) -> Mistakes:
    """Blocking. Of the models that reference-forward will load, even if other parts of the spec are wrong."""
    judges, policies = written(data, "reward_models"), written(data, "policies")
    owns = islice(policies.items() if isinstance(policies, dict) else (), MAX_POLICIES)
    tables = {"": data, **{f"policies.{name}.": own for name, own in owns}}
    parts = {f"{at}{name}": written(table, name) for at, table in tables.items() for name in ("teacher", "value_model")}
    parts |= {f"reward_models.{i}": judge for i, judge in enumerate(judges if isinstance(judges, list) else [])}
    found: Mistakes = []
    for name, part in parts.items():
        base = written(part, "base")
        if isinstance(base, str):
            wrong = mistakes_in_model(base, None, True) or _check_head(base, name.rpartition(".")[2])
            found += [{**mistake, "field": f"{name}.base"} for mistake in wrong]
    return found


def _check_head(base: str, name: str) -> Mistakes:
    """Check a local directory: which classifier it is, and that a reward model's has a chat template."""
    path = local_path(base) if base else None
    if path is None or name == "teacher":
        return []
    kind = "token" if name == "value_model" else "sequence"
    try:
        architectures = orjson.loads((path / "config.json").read_bytes()).get("architectures") or []
        if not any(str(name).endswith(f"For{kind.title()}Classification") for name in architectures):
            said = ", ".join(map(str, architectures)) or "no architecture"
            return [_mistake(base, f"is no {kind} classifier: its config.json says {said}")]
    except (OSError, AttributeError, TypeError, orjson.JSONDecodeError):
        pass  # reference-forward has more to say about such a file than we
    if name == "value_model" or not _lacks_template(path):
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
