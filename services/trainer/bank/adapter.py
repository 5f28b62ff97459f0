"""One adapter of a bank: weights, gradient sum and AdamW moments, each a flat float32 vector.

Flat vectors make a swap a few copies and an optimizer step a few element-wise calls. `AdapterShape` says where the
matrices are in them. A model that trains all weights is held likewise: `FullShape` says where its parameters are.
"""

from __future__ import annotations

import math
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


@dataclass
class Segment:
    """Tokens [start, end) of a pass."""

    start: int
    end: int
    scaling: float
    weights: Mapping[str, Pair]
    """By layer; layers without an adapter are absent."""
    gradients: Mapping[str, Pair]
    """Where the backward pass adds to; empty for rows that are not learned from."""


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

    def tensors(self, vector: Tensor) -> list[Tensor]:
        """Return views of a flat vector: all matrices in their order."""
        return [matrix for pair in self.pairs(vector).values() for matrix in pair]


@dataclass(frozen=True)
class FullShape:
    """All weights of a model in the place of an adapter."""

    parameters: Mapping[str, tuple[int, ...]]
    """Sizes of each parameter by its name in the base model, in the model's order; tied ones once."""

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector by parameter."""
        parts = vector.split([math.prod(sizes) for sizes in self.parameters.values()])
        return {name: part.view(self.parameters[name]) for name, part in zip(self.parameters, parts, strict=True)}

    def tensors(self, vector: Tensor) -> list[Tensor]:
        return list(self.named(vector).values())


@dataclass
class Adapter:
    name: str
    shape: AdapterShape | FullShape
    config: Mapping[str, Any]
    """Its adapter_config.json, as PEFT reads it; of all weights empty."""
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
    def fresh(cls, name: str, shape: AdapterShape | FullShape, config: Mapping[str, Any], weights: Tensor) -> Adapter:
        gradient, exp_avg, exp_avg_sq = (torch.zeros_like(weights) for _ in range(3))
        return cls(name, shape, config, weights, gradient, exp_avg, exp_avg_sq)

    @property
    def lora(self) -> AdapterShape:
        """Its shape, where it is known not to be all weights."""
        assert isinstance(self.shape, AdapterShape)
        return self.shape

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
