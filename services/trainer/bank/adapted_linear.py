"""A linear layer of the frozen base that several adapters use in the same pass.

The base is one matrix product over all tokens of a pass. Tokens of one command are a segment, and each segment has the
matrices of its adapter added. The backward pass puts their gradients into the segment's vector: adapters are no
parameters of the model, so autograd holds nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opentinker.services.trainer.bank import grouped_products
from opentinker.services.trainer.bank.adapter import Segment
from opentinker.services.trainer.bank.grouped_products import Stacks, may_group
from opentinker.services.trainer.bank.sole_adapter import SoleAdapter


class Segments:
    """The segments of the pass that is under way, shared by all layers of a base."""

    def __init__(self, device: torch.device | str) -> None:
        self.of_pass: Sequence[Segment] = ()
        self.sole: SoleAdapter | None = None
        """Instead of segments, in a pass of a deterministic adapter."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Makes autograd call the backward pass of layers whose input has no gradient."""

    @contextmanager
    def used(self, segments: Sequence[Segment], sole: SoleAdapter | None = None) -> Iterator[None]:
        """Compute forward and backward passes in the body with these segments, or with one adapter."""
        self.of_pass, self.sole = segments, sole
        try:
            yield
        finally:
            self.of_pass, self.sole = (), None


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    def __init__(self, base: nn.Linear, name: str, segments: Segments) -> None:
        super().__init__()
        self.base, self.name, self.segments = base, name, segments

    def forward(self, inputs: Tensor) -> Tensor:
        if (sole := self.segments.sole) is not None:
            return sole.add_to(self.base(inputs), inputs, self.name)
        segments = [segment for segment in self.segments.of_pass if self.name in segment.weights]
        if not segments:
            return cast(Tensor, self.base(inputs))
        arguments = (self.base.weight, self.base.bias, self.name, segments)
        return cast(Tensor, _AdaptedProduct.apply(inputs, self.segments.anchor, *arguments))


class _AdaptedProduct(torch.autograd.Function):  # type: ignore[misc]
    """y = x W^T + b, and for the tokens of each segment + scaling * x A^T B^T."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, name: str, segments: list[Segment]
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        x_NI, y_NO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        low = []
        if groups := may_group(segments, x_NI, y_NO):
            low.append(grouped_products.add_to_outputs(x_NI, y_NO, Stacks.of(segments, name, y_NO)))
        else:
            for segment in segments:
                part, pair = slice(segment.start, segment.end), segment.weights[name]
                low.append(x_NI[part].to(y.dtype) @ pair.a.to(y.dtype).T)
                y_NO[part].addmm_(low[-1], pair.b.to(y.dtype).T, alpha=segment.scaling)
        ctx.save_for_backward(x, weight, *low)
        ctx.name, ctx.segments, ctx.groups = name, segments, groups
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, *low = ctx.saved_tensors
        x_NI, g_NO = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        back_NI = g_NO @ weight.to(g_NO.dtype) if ctx.needs_input_grad[0] else None
        if ctx.groups:
            back_NR = grouped_products.backward(g_NO, back_NI, Stacks.of(ctx.segments, ctx.name, g_NO))
            _add_gradients(ctx.segments, ctx.name, x_NI, g_NO, low[0], back_NR)
            return _only(back_NI, x)
        for segment, low_R in zip(ctx.segments, low, strict=True):
            part, pair = slice(segment.start, segment.end), segment.weights[ctx.name]
            g = g_NO[part]
            back_R = (g @ pair.b.to(g.dtype)).mul_(segment.scaling)
            if own := segment.gradients.get(ctx.name):
                own.a.add_(back_R.T @ x_NI[part].to(g.dtype))
                own.b.add_(g.T @ low_R, alpha=segment.scaling)
            if back_NI is not None:
                back_NI[part].addmm_(back_R, pair.a.to(g.dtype))
        return _only(back_NI, x)


def _add_gradients(
    segments: Sequence[Segment], name: str, x_NI: Tensor, g_NO: Tensor, low_NR: Tensor, back_NR: Tensor
) -> None:
    """Add the gradients of A and B to those of their segments. `back_NR`: the gradient of `low_NR`, x A^T."""
    for segment in segments:
        if own := segment.gradients.get(name):
            part, rank = slice(segment.start, segment.end), len(own.a)
            own.a.add_(back_NR[part, :rank].T @ x_NI[part].to(back_NR.dtype))
            own.b.add_(g_NO[part].T @ low_NR[part, :rank], alpha=segment.scaling)


def _only(back_NI: Tensor | None, x: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of `x`, and none of the other arguments."""
    return (None if back_NI is None else back_NI.view(x.shape).to(x.dtype)), None, None, None, None, None
