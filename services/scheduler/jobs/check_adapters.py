"""Checks the adapters that an inference job serves: finds them, and compares them with the base.

`kept_checkpoints.py` keeps each in {data_dir}/jobs/{job}/start/adapters/{name}."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from opentinker.services.scheduler.jobs.check_start_checkpoint import Mistakes, SourceCheckpoint, find
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.shared.durable_files import local_path
from opentinker.shared.runtime.service import Context
from opentinker.shared.spec import AdapterSpec, JobSpec
from opentinker.shared.spec.serving import MAX_ADAPTERS, MAX_LORA_RANK
from opentinker.shared.types.manifest import ADAPTER
from opentinker.shared.types.mistakes import right_parts, written

CONFIG = "adapter_config.json"
TOKENIZER = "tokenizer.json"
Found = Sequence[tuple[str, SourceCheckpoint]]
"""Name and checkpoint of each, in the order of the spec."""


async def check_adapters(
    ctx: Context, data: Any, spec: JobSpec | None, base: str, tenant: str
) -> tuple[Mistakes, Found]:
    """`data`: the spec as it was sent. `base`: model.base, an absolute path if it is a directory."""
    mistakes: Mistakes = []
    found: list[tuple[str, SourceCheckpoint]] = []
    for place, adapter in _adapters(data, spec):
        chosen = await find(ctx, adapter, tenant)
        if isinstance(chosen, str):
            problems = [chosen]
        else:
            found.append((adapter.name, chosen))
            problems = [] if spec is None else await on_disk(ctx, _misfits, chosen, spec, base)
        field = f"serving.adapters.{place}.from"
        mistakes += [{"field": field, "value": adapter.checkpoint, "problem": problem} for problem in problems]
    return mistakes, found


def _adapters(data: Any, spec: JobSpec | None) -> Iterable[tuple[int, AdapterSpec]]:
    """Return adapters by their place in the spec; if the spec has mistakes, the valid ones among the first
    MAX_ADAPTERS."""
    if spec is not None:
        return enumerate(spec.serving.adapters)
    listed = written(data, "serving", "adapters")
    return right_parts(AdapterSpec, dict(enumerate(listed[:MAX_ADAPTERS] if isinstance(listed, list) else []))).items()


def _misfits(chosen: SourceCheckpoint, spec: JobSpec, base: str) -> list[str]:
    """Blocking. Why it cannot be served on this base."""
    if ADAPTER not in chosen.manifest.files:
        weights = any(name.endswith(".safetensors") and "/" not in name for name in chosen.manifest.files)
        held = "full weights, which a separate job serves (start.from)" if weights else "no weights"
        return [f"it is no adapter: it holds {held}"]
    theirs = chosen.job.spec["model"]
    if theirs["base"] != base:
        return [f"it is an adapter of {theirs['base']}, and model.base is {base}"]
    try:
        rank = int(orjson.loads((chosen.directory / CONFIG).read_bytes())["r"])
        problems = [] if rank <= MAX_LORA_RANK else [f"its rank is {rank}, and vLLM serves {MAX_LORA_RANK} at most"]
        if (path := local_path(base)) is not None and (odd := _other_ids(chosen.directory, path)):
            problems.append(f"it was trained with another tokenizer than that of {base}: {odd}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"it cannot be read: {error}"]
    if theirs["chat_template"] != spec.model.chat_template:
        said = f"{theirs['chat_template']!r}, and this job renders with {spec.model.chat_template!r}"
        problems.append(f"it was trained with model.chat_template = {said}")
    return problems


def _other_ids(checkpoint: Path, base: Path) -> str:
    """Return how the tokenizer saved with a checkpoint differs from the base's; empty if it does not, or if one is
    missing."""
    if not (checkpoint / TOKENIZER).is_file() or not (base / TOKENIZER).is_file():
        return ""
    theirs, ours = _ids(checkpoint / TOKENIZER), _ids(base / TOKENIZER)
    odd = sorted(token for token, id in ours.items() if theirs.get(token) != id)
    if odd:
        return f"token {odd[0]!r} has id {ours[odd[0]]} here and {theirs.get(odd[0], 'none')} there"
    return f"it has {len(theirs)} tokens, this one {len(ours)}" if len(theirs) > len(ours) else ""


def _ids(file: Path) -> dict[str, int]:
    """Raises OSError, ValueError, KeyError, TypeError."""
    told = orjson.loads(file.read_bytes())
    vocabulary = told["model"]["vocab"]
    ids = vocabulary if isinstance(vocabulary, dict) else {entry[0]: id for id, entry in enumerate(vocabulary)}
    return {**ids, **{token["content"]: token["id"] for token in told.get("added_tokens") or []}}
