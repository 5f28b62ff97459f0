"""The packed forward pass: log-probabilities of sampled tokens, without padding and without a T x T mask.

`layout` (numpy) turns ragged sequences into one stream of tokens; `token_logprobs` (torch) runs a model over it.

Sequences that begin alike share their beginning: with causal attention the hidden state of a token depends only on what
stands before it, so equal prefixes have equal states. The stream holds each prefix once (a trie of the sequences): a
group's prompt is computed once, and samples that came out identical cost as much as one. Autograd adds up gradients.

Everything but attention is per token, so it runs on the stream. For attention the stream is gathered into rows, one per
distinct sequence, sorted by length and cut into buckets of nearly equal length, each one causal
`scaled_dot_product_attention` call; padding stands at the end of a row, where causality hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

I64 = npt.NDArray[np.int64]
PACKED = "opentinker_packed"
"""Name of the attention function below, for `model.set_attn_implementation`."""
BUCKET_OVERHEAD = 256
"""Padded tokens that cost as much as one more attention call."""
LOGITS_AT_ONCE = 1 << 24
"""Largest [tokens, vocabulary] that is kept for the backward pass; above it, logits are made in chunks, twice."""


@dataclass(frozen=True)
class Layout:
    """One micro-batch, ready for the forward pass. N stream tokens, M selected (mask-1) tokens, U of them distinct."""

    ids_N: Tensor
    positions_N: Tensor
    buckets: tuple[Tensor, ...]
    """Per bucket [rows, length]: the stream token in each place of each row."""
    places_N: Tensor
    """Where each stream token stands in the concatenation of the flattened buckets."""
    predictors_U: Tensor
    """Stream token whose hidden state predicts the target."""
    targets_U: Tensor
    """Token id."""
    selected_M: Tensor
    """Index into U of each mask-1 token, sequence by sequence in the caller's order."""
    temperatures_U: Tensor | None = None
    """Where sequences differ in it; tokens are then distinct by temperature too."""

    def to(self, device: torch.device | str) -> Layout:
        if torch.device(device).type == "cpu":
            return self
        temperatures = self.temperatures_U
        return replace(
            self,
            buckets=tuple(bucket.to(device) for bucket in self.buckets),
            temperatures_U=None if temperatures is None else temperatures.to(device),
            **{
                name: getattr(self, name).to(device)
                for name in ("ids_N", "positions_N", "places_N", "predictors_U", "targets_U", "selected_M")
            },
        )


def layout(
    sequences: Sequence[Any],
    masks: Sequence[Any],
    *,
    share_prefixes: bool = True,
    temperatures: Sequence[float] | None = None,
) -> Layout:
    """Pack `sequences` (token ids each) whose mask-1 tokens (never the first) need a log-probability.

    Tokens that no mask-1 token depends on (the last one, trailing observations) are left out. Each distinct prefix is a
    node of the trie; nodes are numbered in lexicographic order of the sequences.
    `temperatures`: one per sequence, for `token_logprobs(temperature=plan.temperatures_U)`; sequences share hidden
    states whatever theirs are.
    """
    places_S = [np.flatnonzero(np.asarray(mask)) for mask in masks]
    if any(len(places) and places[0] == 0 for places in places_S):
        raise ValueError("the first token of a sequence has nothing before it and cannot be trained on")
    trie = _trie([np.asarray(sequence, dtype=np.int64) for sequence in sequences], share_prefixes)

    inputs_S = [int(places[-1]) if len(places) else 0 for places in places_S]  # tokens before the last mask-1 one
    used = np.zeros(len(trie.tokens), dtype=bool)
    for nodes, inputs in zip(trie.nodes_S, inputs_S, strict=True):
        used[nodes[:inputs]] = True
    stream_of_node = np.cumsum(used) - 1
    rows = [stream_of_node[trie.nodes_S[s][: inputs_S[s]]] for s in _needed_rows(trie, inputs_S)]
    buckets, places_N = _buckets(rows, int(used.sum()))

    targets_M = np.concatenate([nodes[places] for nodes, places in zip(trie.nodes_S, places_S, strict=True)])
    levels, level_S = np.unique([1.0] * len(masks) if temperatures is None else temperatures, return_inverse=True)
    level_M = np.repeat(level_S, [len(places) for places in places_S])
    distinct_U, selected_M = np.unique(targets_M * len(levels) + level_M, return_inverse=True)
    targets_U, levels_U = np.divmod(distinct_U, len(levels))
    return Layout(
        ids_N=torch.from_numpy(trie.tokens[used]),
        positions_N=torch.from_numpy(trie.depths[used]),
        buckets=tuple(torch.from_numpy(bucket) for bucket in buckets),
        places_N=torch.from_numpy(places_N),
        predictors_U=torch.from_numpy(stream_of_node[trie.parents[targets_U]]),
        targets_U=torch.from_numpy(trie.tokens[targets_U]),
        selected_M=torch.from_numpy(selected_M.reshape(-1)),
        temperatures_U=None if temperatures is None else torch.from_numpy(levels[levels_U]).float(),
    )


