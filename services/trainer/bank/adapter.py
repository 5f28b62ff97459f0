"""One adapter of a bank: weights, gradient sum and AdamW moments, each a flat float32 vector.

Flat vectors make a swap a few copies and an optimizer step a few element-wise calls. `AdapterShape` says where the
matrices are in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """Matrices of one layer: the adapter adds scaling * x A^T B^T to its output."""

    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[outputs, rank]."""


@dataclass(frozen=True)
class AdapterShape:
    rank: int
    scaling: float
    """alpha / rank."""
    layers: Mapping[str, tuple[int, int]]
    """Inputs and outputs of each adapted layer by its name in the base model, in the model's order."""

    @property
    def size(self) -> int:
        return self.rank * sum(inputs + outputs for inputs, outputs in self.layers.values())

    def pairs(self, vector: Tensor) -> dict[str, Pair]:
        """Return views of a flat vector: A, then B of each layer."""
        found, start = {}, 0
        for name, (inputs, outputs) in self.layers.items():
            middle, end = start + self.rank * inputs, start + self.rank * (inputs + outputs)
            found[name] = Pair(
                vector[start:middle].view(self.rank, inputs), vector[middle:end].view(outputs, self.rank)
            )
            start = end
        return found


@dataclass
class Adapter:
    name: str
    shape: AdapterShape
    config: Mapping[str, Any]
    """Its adapter_config.json, as PEFT reads it."""
    weights: Tensor
    gradient: Tensor
    """Sum since the last optimizer step."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    partial: Tensor | None = None
    """`gradient` with that of a command which has passed for some of its rows; takes its place with the last."""
    steps: int = 0
    owner: str = ""
    """Tenant that it belongs to."""
    deterministic: bool = False
    """Computed by itself, with the operations of `sole_adapter.py`."""

    @classmethod
    def fresh(cls, name: str, shape: AdapterShape, config: Mapping[str, Any], weights: Tensor) -> Adapter:
        gradient, exp_avg, exp_avg_sq = (torch.zeros_like(weights) for _ in range(3))
        return cls(name, shape, config, weights, gradient, exp_avg, exp_avg_sq)

    @property
    def vectors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("weights", "gradient", "exp_avg", "exp_avg_sq")}
        return found if self.partial is None else found | {"partial": self.partial}

    @property
    def bytes(self) -> int:
        return sum(vector.nbytes for vector in self.vectors.values())

    def copy_to(self, device: torch.device | str, *, pinned: bool = False) -> Adapter:
        """Return a copy on `device`; `pinned`: in page-locked host memory, from which a GPU copies faster."""
        copies = {}
        for name, vector in self.vectors.items():
            copies[name] = torch.empty_like(vector, device=device, pin_memory=pinned).copy_(vector)
        return replace(self, **copies)
