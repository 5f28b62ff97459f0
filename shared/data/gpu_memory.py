"""Plans the memory of a job's trainer on its GPU, from the model's configuration and the spec.

Rollout workers that share the GPU leave this much free (`services/rollout_worker/engines/gpu_split.py`), and `make
gpu-check` compares it with what a step takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


VECTORS = 6
"""Of float32 that an adapter of a shared trainer has at a time: weights, gradient sum, that with the pass, two moments,
and one for copies that are sent or stored."""
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Names of the number of experts that compute each token."""


class ModelSize(NamedTuple):
    """Dimensions of a decoder."""

    hidden: int
    inner: int
    """Width of the feed-forward layer; in a model with experts, of all experts of a token together."""
    layers: int
    queries: int
    """Heads times the numbers of a head."""
    keys: int
    """The same of the key heads."""
    vocabulary: int
    tied: bool
    counted: int = 0
    """Parameters, where they do not follow from the dimensions: in a model with experts."""

    @property
    def layer_matrices(self) -> int:
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def parameters(self) -> int:
        if self.counted:
            return self.counted
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (self.layer_matrices + 2 * self.hidden) + self.hidden


def model_size(config: Mapping[str, Any], counted: int = 0) -> ModelSize | None:
    """Read the dimensions from a config.json; None if it lacks some of them. `counted`: parameters in the model's
    files, without which the size of a model with experts is not known."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        head = int(text.get("head_dim") or hidden // heads)
        has_experts = any("expert" in name and value for name, value in text.items())
        if has_experts and not counted:
            return None
        return ModelSize(
            hidden=hidden,
            inner=_inner_of_experts(text, hidden) if has_experts else int(text["intermediate_size"]),
            layers=int(text["num_hidden_layers"]),
            queries=heads * head,
            keys=int(text.get("num_key_value_heads") or heads) * head,
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            counted=counted if has_experts else 0,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _inner_of_experts(text: Mapping[str, Any], hidden: int) -> int:
    """Return the inner size of a dense layer that keeps as much for a token as its experts, each of which copies the
    token's hidden state. Raises KeyError, TypeError, ValueError."""
    dense = int(text.get("intermediate_size") or 0)
    one = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    routed = next((int(text[name]) for name in EXPERTS_OF_A_TOKEN if text.get(name)), 0)
    if not routed:
        raise KeyError("experts of a token")
    shared = int(text.get("shared_expert_intermediate_size") or one * int(text.get("n_shared_experts") or 0))
    return max(dense, routed * (one + hidden) + shared)


class TrainingMemory(NamedTuple):
    """Bytes of one rank of a trainer on its GPU, by what they are for."""

    weights: int
    gradients: int
    moments: int
    casts: int
    """Copies for the passes of a step: of float32 weights in bfloat16, and of the tensor that zero3 gathers."""
    snapshot: int
    """The version that is being sent."""
    activations: int
    logits: int
    shares: int = 0
    """The rank's share of masters (zero1, zero2) or of gradients (zero3), which ZeRO keeps from step to step."""

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def rest(self) -> int:
        """Bytes that stay between steps, with two snapshots: one is sent while the next is made."""
        return self.weights + self.moments + self.shares + 2 * self.snapshot


def training_bytes(spec: JobSpec, size: ModelSize, ranks: int | None = None, *, leads: bool = True) -> TrainingMemory:
    """Return the memory at the peak of a step, without `CONTEXT_BYTES`, of each of the trainer's ranks. `ranks`: how
    many it has, if not as many as the spec asks for; `leads`: rank 0 is among them, which alone sends versions."""
    half = spec.model.dtype == "bfloat16"
    width = 2 if half else 4
    lora = spec.model.lora
    if lora is None:
        weights, trained = 4 * size.parameters, size.parameters
    else:
        trained = _trained(size, lora.rank)
        weights = width * size.parameters + 4 * trained
    tokens = max(spec.train.tokens_per_micro_batch, _longest(spec))
    whole = TrainingMemory(
        weights=weights,
        gradients=4 * trained,
        moments=8 * trained,
        casts=2 * size.parameters if half and lora is None else 0,
        snapshot=width * trained if spec.kind == "rl" and leads else 0,
        activations=_activations(spec, size, tokens),
        logits=LOGIT_BYTES * min(LOGITS_AT_ONCE, tokens * size.vocabulary),
    )
    return _partitioned(spec, size, whole, ranks or spec.resources.ranks)


def bank_bytes(specs: Sequence[JobSpec], size: ModelSize, tokens: int) -> int:
    """Return the memory of a shared trainer that trains these policies and Tinker servers at the peak of a pass of
    `tokens`, without `CONTEXT_BYTES`. Their passes come at any time. `size`: of the base that they have in common."""
    base = specs[0]
    width = 2 if base.model.dtype == "bfloat16" else 4
    adapters = [(_trained(size, rank), width) for spec in specs for rank in _ranks(spec)]
    if base.tinker.full_weights:
        adapters = [(size.parameters, 4 * 3 + width)]  # a stored copy has four vectors; it computes with one in dtype
    held = sum(count * (4 * VECTORS + extra) for count, extra in adapters)
    passes = _activations(base, size, tokens)
    return width * size.parameters + held + passes + LOGIT_BYTES * min(LOGITS_AT_ONCE, tokens * size.vocabulary)


def _ranks(spec: JobSpec) -> list[int]:
    """Return the ranks of the adapters of a spec of one policy."""
    if spec.kind == "tinker":
        return [spec.tinker.max_rank] * spec.tinker.max_adapters
    return [] if spec.model.lora is None else [spec.model.lora.rank]


def _trained(size: ModelSize, rank: int) -> int:
    """Return the parameters of an adapter of all layers."""
    per_layer = 2 * (size.hidden + size.queries) + 2 * (size.hidden + size.keys) + 3 * (size.hidden + size.inner)
    return rank * per_layer * size.layers


def _activations(spec: JobSpec, size: ModelSize, tokens: int) -> int:
    """Return the bytes that a pass keeps for its backward pass."""
    a, b, c = HALF_BYTES if spec.model.dtype == "bfloat16" else WHOLE_BYTES
    layer = tokens * (a * size.hidden + b * size.inner + c * (size.queries + 2 * size.keys))
    recomputes = spec.train.gradient_checkpointing
    return layer + 4 * tokens * size.hidden * size.layers if recomputes else layer * size.layers


def _longest(spec: JobSpec) -> int:
    """Return the tokens of the longest sequence, as far as the spec bounds it; a pass may contain it alone."""
    rows = spec.data.max_length if spec.data is not None else None
    return max(spec.rollout.context_length or 0, rows or 0)


def _partitioned(spec: JobSpec, size: ModelSize, whole: TrainingMemory, ranks: int) -> TrainingMemory:
    """Divide what the ranks share by `train.parallel`, as in `services/trainer/distributed/zero.py`."""
    if spec.train.parallel == "data" or ranks == 1:
        return whole
    stage = int(spec.train.parallel.removeprefix("zero"))
    lora = spec.model.lora is not None
    share = -(-whole.gradients // ranks)
    divided = whole._replace(moments=-(-whole.moments // ranks), shares=share)
    if stage == 1:
        return divided
    largest = size.vocabulary * size.hidden
    undivided = 0 if lora else 4 * largest  # the gradient of one tensor, before the ranks have added theirs
    if stage == 2:
        return divided._replace(gradients=min(whole.gradients, share + undivided))
    gathered = (2 if lora and spec.model.dtype == "bfloat16" else 4) * largest
    return divided._replace(weights=-(-whole.weights // ranks), gradients=undivided, casts=whole.casts + gathered)
