"""Adapters around a frozen base model, by peft. Apart from `models.py` because reference-forward needs no peft."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from opentinker.shared.errors import JobFailed
from opentinker.shared.nn.models import first_line
from opentinker.shared.spec import LoraSpec


def attach_lora(model: nn.Module, lora: LoraSpec) -> PeftModel:
    """Wrap `model` with a fresh adapter: base frozen, adapter weights float32 (A random, B zero)."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise JobFailed(f"LoRA target_modules={lora.target_modules!r}: {first_line(error)}") from error


def causal_lm(model: nn.Module) -> Any:
    """The Hugging Face model inside, with any adapter still injected into its layers."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
