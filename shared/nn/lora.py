"""Adapters around a frozen base model, by peft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from opentinker.shared.data.model_families import VISION_MODULES
from opentinker.shared.data.model_files import code_in, unsafe_weights_in
from opentinker.shared.data.safetensors_header import difference, shapes_in
from opentinker.shared.nn.forward import VISION_ATTENTION
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import ADAPTER


def attach_lora(model: nn.Module, lora: LoraSpec) -> PeftModel:
    """Wrap `model` with a fresh adapter: base frozen and as it was, adapter weights float32, B A = 0."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        init_lora_weights=True if lora.init == "kaiming" else lora.init,
        exclude_modules=VISION_MODULES if hasattr(model, VISION_ATTENTION) else None,
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise JobFailed(f"LoRA target_modules={lora.target_modules!r}: {first_line(error)}") from error
    targets = [] if isinstance(lora.target_modules, str) else lora.target_modules
    found = [f".{name}" for name in adapted.targeted_module_names]
    if absent := [target for target in targets if not any(name.endswith(f".{target}") for name in found)]:
        raise JobFailed(f"LoRA target_modules: the model has no module {', '.join(map(repr, absent))}")
    return adapted


def lora_dropouts(model: nn.Module) -> list[nn.Module]:
    """Return the dropout modules, which are active in a fresh adapter in any mode of the model."""
    return [module for name, module in model.named_modules() if name.endswith("lora_dropout")]


def with_adapter(model: nn.Module, directory: Path) -> PeftModel:
    """`model` with a frozen adapter as its PEFT directory describes it, in float32. Raises JobFailed."""
    if why := code_in(directory) or unsafe_weights_in(directory):
        raise JobFailed(f"the adapter in {directory} {why}")
    try:
        return PeftModel.from_pretrained(model, directory).eval()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise JobFailed(f"the adapter in {directory} cannot be loaded: {first_line(error)}") from error


def adapter_bytes(directory: Path) -> int:
    """Return the bytes that `with_adapter` adds. Raises JobFailed."""
    try:
        return sum(4 * math.prod(shape) for shape in shapes_in(directory / ADAPTER).values())
    except (OSError, ValueError) as error:
        raise JobFailed(f"the adapter in {directory} cannot be read: {error}") from error


def put_adapter(model: PeftModel, directory: Path) -> None:
    """The weights of the adapter saved in `directory`. Raises JobFailed, naming tensors, if they do not fit."""
    try:
        saved = load_file(directory / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise JobFailed(f"the adapter in {directory} cannot be read: {error}") from error
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    if odd := difference({n: t.shape for n, t in saved.items()}, {n: t.shape for n, t in own.items()}):
        raise JobFailed(f"the adapter in {directory} does not fit the job's model: {odd}")
    set_peft_model_state_dict(model, saved)


def causal_lm(model: nn.Module) -> Any:
    """The Hugging Face model inside, with any adapter still injected into its layers."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