class _Trie(NamedTuple):
    nodes_S: list[I64]
    """Per sequence, the node of each of its tokens."""
    order: list[int]
    """Sequences in lexicographic order."""
    shared_S: list[int]
    """Per sequence, the tokens that it has in common with the one before it in that order."""
    tokens: I64
    """Per node: token id, position, and the node before it (-1 at the start)."""
    depths: I64
    parents: I64


def _trie(ids_S: list[I64], share: bool) -> _Trie:
    order = sorted(range(len(ids_S)), key=[ids.astype(">u4").tobytes() for ids in ids_S].__getitem__)
    nodes_S: list[I64] = [ids_S[0]] * len(ids_S)
    shared_S = [0] * len(ids_S)
    tokens, depths, parents = [], [], []
    above, nodes_above = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    count = 0
    for s in order:
        ids = ids_S[s]
        if share:
            common = min(len(ids), len(above))
            different = np.flatnonzero(ids[:common] != above[:common])
            shared_S[s] = int(different[0]) if len(different) else common
        shared = shared_S[s]
        fresh = np.arange(count, count + len(ids) - shared)
        nodes_S[s] = nodes = np.concatenate([nodes_above[:shared], fresh])
        tokens.append(ids[shared:])
        depths.append(np.arange(shared, len(ids)))
        parents.append(nodes[shared - 1 : -1] if shared else np.concatenate([[-1], nodes[:-1]])[: len(ids)])
        count += len(fresh)
        above, nodes_above = ids, nodes
    return _Trie(nodes_S, order, shared_S, np.concatenate(tokens), np.concatenate(depths), np.concatenate(parents))


def _needed_rows(trie: _Trie, inputs_S: list[int]) -> list[int]:
    """Sequences, longest input first, without those whose inputs the next one in order begins with."""
    following = [*trie.order[1:], -1]
    needed = [
        s
        for s, after in zip(trie.order, following, strict=True)
        if inputs_S[s] and not (after >= 0 and trie.shared_S[after] >= inputs_S[s] <= inputs_S[after])
    ]
    return sorted(needed, key=lambda s: -inputs_S[s])


