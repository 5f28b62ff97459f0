"""On CPUs: a second copy of linear layers' weights in the layout of oneDNN, which multiplies small batches up to twice
as fast as the plain layout.

vLLM would keep the packed copy alone, which loading in place does not reach: with it a tied lm_head silently computes
with the old weights after a swap. So vLLM packs nothing, and here all layers are packed again after each load.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as custom_ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from opentinker.shared.runtime.memory import memory_bytes

SMALL_BYTES = 32 << 20
"""A smaller model fits the processor's caches: packing it at each swap costs as much as it saves."""
MEMORY_SHARE = 0.1
"""Share of the memory of the machine or container that the copies may take; a larger model is not packed."""
PRIMITIVES = 32
"""Batch sizes whose code a layer keeps."""
AVAILABLE = bool(getattr(custom_ops, "_supports_onednn", False))
custom_ops._supports_onednn = False


class PackedLinear:
    """Takes the place of a layer's `cpu_linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._handler = custom_ops.create_onednn_mm(weight.t(), PRIMITIVES)

    def __call__(self, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = custom_ops.onednn_mm(self._handler, x, bias)
        return product


def pack(model: torch.nn.Module, ranks: int = 1) -> None:
    """Pack the weights that linear layers have now. `ranks`: processes that have a part of the model each."""
    layers = [layer for layer in model.modules() if _is_plain(layer)]
    size = sum(layer.weight.nbytes for layer in layers)
    if not AVAILABLE or not SMALL_BYTES <= size <= MEMORY_SHARE * memory_bytes() / ranks:
        return
    for layer in layers:
        layer.cpu_linear = PackedLinear(layer.weight)


def _is_plain(layer: Any) -> bool:
    """Return whether vLLM multiplies with this layer's weight as it is; it looks tokens up in an embedding's."""
    is_embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if is_embedding or not hasattr(layer, "cpu_linear") or layer.weight.is_meta:
        return False
    return bool(layer.weight.ndim == 2 and layer.weight.numel() > 0)
