"""Ragged sequences -> one stream of tokens: what a packed forward pass (`forward.py`) runs over.

Sequences that begin alike share their beginning: with causal attention the hidden state of a token depends only on what
stands before it, so equal prefixes have equal states. The stream holds each prefix once (a trie of the sequences): a
group's prompt is computed once, and samples that came out identical cost as much as one. Autograd adds up gradients.

Everything but attention is per token, so it runs on the stream. For attention the stream is gathered into rows, one per
distinct sequence, sorted by length and cut into buckets of nearly equal length; padding stands at the end of a row,
where causality hides it. On a GPU the rows stand one after another instead, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

I64 = npt.NDArray[np.int64]
SEEN = 1 << 31
"""Ids from here on are no tokens: id - SEEN is the row of an image's embedding."""
BUCKET_OVERHEAD = 256
"""Padded tokens that cost as much as one more attention call."""


@dataclass(frozen=True)
class Rows:
    """The rows of a layout one after another, R tokens in all: for kernels that take sequences of any lengths."""

    tokens_R: Tensor
    """The stream token in each place."""
    places_N: Tensor
    """Where each stream token stands in it."""
    ends: Tensor
    """int32 [rows + 1]: 0, then where each row ends."""
    longest: int

    def to(self, device: torch.device | str) -> Rows:
        return Rows(self.tokens_R.to(device), self.places_N.to(device), self.ends.to(device), self.longest)


class Seen(NamedTuple):
    """An image that stands in a layout."""

    digest: str
    data: bytes
    """PNG or JPEG."""
    tokens: int


@dataclass(frozen=True)
class Layout:
    """One micro-batch, ready for the forward pass. N stream tokens, M selected (mask-1) tokens, U of them distinct, P
    predictions."""

    ids_N: Tensor
    positions_N: Tensor
    buckets: tuple[Tensor, ...]
    """Per bucket [rows, length]: the stream token in each place of each row."""
    places_N: Tensor
    """Where each stream token stands in the concatenation of the flattened buckets."""
    predictors_P: Tensor
    """Stream token whose hidden state is the prediction's."""
    targets_U: Tensor
    """Token id."""
    selected_M: Tensor
    """Index into U of each mask-1 token, sequence by sequence in the caller's order."""
    lengths: tuple[int, ...]
    """Length of each row, in the order of the buckets; the rest of a row is padding."""
    rows_U: Tensor | None = None
    """The prediction of each target, in ascending order; None: one each, P = U."""
    temperatures_P: Tensor | None = None
    """Where sequences differ in it; tokens are then distinct by temperature too."""
    rows: Rows | None = None
    """Instead of the buckets, where it is there: see `attention.py`."""
    shown: tuple[Seen, ...] = ()
    """Images whose embeddings, one image after the other, stand where `ids_N` are SEEN and more."""

    def of_targets(self, values_P: Tensor) -> Tensor:
        """Return [U]: the value of each target's prediction."""
        return values_P if self.rows_U is None else values_P.index_select(0, self.rows_U)

    def unpadded(self) -> Layout:
        """With `rows`."""
        widths = [bucket.shape[1] for bucket in self.buckets for _ in bucket]
        real = torch.cat([torch.arange(width) < n for width, n in zip(widths, self.lengths, strict=True)])
        rows = Rows(
            tokens_R=torch.cat([bucket.ravel() for bucket in self.buckets])[real],
            places_N=(real.cumsum(0) - 1)[self.places_N],
            ends=torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32),
            longest=max(self.lengths),
        )
        return replace(self, rows=rows)

    def to(self, device: torch.device | str) -> Layout:
        """On a GPU with `rows`."""
        if torch.device(device).type == "cpu":
            return self
        temperatures, rows, rows_U = self.temperatures_P, self.unpadded().rows, self.rows_U
        assert rows is not None
        return replace(
            self,
            rows=rows.to(device),
            buckets=tuple(bucket.to(device) for bucket in self.buckets),
            temperatures_P=None if temperatures is None else temperatures.to(device),
            rows_U=None if rows_U is None else rows_U.to(device),
            **{
                name: getattr(self, name).to(device)
                for name in ("ids_N", "positions_N", "places_N", "predictors_P", "targets_U", "selected_M")
            },
        )


