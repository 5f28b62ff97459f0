"""Merges an adapter into the weights of its base, for an engine that serves one adapter without vLLM's LoRA layers.

The base is read once, from the files that the engine itself was loaded from, and never changed: every version is
W + scale * B A, computed in float32 from the kept W and rounded once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from opentinker.shared.types.errors import TransportError

Named = Iterable[tuple[str, torch.Tensor]]
PREFIX = "base_model.model."
"""Before the names of the base's modules in peft's names."""
LOW_BITS = 16
"""Bits that bfloat16 leaves out of a float32."""


class Pair(NamedTuple):
    """The two factors of a weight's adapter."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""


class MergeableBase:
    """`read` yields the weights of the base; `dtype` is the engine's; `whole` keeps those without an adapter too."""

    def __init__(self, read: Callable[[], Named], dtype: torch.dtype, *, whole: bool) -> None:
        self._read, self._dtype, self._whole = read, dtype, whole
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, pairs: dict[str, Pair]) -> None:
        """Make sure that all weights which these change are kept. Raises TransportError for one that does not fit."""
        if not pairs.keys() <= self._kept.keys():
            wanted = pairs.keys() | self._kept.keys()
            self._kept = {
                name: narrowed(tensor, self._dtype) for name, tensor in self._read() if self._whole or name in wanted
            }
        for name, pair in pairs.items():
            weight, shape = self._kept.get(name), (len(pair.b), pair.a.shape[-1])
            if weight is None or weight.shape != shape or len(pair.a) != pair.b.shape[-1]:
                found = "none" if weight is None else str(list(weight.shape))
                raise TransportError(f"the adapter changes {name} {list(shape)}; the base has {found} of this name")

    def merge(self, pairs: dict[str, Pair], scale: float, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every kept weight in the engine's dtype; one without a factor in `pairs` is the base's."""
        for name, kept in self._kept.items():
            if name not in pairs:
                yield name, kept.to(device)
                continue
            a, b = (factor.to(device, torch.float32) for factor in pairs[name])
            merged = kept.to(device, torch.float32, copy=True).addmm_(b, a, alpha=scale)
            yield name, dithered(merged, name) if self._dtype == torch.bfloat16 else merged.to(self._dtype)


def pairs_of(tensors: Named) -> dict[str, Pair]:
    """Return the factors of an adapter by the name of the weight that they change. Raises TransportError."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, _, factor = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if factor not in ("lora_A", "lora_B"):
            raise TransportError(f"{name} is neither factor of an adapter")
        factors.setdefault(f"{module}.weight", {})[factor] = tensor
    if odd := [name for name, both in factors.items() if len(both) != 2]:
        raise TransportError(f"only one factor came for {', '.join(sorted(odd)[:5])}")
    return {name: Pair(both["lora_A"], both["lora_B"]) for name, both in factors.items()}


def narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy with the values that the engine has, in the smaller one of both dtypes."""
    values = tensor.to(dtype) if dtype.itemsize < tensor.dtype.itemsize else tensor
    return values.clone() if values.data_ptr() == tensor.data_ptr() else values


def dithered(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Round float32 to bfloat16 up or down at random, such that the expected value is exact.

    A young adapter changes most weights by less than half a step of bfloat16. Rounded to the nearest they would fall
    back to the base's, and their common direction with them; at random, their errors are noise that cancels in a sum.
    The draw belongs to the name, so all engines have the same weights, and a value that bfloat16 can hold stays.
    """
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    low = torch.randint(1 << LOW_BITS, weight.shape, generator=generator, dtype=torch.int32, device=weight.device)
    bits = weight.view(torch.int32) + low
    return (bits & -(1 << LOW_BITS)).view(torch.float32).to(torch.bfloat16)
