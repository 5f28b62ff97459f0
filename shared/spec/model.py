"""What is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opentinker.shared.spec.part import Part, Positive


class LoraSpec(Part):
    rank: Positive = 16
    """Rank of the adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout before the adapter, while training."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` means all but the head."""


class ModelSpec(Part):
    base: Annotated[str, Field(min_length=1)]
    """Directory or hub id of a Hugging Face causal language model (safetensors; no remote code)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of generation, and of the trainer's forward pass; master weights are float32."""
    lora: LoraSpec | None = None
    """Train an adapter instead of all weights."""
    chat_template: Literal["model", "plain"] = "model"
    """`plain` joins message contents without any markup; `model` refuses a tokenizer that has no chat template."""