def layout(
    sequences: Sequence[Any],
    masks: Sequence[Any],
    *,
    share_prefixes: bool = True,
    temperatures: Sequence[float] | None = None,
    shown: tuple[Seen, ...] = (),
) -> Layout:
    """Pack `sequences` (token ids each) whose mask-1 tokens (never the first) need a log-probability.

    Tokens that no mask-1 token depends on (the last one, trailing observations) are left out. Each distinct prefix is a
    node of the trie; nodes are numbered in lexicographic order of the sequences. `temperatures`: one per sequence, for
    `token_scores(temperature=plan.temperatures_P)`; sequences share hidden states regardless of temperature. `shown`:
    see `vision.mark_image_tokens`.
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
        predictors_P=torch.from_numpy(stream_of_node[trie.parents[targets_U]]),
        targets_U=torch.from_numpy(trie.tokens[targets_U]),
        selected_M=torch.from_numpy(selected_M.reshape(-1)),
        lengths=tuple(len(row) for row in rows),
        temperatures_P=None if temperatures is None else torch.from_numpy(levels[levels_U]).float(),
        shown=shown,
    )


def join(plans: Sequence[Layout]) -> Layout:
    """Put layouts side by side into one: their tokens follow each other, and they share nothing, equal prefixes
    included. All or none of them have temperatures; they show no images."""
    if any(plan.shown for plan in plans):
        raise ValueError("layouts that show images cannot be joined")
    starts_N = [0, *accumulate(len(plan.ids_N) for plan in plans)]
    starts_U = [0, *accumulate(len(plan.targets_U) for plan in plans)]
    rows = []
    for plan, start in zip(plans, starts_N, strict=False):
        padded = [row for bucket in plan.buckets for row in bucket.numpy()]
        rows += [row[:length] + start for row, length in zip(padded, plan.lengths, strict=True)]
    rows.sort(key=lambda row: -len(row))
    buckets, places_N = _buckets(rows, starts_N[-1])
    heat = [plan.temperatures_P for plan in plans if plan.temperatures_P is not None]
    return Layout(
        ids_N=torch.cat([plan.ids_N for plan in plans]),
        positions_N=torch.cat([plan.positions_N for plan in plans]),
        buckets=tuple(torch.from_numpy(bucket) for bucket in buckets),
        places_N=torch.from_numpy(places_N),
        predictors_P=torch.cat([plan.predictors_P + n for plan, n in zip(plans, starts_N, strict=False)]),
        targets_U=torch.cat([plan.targets_U for plan in plans]),
        selected_M=torch.cat([plan.selected_M + u for plan, u in zip(plans, starts_U, strict=False)]),
        lengths=tuple(len(row) for row in rows),
        rows_U=_joined_rows(plans),
        temperatures_P=torch.cat(heat) if heat else None,
    )


def _joined_rows(plans: Sequence[Layout]) -> Tensor | None:
    if all(plan.rows_U is None for plan in plans):
        return None
    starts_P = [0, *accumulate(len(plan.predictors_P) for plan in plans)]
    rows = [torch.arange(len(plan.targets_U)) if plan.rows_U is None else plan.rows_U for plan in plans]
    return torch.cat([rows_U + start for rows_U, start in zip(rows, starts_P, strict=False)])


def with_ends(
    sequences: Sequence[Any], masks: Sequence[Any], truncated: Sequence[bool]
) -> tuple[list[I64], list[npt.NDArray[np.bool_]]]:
    """`sequences` and `masks` for values: with a mask-1 token more at the end of truncated ones, whose value is that of
    the state after all others. Which token that is makes no difference: values stand before theirs."""
    ends = [np.ones(int(end), dtype=bool) for end in truncated]
    return (
        [np.concatenate([np.asarray(ids, np.int64), 0 * end]) for ids, end in zip(sequences, ends, strict=True)],
        [np.concatenate([np.asarray(mask, bool), end]) for mask, end in zip(masks, ends, strict=True)],
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
    the place of each stream token in their concatenation. Padding repeats the row's last token: attention multiplies
    it by 0, and 0 * NaN would carry a NaN from one row into others."""
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
            bucket[r, : len(row)], bucket[r, len(row) :] = row, row[-1]
            places_N[row] = np.arange(offset, offset + len(row))
            offset += length
        buckets.append(bucket)
        start, padding = end, 0
    return buckets, places_N
