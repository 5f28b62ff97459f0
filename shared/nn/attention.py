"""Attention over a packed stream, as an attention function of transformers.

On a CPU each bucket of rows is one causal `scaled_dot_product_attention` call. On a GPU all rows are one call of Flash
Attention's kernel for sequences of any lengths (torch.nn.attention.varlen), which wants an Ampere GPU or a newer one,
half precision, and heads of up to 256 numbers, a multiple of 8; anything else takes the buckets there too. Neither
makes a T x T mask.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from opentinker.shared.nn.layout import Layout, Rows

PACKED = "opentinker_packed"
"""Name of the attention function below, for `model.set_attn_implementation`."""
VARLEN_TYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD = 256
AMPERE = (8, 0)
SAYS_GROUPED = "enable_gqa" in signature(varlen_attn).parameters
"""Earlier versions of torch have no such option: their kernel takes fewer key heads than query heads as they come."""


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, N, Hq, D].

    Raises NotImplementedError for attention of another kind; `models.py` refuses such models before.
    """
    plan: Layout | None = options.get("plan")
    if plan is None:
        raise ValueError("packed attention runs only through token_scores")
    window = options.get("sliding_window")
    if window is not None and max(plan.lengths) > window:
        raise NotImplementedError(f"sequences longer than the model's sliding window of {window} tokens")
    if options.get("softcap") is not None or options.get("s_aux") is not None or attention_mask is not None:
        raise NotImplementedError("attention with soft caps, sinks or a custom mask")
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    if plan.rows is not None and dropout == 0.0 and _has_kernel(query):
        joined, places_N = _in_rows(query, key, value, plan.rows, scale), plan.rows.places_N
    else:
        joined, places_N = _in_buckets(query, key, value, plan, scale, dropout), plan.places_N
    return F.embedding(places_N, joined).view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(PACKED, packed_attention)


def _has_kernel(query: Tensor) -> bool:
    """Return whether one call can take rows of any lengths. The kernel's substitute on CPUs can."""
    if not _on_gpu(query):
        return True
    head = query.shape[3]
    fits = _dtype(query) in VARLEN_TYPES and head <= VARLEN_HEAD and head % 8 == 0
    return fits and torch.cuda.get_device_capability(query.device) >= AMPERE


def _dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which attention is computed: autocast does not know of the kernel, and rotated queries of
    float32 masters are float32."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _on_gpu(tensor: Tensor) -> bool:
    return bool(tensor.is_cuda)


def _in_rows(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float | None) -> Tensor:
    """[R, Hq * D]."""
    q, k, v = (
        F.embedding(rows.tokens_R, _tokens_first(heads)).view(-1, heads.shape[1], heads.shape[3]).to(_dtype(query))
        for heads in (query, key, value)
    )
    if not _on_gpu(query):
        return _row_by_row(q, k, v, rows, scale)
    attended = varlen_attn(
        q,
        k,
        v,
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        **({"enable_gqa": q.shape[1] != k.shape[1]} if SAYS_GROUPED else {}),
    )
    assert isinstance(attended, Tensor)
    return attended.flatten(1)


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float | None) -> Tensor:
    """Compute the result of `varlen_attn` on a CPU, which it does not support: q [R, Hq, D], k and v [R, Hkv, D] -> [R,
    Hq * D].

    Slower than buckets; tests run it so that all but the kernel itself is tested everywhere.
    """
    sizes, attended = rows.ends.diff().tolist(), []
    for parts in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        q_r, k_r, v_r = (part.transpose(0, 1)[None] for part in parts)
        out = F.scaled_dot_product_attention(
            q_r, k_r, v_r, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended).flatten(1)


def _in_buckets(query: Tensor, key: Tensor, value: Tensor, plan: Layout, scale: float | None, dropout: float) -> Tensor:
    """[places, Hq * D]."""
    q, k, v = (_tokens_first(tensor) for tensor in (query, key, value))
    outputs = []
    for bucket in plan.buckets:
        q_b, k_b, v_b = (
            F.embedding(bucket, tensor).view(*bucket.shape, like.shape[1], like.shape[3]).transpose(1, 2)
            for tensor, like in ((q, query), (k, key), (v, value))
        )
        attended = F.scaled_dot_product_attention(
            q_b, k_b, v_b, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(attended.transpose(1, 2).reshape(bucket.numel(), -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _tokens_first(heads: Tensor) -> Tensor:
    """[1, H, N, D] -> [N, H * D]."""
    return heads.transpose(1, 2).reshape(heads.shape[2], -1)
