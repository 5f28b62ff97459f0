"""Changes to a loaded model's computation that a job may request: activation checkpointing, float32 logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from opentinker.shared.types.errors import JobFailed


def recompute_layers(causal: Any) -> None:
    """Gradient checkpointing: a layer's activations are dropped after the forward pass and made again in the backward.

    transformers does so for layers in training mode alone; what is inside them stays in eval mode. Raises JobFailed for
    an architecture that cannot.
    """
    if not causal.supports_gradient_checkpointing:
        raise JobFailed(f"train.gradient_checkpointing: {type(causal).__name__} does not support it; set it to false")
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in causal.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def float32_head(causal: Any) -> None:
    """Logits as vLLM makes them with `head_dtype = "float32"`: hidden states and head weights in the dtype that is in
    use (autocast's, if on), their product in float32. Raises JobFailed for an output layer that an adapter has wrapped.
    """
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = type(head).__name__
        raise JobFailed(f"model.fp32_head needs a plain linear output layer, not {kind}; set it to false")
    head.forward = functools.partial(_float32_linear, head)  # the module's hooks stay in force


def _float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        bias = None if head.bias is None else head.bias.to(dtype).float()
        return F.linear(hidden.to(dtype).float(), head.weight.to(dtype).float(), bias)
