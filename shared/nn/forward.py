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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

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

    def to(self, device: torch.device | str) -> Layout:
        if torch.device(device).type == "cpu":
            return self
        return replace(
            self,
            buckets=tuple(bucket.to(device) for bucket in self.buckets),
            **{
                name: getattr(self, name).to(device)
                for name in ("ids_N", "positions_N", "places_N", "predictors_U", "targets_U", "selected_M")
            },
        )


def layout(sequences: Sequence[Any], masks: Sequence[Any], *, share_prefixes: bool = True) -> Layout:
    """Pack `sequences` (token ids each) whose mask-1 tokens (never the first) need a log-probability.

    Tokens that no mask-1 token depends on (the last one, trailing observations) are left out.
    """
    S = len(sequences)
    lengths_S = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    L = int(lengths_S.max())
    rows = [np.asarray(sequence, dtype=">u4") for sequence in sequences]
    order = np.array(sorted(range(S), key=[row.tobytes() for row in rows].__getitem__), dtype=np.int64)
    ids_SL = np.full((S, L), -1, dtype=np.int64)
    mask_SL = np.zeros((S, L), dtype=bool)
    for place, s in enumerate(order):
        ids_SL[place, : lengths_S[s]] = rows[s]
        mask_SL[place, : lengths_S[s]] = np.asarray(masks[s], dtype=bool)
    if mask_SL[:, 0].any():
        raise ValueError("the first token of a sequence has nothing before it and cannot be trained on")

    node_SL, new_SL = _trie(ids_SL, lengths_S[order], share_prefixes)
    inputs_S = np.where(mask_SL.any(1), L - 1 - mask_SL[:, ::-1].argmax(1), 0)  # tokens before the last mask-1 one
    is_input_SL = np.arange(L) < inputs_S[:, None]
    used = np.zeros(int(new_SL.sum()), dtype=bool)
    used[node_SL[is_input_SL]] = True
    stream_of_node = np.cumsum(used) - 1
    kept_SL = new_SL & used[np.where(new_SL, node_SL, 0)]

    buckets = _buckets(np.where(is_input_SL, stream_of_node[node_SL], 0), inputs_S)
    flat = np.concatenate([bucket.ravel() for bucket, _ in buckets])
    real = np.concatenate([valid.ravel() for _, valid in buckets])
    places_N = np.empty(int(used.sum()), dtype=np.int64)
    places_N[flat[real]] = np.flatnonzero(real)

    # Targets row by row in sorted order; then the caller's order.
    row_of_M, column_of_M = np.nonzero(mask_SL)
    targets_M = node_SL[row_of_M, column_of_M]
    first_U, selected_M = np.unique(targets_M, return_index=True, return_inverse=True)[1:]
    callers_M = np.argsort(order[row_of_M], kind="stable")
    rows_U, columns_U = row_of_M[first_U], column_of_M[first_U]
    return Layout(
        ids_N=torch.from_numpy(ids_SL[kept_SL]),
        positions_N=torch.from_numpy(np.nonzero(kept_SL)[1]),
        buckets=tuple(torch.from_numpy(np.ascontiguousarray(bucket)) for bucket, _ in buckets),
        places_N=torch.from_numpy(places_N),
        predictors_U=torch.from_numpy(stream_of_node[node_SL[rows_U, columns_U - 1]]),
        targets_U=torch.from_numpy(ids_SL[rows_U, columns_U]),
        selected_M=torch.from_numpy(selected_M[callers_M].reshape(-1)),
    )


def _trie(ids_SL: I64, lengths_S: I64, share: bool) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Node of each token of lexicographically sorted rows, and whether the row is the first to have that node."""
    S, L = ids_SL.shape
    columns = np.arange(L)
    shared_S = np.zeros(S, dtype=np.int64)
    if share and S > 1:
        equal = (ids_SL[1:] == ids_SL[:-1]) & (ids_SL[1:] >= 0)
        shared_S[1:] = np.where(equal.all(1), L, equal.argmin(1))
    new_SL = (columns >= shared_S[:, None]) & (columns < lengths_S[:, None])
    node_SL = np.where(new_SL, np.cumsum(new_SL).reshape(S, L) - 1, -1)
    # Sorted rows share a prefix with the row above, so the newest node of a column is the right one.
    return np.maximum.accumulate(node_SL, axis=0), new_SL


def _buckets(stream_SL: I64, inputs_S: I64) -> list[tuple[I64, npt.NDArray[np.bool_]]]:
    """Rows grouped by length: [rows, length] stream indices, and which of them are no padding.

    Cuts a bucket where the padding of going on would cost more than another call.
    """
    keep = inputs_S > 0
    if len(inputs_S) > 1:  # a row that the next one begins with adds nothing
        same = stream_SL[:-1] == stream_SL[1:]
        prefix = np.where(same.all(1), stream_SL.shape[1], same.argmin(1)) >= inputs_S[:-1]
        keep[:-1] &= ~(prefix & (inputs_S[:-1] <= inputs_S[1:]))
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(-inputs_S[rows], kind="stable")]
    lengths = inputs_S[rows]
    buckets, start, padding = [], 0, 0
    for end in range(1, len(rows) + 1):
        if end < len(rows):
            padding += int(lengths[start] - lengths[end])
            if padding <= BUCKET_OVERHEAD or lengths[end] == lengths[end - 1] == lengths[start]:
                continue
        length = int(lengths[start])
        buckets.append((stream_SL[rows[start:end], :length], np.arange(length) < lengths[start:end, None]))
        start, padding = end, 0
    return buckets


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
    causal: Any, plan: Layout, *, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of every mask-1 token, and the entropy (nats, no gradient) of its distribution.

    `causal` is the Hugging Face model (PACKED attention). Both results are float32 [M], in the layout's order.
    The head runs at the U positions that need it; above `logits_at_once` elements it runs in chunks whose logits are
    dropped and made again in the backward pass.
    """
    hidden_1N = causal.get_decoder()(
        input_ids=plan.ids_N[None], position_ids=plan.positions_N[None], use_cache=False, plan=plan
    ).last_hidden_state
    hidden_U = hidden_1N[0].index_select(0, plan.predictors_U)
    head = causal.get_output_embeddings()
    U, V = hidden_U.shape[0], head.weight.shape[0]
    wanted = U * V
    if wanted <= logits_at_once:
        logprobs_U, entropy_U = _head_logprobs(head, hidden_U, plan.targets_U, temperature)
    else:
        chunk = max(1, logits_at_once // V)
        parts = [
            checkpoint(_head_logprobs, head, h, t, temperature, use_reentrant=False)
            for h, t in zip(hidden_U.split(chunk), plan.targets_U.split(chunk), strict=True)
        ]
        logprobs_U, entropy_U = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs_U.index_select(0, plan.selected_M), entropy_U.index_select(0, plan.selected_M)


def _head_logprobs(head: Any, hidden_U: Tensor, targets_U: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_UV = head(hidden_U).float()
    if temperature != 1.0:
        logits_UV = logits_UV / temperature
    logprobs_UV = logits_UV.log_softmax(-1)
    with torch.no_grad():
        entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(-1)
    return cast(Tensor, logprobs_UV.gather(-1, targets_U[:, None])[:, 0]), entropy_U
