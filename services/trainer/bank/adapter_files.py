"""Adapters on disk: the whole state in one file of the bank's store, and the weights as a PEFT directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from opentinker.services.trainer.bank.adapter import Adapter, AdapterShape, FullShape
from opentinker.services.trainer.bank.base_model import PEFT_PREFIX, BaseModel
from opentinker.services.trainer.bank.limits import BankLimits, Refused
from opentinker.shared.data.model_files import code_in, unsafe_weights_in
from opentinker.shared.data.safetensors_header import difference, shapes_in
from opentinker.shared.durable_files import replace_durably
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.manifest import ADAPTER

Write = Callable[[Path, bytes], object]
CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
UNUSABLE: dict[str, Any] = {
    "use_dora": False, "use_rslora": False, "bias": "none", "lora_bias": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "fan_in_fan_out": False,
}  # fmt: skip
"""Settings of PEFT that an adapter of a bank cannot have, with their neutral values."""


def store(adapter: Adapter, path: Path, **notes: str) -> None:
    """Write the whole state, bit for bit, with notes that `notes_of` reads; after a power cut the file is the old one
    or the new one."""
    about = {
        "owner": adapter.owner,
        "deterministic": adapter.deterministic,
        "steps": adapter.steps,
        "config": adapter.config,
        **_about_shape(adapter.shape),
    }
    tensors = {name: vector.cpu() for name, vector in adapter.vectors.items()}
    if not tensors["gradient"].any():
        del tensors["gradient"]
    replace_durably(path, save(tensors, {**notes, "adapter": orjson.dumps(about).decode()}))


def _about_shape(shape: AdapterShape | FullShape) -> dict[str, Any]:
    if isinstance(shape, FullShape):
        return {"parameters": list(shape.parameters.items())}
    return {"rank": shape.rank, "scaling": shape.scaling, "layers": list(shape.layers.items())}


def _shape_of(about: dict[str, Any]) -> AdapterShape | FullShape:
    """Read what `_about_shape` has returned. Raises KeyError, TypeError, ValueError."""
    if "parameters" in about:
        return FullShape({name: tuple(map(int, sizes)) for name, sizes in about["parameters"]})
    return AdapterShape(
        about["rank"], about["scaling"], {layer: (inputs, outputs) for layer, (inputs, outputs) in about["layers"]}
    )


def notes_of(path: Path) -> dict[str, str]:
    """Return what `store` was given. Raises Refused if the file is damaged, FileNotFoundError."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path} cannot be read: {first_line(error)}") from error


def restore(name: str, path: Path) -> Adapter:
    """Return a stored adapter, in host memory. Raises Refused if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = orjson.loads(file.metadata()["adapter"])
            vectors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (no mapping)
        vectors.setdefault("gradient", torch.zeros_like(vectors["weights"]))
        own = {key: about[key] for key in ("steps", "owner")}
        return Adapter(
            name, _shape_of(about), about["config"], deterministic=about.get("deterministic", False), **own, **vectors
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Refused(
            f"the stored adapter {name!r} cannot be read: {first_line(error)}; remove it and create it again"
        ) from error


def owner_of(path: Path) -> tuple[str, bool] | None:
    """Return the tenant of a stored adapter and whether it is deterministic; None if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = orjson.loads(file.metadata()["adapter"])
            return str(about["owner"]), bool(about.get("deterministic", False))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


def export_peft(
    adapter: Adapter, directory: Path, dtype: torch.dtype = torch.float32, write: Write = replace_durably
) -> None:
    """Write the weights as PEFT reads them; by default each file is replaced whole."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, pair in adapter.lora.pairs(adapter.weights).items():
        for matrix, tensor in (("lora_A", pair.a), ("lora_B", pair.b)):
            tensors[f"{PEFT_PREFIX}{layer}.{matrix}.weight"] = tensor.to("cpu", dtype, copy=True)
    write(directory / ADAPTER, save(tensors))
    config = {**adapter.config, "inference_mode": True}
    write(directory / CONFIG, orjson.dumps(config, option=orjson.OPT_INDENT_2))


def import_peft(base: BaseModel, limits: BankLimits, name: str, directory: Path) -> Adapter:
    """Return an adapter with the weights of a PEFT directory and a fresh optimizer. Raises Refused."""
    if why := code_in(directory) or unsafe_weights_in(directory):
        raise Refused(f"the adapter in {directory} {why}")
    try:
        config = orjson.loads(_config_bytes(directory / CONFIG))
        shapes = shapes_in(directory / ADAPTER)
        lora = _lora_of(config, list(shapes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Refused(f"the adapter in {directory} cannot be read: {first_line(error)}") from error
    limits.check_rank(lora.rank)
    adapter = base.fresh_adapter(name, lora, seed=0)
    expected: dict[str, Tensor] = {}
    for layer, pair in adapter.lora.pairs(adapter.weights).items():
        expected |= {f"{PEFT_PREFIX}{layer}.lora_A.weight": pair.a, f"{PEFT_PREFIX}{layer}.lora_B.weight": pair.b}
    if odd := difference(shapes, {n: t.shape for n, t in expected.items()}):
        raise Refused(f"the adapter in {directory} is not of the model {base.name!r}: {odd}")
    try:
        tensors = load_file(directory / ADAPTER)
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(f"the adapter in {directory} cannot be read: {first_line(error)}") from error
    if spoiled := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise Refused(f"the adapter in {directory} has weights that are not finite, such as {spoiled[0]}")
    for key, tensor in expected.items():
        tensor.copy_(tensors[key])
    return adapter


def _config_bytes(path: Path) -> bytes:
    """Raises ValueError for a file too large to be a configuration."""
    if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} has {size} bytes, and at most {MAX_CONFIG_BYTES} are allowed")
    return path.read_bytes()


def _lora_of(config: dict[str, Any], names: list[str]) -> LoraSpec:
    """Raises ValueError for settings that a bank does not support."""
    for setting, neutral in UNUSABLE.items():
        if config.get(setting) not in (neutral, None):
            raise ValueError(f"{setting} = {config[setting]!r} is not supported; save it with {setting} = {neutral!r}")
    targets = config["target_modules"]
    if isinstance(targets, str):  # a pattern
        layers = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}
        targets = sorted(layers)
    return LoraSpec(rank=config["r"], alpha=config["lora_alpha"], target_modules=targets)
