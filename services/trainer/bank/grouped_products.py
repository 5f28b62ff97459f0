"""Grouped matrix products for the adapters' part of a mixed batch: one call for all segments instead of one for each.

Matrices of lower rank than the largest are filled up with zeros, which add nothing. Sums over tokens, the gradients of
A and B, are not grouped: segments begin at any token, and the products want groups of such sums at every eighth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opentinker.services.trainer.bank.adapter import Segment

ALIGNED = 8
"""Numbers of bfloat16 in 16 bytes, at which each row of a matrix must begin."""
CAPABILITY = (8, 0)
"""Lowest compute capability that has the products."""


def may_group(segments: Sequence[Segment], x_NI: Tensor, y_NO: Tensor) -> bool:
    """Return whether to group the products of a layer: several segments that cover all tokens, in bfloat16 on a GPU,
    with rows that are aligned."""
    if y_NO.dtype != torch.bfloat16 or len(segments) < 2 or not _has_products(y_NO.device):
        return False
    if x_NI.shape[1] % ALIGNED or y_NO.shape[1] % ALIGNED:
        return False
    ends = [0, *(segment.end for segment in segments)]
    return ends[-1] == len(y_NO) and all(one.start == end for one, end in zip(segments, ends, strict=False))


@functools.cache
def _has_products(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(F, "grouped_mm"):  # torch 2.10
        return False
    return bool(torch.cuda.get_device_capability(device) >= CAPABILITY)


class Stacks(NamedTuple):
    """Matrices of all segments for a layer; R is their largest rank, rounded up to whole 16 bytes."""

    a_SRI: Tensor
    b_SOR: Tensor
    """Multiplied by the segments' scaling."""
    ends_S: Tensor
    """int32: tokens before the end of each segment."""

    @classmethod
    def of(cls, segments: Sequence[Segment], name: str, like: Tensor) -> Stacks:
        """In the dtype of `like`, on its device."""
        pairs = [segment.weights[name] for segment in segments]
        inputs, outputs = pairs[0].a.shape[1], pairs[0].b.shape[0]
        rank = -(-max(len(pair.a) for pair in pairs) // ALIGNED) * ALIGNED
        a_SRI = like.new_zeros(len(pairs), rank, inputs)
        b_SOR = like.new_zeros(len(pairs), outputs, rank)
        for s, (segment, pair) in enumerate(zip(segments, pairs, strict=True)):
            a_SRI[s, : len(pair.a)] = pair.a
            b_SOR[s, :, : len(pair.a)] = pair.b * segment.scaling
        ends = torch.tensor([segment.end for segment in segments], dtype=torch.int32)
        return cls(a_SRI, b_SOR, ends.to(like.device))


def add_to_outputs(x_NI: Tensor, y_NO: Tensor, stacks: Stacks) -> Tensor:
    """Add scaling x A^T B^T to `y_NO`; returns x A^T, [N, R]."""
    low_NR = _product(x_NI.to(y_NO.dtype), stacks.a_SRI.mT, stacks.ends_S)
    y_NO.add_(_product(low_NR, stacks.b_SOR.mT, stacks.ends_S))
    return low_NR


def backward(g_NO: Tensor, back_NI: Tensor | None, stacks: Stacks) -> Tensor:
    """Return the gradient of x A^T, [N, R], and add that of x to `back_NI`."""
    back_NR = _product(g_NO, stacks.b_SOR, stacks.ends_S)
    if back_NI is not None:
        back_NI.add_(_product(back_NR, stacks.a_SRI, stacks.ends_S))
    return back_NR


def _product(left_NK: Tensor, right_SKM: Tensor, ends_S: Tensor) -> Tensor:
    grouped: Any = F.grouped_mm
    return cast(Tensor, grouped(left_NK.contiguous(), right_SKM, offs=ends_S))
