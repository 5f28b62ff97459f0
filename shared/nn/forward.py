"""The packed forward pass: log-probabilities of sampled tokens, without padding and without a T x T mask.

`layout.py` turns ragged sequences into one stream of tokens; `token_scores` runs a model with packed attention
(`attention.py`) over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opentinker.shared.nn.grid_positions import grid_positions
from opentinker.shared.nn.layout import SEEN, Layout
from opentinker.shared.types.errors import JobFailed

VISION_ATTENTION = "opentinker_sight"
"""Attribute of a loaded vision model: its `vision.VisionProcessor`."""
LOGITS_AT_ONCE = 1 << 24
"""Largest [tokens, vocabulary] that is kept for the backward pass; above it, logits are made in chunks, twice."""


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
    """log softmax(logits / temperature) of every mask-1 token, the entropy (nats) of its distribution, and with `hits`
    whether the token is the likeliest of all (bool; else empty).

    `temperature`: one for all, or float32 [P]. The entropy has a gradient only if `entropy_gradient` says so.
    `causal` is the Hugging Face model (PACKED attention). The results are [M], in the layout's order, float32.
    The head runs once for each of the P predictions; above `logits_at_once` elements it runs in chunks whose logits are
    dropped and made again in the backward pass. `agree` may ask for more chunks: processes that hold the head's weights
    together call it equally often.
    """
    hidden_1N = causal.get_decoder()(**_inputs(causal, plan), use_cache=False, plan=plan).last_hidden_state
    hidden_P = hidden_1N[0].index_select(0, plan.predictors_P)
    head = causal.get_output_embeddings()
    P, V = hidden_P.shape[0], head.out_features
    chunks = -(-P // max(1, logits_at_once // V))
    if agree is not None:
        chunks = agree(chunks)
    if chunks <= 1:
        scores = _head_scores(head, hidden_P, plan.rows_U, plan.targets_U, temperature, entropy_gradient, hits)
    else:
        hidden = hidden_P.tensor_split(chunks)
        rows, targets = _split_targets(plan, [len(part) for part in hidden])
        heat = temperature.tensor_split(chunks) if isinstance(temperature, Tensor) else [temperature] * chunks
        parts = [
            checkpoint(_head_scores, head, h, r, t, k, entropy_gradient, hits, use_reentrant=False)
            for h, r, t, k in zip(hidden, rows, targets, heat, strict=True)
        ]
        scores = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    logprobs_U, entropy_P, hits_U = scores
    entropy_U = plan.of_targets(entropy_P)
    hits_M = hits_U.index_select(0, plan.selected_M) if hits else hits_U
    return logprobs_U.index_select(0, plan.selected_M), entropy_U.index_select(0, plan.selected_M), hits_M


def _split_targets(plan: Layout, sizes: list[int]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return rows, each counted from the first of its chunk, and targets of chunks with `sizes` predictions."""
    if plan.rows_U is None:
        return [None] * len(sizes), list(plan.targets_U.split(sizes))
    ends = torch.tensor(sizes, device=plan.rows_U.device).cumsum(0)
    counts = torch.searchsorted(plan.rows_U, ends).diff(prepend=ends.new_zeros(1)).tolist()
    starts = [0, *ends.tolist()]
    rows = [part - start for part, start in zip(plan.rows_U.split(counts), starts, strict=False)]
    return list(rows), list(plan.targets_U.split(counts))


def _inputs(causal: Any, plan: Layout) -> dict[str, Any]:
    """Token ids and positions; where images are shown, embeddings instead of ids, with theirs in their places. Raises
    JobFailed."""
    if not plan.shown:
        return {"input_ids": plan.ids_N[None], "position_ids": plan.positions_N[None]}
    sight = getattr(causal, VISION_ATTENTION, None)
    if sight is None:
        raise JobFailed(f"the trajectories show images, and {type(causal).__name__} is no model that sees them")
    (image_FH, *added), grids = sight.features(causal, plan.shown)
    seen_N = plan.ids_N >= SEEN
    image_row_N = (plan.ids_N - SEEN).clamp(min=0)
    token_NH = causal.get_input_embeddings()(plan.ids_N.masked_fill(seen_N, 0))
    image_NH = F.embedding(image_row_N, image_FH.to(token_NH.dtype))
    positions_N = grid_positions(plan, grids)[:, None] if sight.family.has_grids else plan.positions_N[None]
    inputs: dict[str, Any] = {
        "inputs_embeds": torch.where(seen_N[:, None], image_NH, token_NH)[None],
        "position_ids": positions_N,
    }
    if added:
        inputs["visual_pos_masks"] = seen_N[None]
        inputs["deepstack_visual_embeds"] = [F.embedding(image_row_N[seen_N], layer_FH) for layer_FH in added]
    return inputs


def token_values(decoder: Any, head: Any, plan: Layout) -> Tensor:
    """float32 [M]: head(hidden state that predicts the token) of every mask-1 token. `head` maps it to one number.

    Raises JobFailed where images are shown."""
    if plan.shown:
        raise JobFailed(
            "the trajectories show images, and value models and critics do not see: take an algorithm without one"
        )
    hidden_1N = decoder(
        input_ids=plan.ids_N[None], position_ids=plan.positions_N[None], use_cache=False, plan=plan
    ).last_hidden_state
    values_P = head(hidden_1N[0].index_select(0, plan.predictors_P))[:, 0].float()
    return cast(Tensor, plan.of_targets(values_P).index_select(0, plan.selected_M))


def _head_scores(
    head: Any,
    hidden_P: Tensor,
    rows_U: Tensor | None,
    targets_U: Tensor,
    temperature: float | Tensor,
    entropy_gradient: bool,
    hits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [U], entropies [P] and, if asked for, hits [U]."""
    logits_PV = head(hidden_P).float()
    if isinstance(temperature, Tensor):
        logits_PV = logits_PV / temperature[:, None]
    elif temperature != 1.0:
        logits_PV = logits_PV / temperature
    logprobs_PV = logits_PV.log_softmax(-1)
    # Tensors with a gradient come first: after recomputing them the backward pass skips the rest.
    if rows_U is None:
        logprobs_U = logprobs_PV.gather(-1, targets_U[:, None])[:, 0]
    else:
        logprobs_U = logprobs_PV.view(-1).gather(0, rows_U * logprobs_PV.shape[1] + targets_U)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_P = -torch.linalg.vecdot(logprobs_PV.exp(), logprobs_PV)
    if not hits:
        return logprobs_U, entropy_P, torch.empty(0, dtype=torch.bool, device=targets_U.device)
    best_P = logprobs_PV.argmax(-1)
    return logprobs_U, entropy_P, (best_P if rows_U is None else best_P.index_select(0, rows_U)) == targets_U
