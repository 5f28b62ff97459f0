"""Plans the memory of a job's trainer on its GPU, from the model's configuration and the spec.

Rollout workers that share the GPU leave this much free (`services/rollout_worker/engines/gpu_split.py`), and `make
gpu-check` compares it with what a step takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opentinker.shared.spec import JobSpec

LOGITS_AT_ONCE = 1 << 24
"""Logits that exist at the same time, as in `shared/nn/forward.py`."""
LOGIT_BYTES = 16
"""Bytes per logit in four buffers of float32: the product, its float32 copy, the log-softmax, and the gradient."""
CONTEXT_BYTES = 1 << 30
"""Bytes that a process takes beyond its tensors: CUDA's context, libraries' workspaces, unused parts of blocks."""
HALF_BYTES = (26, 8, 12)
"""Kept for the backward pass per token and layer in bfloat16: times the hidden size, the inner size of the feed-forward
layer, and the width of queries, keys and values together. Counted from the tensors that autograd saves."""
WHOLE_BYTES = (24, 16, 20)
"""The same in float32."""


class ModelSize(NamedTuple):
    """Dimensions of a dense decoder."""

    hidden: int
    inner: int
    layers: int
    queries: int
    """Heads times the numbers of a head."""
    keys: int
    """The same of the key heads."""
    vocabulary: int
    tied: bool

    @property
    def layer_matrices(self) -> int:
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (self.layer_matrices + 2 * self.hidden) + self.hidden


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """Read the dimensions from a config.json; None if it is of another kind of model, as one with experts."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        head = int(text.get("head_dim") or hidden // heads)
        if any("expert" in name and value for name, value in text.items()):
            return None
        return ModelSize(
            hidden=hidden,
            inner=int(text["intermediate_size"]),
            layers=int(text["num_hidden_layers"]),
            queries=heads * head,
            keys=int(text.get("num_key_value_heads") or heads) * head,
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError, ValueError):
        return None


class TrainingMemory(NamedTuple):
    """Bytes of a trainer on its GPU, by what they are for."""

    weights: int
    gradients: int
    moments: int
    casts: int
    """Copies of float32 weights in bfloat16, for the passes of a step."""
    snapshot: int
    """The version that is being sent."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(self)


def training_bytes(spec: JobSpec, size: ModelSize) -> TrainingMemory:
    """Return the memory at the peak of a step, without `CONTEXT_BYTES`, of a trainer with one rank."""
    half = spec.model.dtype == "bfloat16"
    width = 2 if half else 4
    lora = spec.model.lora
    if lora is None:
        weights, trained = 4 * size.parameters, size.parameters
    else:
        per_layer = 2 * (size.hidden + size.queries) + 2 * (size.hidden + size.keys) + 3 * (size.hidden + size.inner)
        trained = lora.rank * per_layer * size.layers
        weights = width * size.parameters + 4 * trained
    tokens = max(spec.train.tokens_per_micro_batch, spec.rollout.context_length or 0)
    a, b, c = HALF_BYTES if half else WHOLE_BYTES
    layer = tokens * (a * size.hidden + b * size.inner + c * (size.queries + 2 * size.keys))
    recomputes = spec.train.gradient_checkpointing
    kept = layer + 4 * tokens * size.hidden * size.layers if recomputes else layer * size.layers
    return TrainingMemory(
        weights=weights,
        gradients=4 * trained,
        moments=8 * trained,
        casts=2 * size.parameters if half and lora is None else 0,
        snapshot=width * trained,
        activations=kept,
        logits=LOGIT_BYTES * min(LOGITS_AT_ONCE, tokens * size.vocabulary),
    )
