"""Packed attention and the packed forward pass on the device, against the same in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from loadtest.gpu._bench import Bench, Finding, at_most, gap, holds
from loadtest.gpu._models import TINY, Shape, made
from opentinker.shared.nn import attention
from opentinker.shared.nn.forward import token_scores
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.models import load_model

MEDIUM = Shape("medium", 512, 1024, 4, 8, 2, 64, 2048)
HEADS = ((8, 2, 64), (8, 8, 128), (14, 2, 64))
"""Query heads, key heads, numbers of a head: grouped, not grouped, and as in a 0.5B model."""


def plan_of(bench: Bench, vocabulary: int, seed: int = 0) -> Layout:
    """Ragged sequences, some of which begin alike."""
    dice, longest = np.random.default_rng(seed), 24 if bench.small else 700
    ids, masks = [], []
    for _ in range(4):
        start = dice.integers(3, vocabulary, int(dice.integers(2, longest // 2))).tolist()
        for _ in range(3):
            ids.append(start + dice.integers(3, vocabulary, int(dice.integers(1, longest // 2))).tolist())
            masks.append([0] * len(start) + [1] * (len(ids[-1]) - len(start)))
    return layout(ids, masks)


def kernel(bench: Bench) -> Iterator[Finding]:
    """Attention alone: outputs and gradients of one call for rows of any lengths, and of the buckets."""
    plan = plan_of(bench, 50)
    unpadded = plan.unpadded() if not bench.on_gpu else plan.to(bench.device)
    for query_heads, key_heads, head in HEADS[: 1 if bench.small else None]:
        drawn = torch.Generator().manual_seed(0)
        parts = [
            torch.randn(1, heads, len(plan.ids_N), head, generator=drawn).bfloat16()
            for heads in (query_heads, key_heads, key_heads)
        ]
        expected = outputs(plan, [part.float() for part in parts])
        shown = f"{query_heads}/{key_heads} heads of {head}"
        half = [part.to(bench.device) for part in parts]
        if bench.on_gpu:
            yield holds(f"kernel for rows of any lengths, {shown}", attention._has_kernel(half[0]), "in use")
        for name, tensors, limit in (("bf16", half, 0.03), ("float32", [part.float() for part in half], 1e-4)):
            found = outputs(unpadded, tensors)
            apart = [gap(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
            yield at_most(f"attention, {name}, {shown}: output", apart[0], limit)
            yield at_most(f"attention, {name}, {shown}: gradients", max(apart[1:]), 2 * limit)


def outputs(plan: Layout, parts: list[Tensor]) -> list[Tensor]:
    """Return the result of packed attention and the gradients of its inputs."""
    query, key, value = (part.detach().clone().requires_grad_() for part in parts)
    found, _ = attention.packed_attention(None, query, key, value, None, plan=plan, scaling=query.shape[3] ** -0.5)
    weights = torch.linspace(-1, 1, found.numel(), device=found.device).view_as(found)
    (found.float() * weights).sum().backward()
    gradients = [tensor.grad for tensor in (query, key, value)]
    return [found, *(gradient for gradient in gradients if gradient is not None)]


def model(bench: Bench) -> Iterator[Finding]:
    """A whole model: log-probabilities on the device against the CPU."""
    shape = TINY if bench.small else MEDIUM
    base = made(bench, shape)
    plan = plan_of(bench, shape.vocabulary, 1)
    with torch.no_grad():
        expected = token_scores(load_model(str(base), torch.float32), plan, temperature=1.0)[0]
        on_device = plan.to(bench.device)
        for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            causal = load_model(str(base), dtype, bench.device)
            found = token_scores(causal, on_device, temperature=1.0)[0]
            apart = float((found.cpu() - expected).abs().mean())
            yield at_most(f"logprobs of a model in {str(dtype)[6:]}, mean difference", apart, limit, " nats")