def _buckets(rows: list[I64], stream_tokens: int) -> tuple[list[I64], I64]:
    """[rows, length] arrays of stream tokens, cut where padding on would cost more than another attention call, and
    the place of each stream token in their concatenation. Padding repeats stream token 0."""
    buckets, places_N = [], np.zeros(stream_tokens, dtype=np.int64)
    start = offset = padding = 0
    for end in range(1, len(rows) + 1):
        length = len(rows[start])
        if end < len(rows):
            padding += length - len(rows[end])
            if padding <= BUCKET_OVERHEAD or len(rows[end]) == length:
                continue
        bucket = np.zeros((end - start, length), dtype=np.int64)
        for r, row in enumerate(rows[start:end]):
            bucket[r, : len(row)] = row
            places_N[row] = np.arange(offset, offset + len(row))
            offset += length
        buckets.append(bucket)
        start, padding = end, 0
    return buckets, places_N


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers' AttentionInterface. query [1, Hq, N, D], key and value [1, Hkv, N, D]."""
    plan: Layout | None = options.get("plan")
    if plan is None:
        raise ValueError("packed attention runs only through token_logprobs")
    window = options.get("sliding_window")
    if window is not None and max(bucket.shape[1] for bucket in plan.buckets) > window:
        raise NotImplementedError(f"sequences longer than the model's sliding window of {window} tokens")
    if options.get("softcap") is not None or options.get("s_aux") is not None or attention_mask is not None:
        raise NotImplementedError("attention with soft caps, sinks or a mask of its own")
    q, k, v = (_tokens_first(tensor) for tensor in (query, key, value))
    outputs = []
    for bucket in plan.buckets:
        q_b, k_b, v_b = (
            F.embedding(bucket, tensor).view(*bucket.shape, like.shape[1], like.shape[3]).transpose(1, 2)
            for tensor, like in ((q, query), (k, key), (v, value))
        )
        attended = F.scaled_dot_product_attention(
            q_b,
            k_b,
            v_b,
            dropout_p=options.get("dropout", 0.0),
            is_causal=True,
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2).reshape(bucket.numel(), -1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return F.embedding(plan.places_N, joined).view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(PACKED, packed_attention)


def _tokens_first(heads: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H * D]."""
    return heads.transpose(1, 2).reshape(heads.shape[2], -1)


def token_logprobs(
    causal: Any,
    plan: Layout,
    *,
    temperature: float | Tensor,
    logits_at_once: int = LOGITS_AT_ONCE,
    entropy_gradient: bool = False,
    agree: Callable[[int], int] | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of every mask-1 token, and the entropy (nats) of its distribution.

    `temperature`: one for all, or float32 [U]. The entropy has a gradient only if `entropy_gradient` says so. See
    `token_scores`.
    """
    logprobs_M, entropy_M, _ = token_scores(
        causal,
        plan,
        temperature=temperature,
        logits_at_once=logits_at_once,
        entropy_gradient=entropy_gradient,
        agree=agree,
    )
    return logprobs_M, entropy_M


def token_scores(
    causal: Any,
    plan: Layout,
    *,
    temperature: float | Tensor,
    logits_at_once: int = LOGITS_AT_ONCE,
    entropy_gradient: bool = False,
    agree: Callable[[int], int] | None = None,
    hits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs`, and with `hits` whether the token is the likeliest of all (bool; else empty).

    `causal` is the Hugging Face model (PACKED attention). The results are [M], in the layout's order, float32.
    The head runs at the U positions that need it; above `logits_at_once` elements it runs in chunks whose logits are
    dropped and made again in the backward pass. `agree` may ask for more chunks: processes that hold the head's weights
    together call it equally often.
    """
    hidden_1N = causal.get_decoder()(
        input_ids=plan.ids_N[None], position_ids=plan.positions_N[None], use_cache=False, plan=plan
    ).last_hidden_state
    hidden_U = hidden_1N[0].index_select(0, plan.predictors_U)
    head = causal.get_output_embeddings()
    U, V = hidden_U.shape[0], head.out_features
    chunks = -(-U // max(1, logits_at_once // V))
    if agree is not None:
        chunks = agree(chunks)
    if chunks <= 1:
        scores = _head_scores(head, hidden_U, plan.targets_U, temperature, entropy_gradient, hits)
    else:
        hidden, targets = hidden_U.tensor_split(chunks), plan.targets_U.tensor_split(chunks)
        heat = temperature.tensor_split(chunks) if isinstance(temperature, Tensor) else [temperature] * chunks
        parts = [
            checkpoint(_head_scores, head, h, t, k, entropy_gradient, hits, use_reentrant=False)
            for h, t, k in zip(hidden, targets, heat, strict=True)
        ]
        scores = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    logprobs_U, entropy_U, hits_U = scores
    hits_M = hits_U.index_select(0, plan.selected_M) if hits else hits_U
    return logprobs_U.index_select(0, plan.selected_M), entropy_U.index_select(0, plan.selected_M), hits_M


def token_values(decoder: Any, head: Any, plan: Layout) -> Tensor:
    """float32 [M]: head(hidden state that predicts the token) of every mask-1 token. `head` maps it to one number."""
    hidden_1N = decoder(
        input_ids=plan.ids_N[None], position_ids=plan.positions_N[None], use_cache=False, plan=plan
    ).last_hidden_state
    values_U = head(hidden_1N[0].index_select(0, plan.predictors_U))[:, 0].float()
    return cast(Tensor, values_U.index_select(0, plan.selected_M))


def _head_scores(
    head: Any,
    hidden_U: Tensor,
    targets_U: Tensor,
    temperature: float | Tensor,
    entropy_gradient: bool,
    hits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits_UV = head(hidden_U).float()
    if isinstance(temperature, Tensor):
        logits_UV = logits_UV / temperature[:, None]
    elif temperature != 1.0:
        logits_UV = logits_UV / temperature
    logprobs_UV = logits_UV.log_softmax(-1)
    # What has a gradient comes first: once it is made again, the backward pass skips the rest.
    logprobs_U = logprobs_UV.gather(-1, targets_U[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = -torch.linalg.vecdot(logprobs_UV.exp(), logprobs_UV)
    hits_U = logprobs_UV.argmax(-1) == targets_U if hits else torch.empty(0, dtype=torch.bool, device=targets_U.device)
    return logprobs_U, entropy_U, hits_U
