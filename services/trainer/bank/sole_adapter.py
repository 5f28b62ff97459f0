"""A pass of one adapter, with the operations of a trainer that it has to itself: bit for bit the same.

They are those of PEFT's layers and autograd, with torch's deterministic algorithms. A mixed pass
computes the same by other operations, whose sums differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from opentinker.services.trainer.bank.adapter import Adapter, Pair


@dataclass(frozen=True)
class SoleAdapter:
    """The adapter of a pass that has no other one."""

    scaling: float
    pairs: Mapping[str, Pair]
    """By layer. Copies, each aligned as a parameter is: a product of matrices may round otherwise at other places."""

    @classmethod
    def of(cls, adapter: Adapter, gradient: Tensor | None, *, adapted: bool) -> Self:
        """`gradient`: flat vector that the backward pass adds to. `adapted` False: the base computes by itself."""
        shape = adapter.lora
        gradients = shape.pairs(gradient) if gradient is not None else {}
        pairs = {}
        for name, pair in shape.pairs(adapter.weights).items() if adapted else ():
            pairs[name] = Pair(pair.a.clone(), pair.b.clone())
            for matrix, sum_ in zip(pairs[name], gradients.get(name, ()), strict=False):
                matrix.requires_grad_(True)
                matrix.grad = sum_
        return cls(shape.scaling, pairs)

    def add_to(self, result: Tensor, inputs: Tensor, layer: str) -> Tensor:
        """Return the output of a layer with the adapter, as peft.tuners.lora.Linear computes it from the base's."""
        if (pair := self.pairs.get(layer)) is None:
            return result
        added = F.linear(F.linear(inputs.to(pair.a.dtype), pair.a), pair.b)
        return (result + added * self.scaling).to(result.dtype)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Compute the body with torch's deterministic algorithms, which is a setting of the process."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
