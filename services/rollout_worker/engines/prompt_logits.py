"""Logprobs of a prompt in a batch with other requests, in an engine with LoRA layers on CPUs.

vLLM 0.32 adds the adapter's part to the logits of a prompt by the adapters of the requests that sample in the same
batch. Their number is another one: the engine ends with an error, or an adapter of the output layer is mistaken.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def repair() -> None:
    """Apply to each row the adapter of its token. Idempotent."""
    PunicaWrapperCPU.add_lora_logits = _add_lora_logits


def _add_lora_logits(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: torch.Tensor,
    lora_b_stacked: torch.Tensor,
    scale: float,
    **_: object,
) -> None:
    """`x`: hidden states [N, H], `y`: their logits [N, V], to which the adapters' part is added in place."""
    indices = _adapters_of(self, x)
    buffer = torch.zeros((len(x), lora_b_stacked.size(-1)), dtype=torch.float32, device=x.device)
    bgmv_shrink(x, lora_a_stacked, buffer, indices, scale)
    bgmv_expand(buffer, lora_b_stacked, y, indices, add_inputs=True)


def _adapters_of(wrapper: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the adapter of each row. Rows of a prompt are a slice of the batch; those that sample are a copy."""
    if x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return wrapper.sampler_indices[: len(x)]
    first = x.storage_offset() // x.stride(0)
    return wrapper.token_lora_indices[first : first + len(x)]
