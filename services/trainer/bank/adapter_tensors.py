"""An adapter's tensors by the names of a job's checkpoint, which are those of a LoRA job that trains alone.

So a job's checkpoint fits both kinds of trainers: see `learners/optimizer_state.py` for its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape
from opentinker.services.trainer.bank.base_model import PEFT_PREFIX
from opentinker.shared.data.safetensors_header import difference
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER, OPTIMIZER

MOMENTS = ("exp_avg", "exp_avg_sq")


def matrices(shape: AdapterShape, vector: Tensor, *, infix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield views of a vector by PEFT's names; with infix `.default`, by those of a model's parameters."""
    for layer, pair in shape.pairs(vector).items():
        yield f"{PEFT_PREFIX}{layer}.lora_A{infix}.weight", pair.a
        yield f"{PEFT_PREFIX}{layer}.lora_B{infix}.weight", pair.b


def trainer_tensors(adapter: Adapter, *, masters: bool) -> dict[str, Tensor]:
    """Return moments and step count by parameter, none before the first step, and with `masters` the weights."""
    found: dict[str, Tensor] = {}
    vectors = {moment: getattr(adapter, moment) for moment in MOMENTS} if adapter.steps else {}
    if masters:
        vectors["master"] = adapter.weights
    for kind, vector in vectors.items():
        found |= {f"{kind}/{name}": view for name, view in matrices(adapter.lora, vector, infix=".default")}
    if adapter.steps:
        names = [name for name, _ in matrices(adapter.lora, adapter.weights, infix=".default")]
        found |= {f"step/{name}": torch.tensor(float(adapter.steps)) for name in names}
    return found


def read_checkpoint(fresh: Adapter, directory: Path, *, moments: bool) -> tuple[dict[str, Tensor], int]:
    """Return weights, and with `moments` those and their step count, of a checkpoint as vectors of an adapter like
    `fresh`. Raises JobFailed, naming tensors, if they do not fit."""
    try:
        state, saved = load_file(directory / OPTIMIZER), load_file(directory / ADAPTER)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobFailed(f"checkpoint {directory} cannot be resumed: {error}") from error
    own = dict(matrices(fresh.lora, fresh.weights))
    if odd := difference({n: t.shape for n, t in saved.items()}, {n: t.shape for n, t in own.items()}):
        raise JobFailed(f"the adapter in {directory} does not fit the job's model: {odd}")
    trained = dict(matrices(fresh.lora, fresh.weights, infix=".default"))
    for kind in MOMENTS:
        found = {n.removeprefix(f"{kind}/"): t.shape for n, t in state.items() if n.startswith(f"{kind}/")}
        if found and (odd := difference(found, {n: t.shape for n, t in trained.items()})):
            raise JobFailed(f"checkpoint {directory} does not fit the job's model: trained tensors: {odd}")
    weights = [state.get(f"master/{name}", tensor) for name, tensor in zip(trained, map(saved.get, own), strict=True)]
    vectors = {"weights": _flat(weights)}
    first = next(iter(trained))
    if not moments or f"step/{first}" not in state:
        return vectors, 0
    vectors |= {kind: _flat([state[f"{kind}/{name}"] for name in trained]) for kind in MOMENTS}
    return vectors, int(state[f"step/{first}"])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])
