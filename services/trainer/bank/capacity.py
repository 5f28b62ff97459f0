"""Measures how many slots fit into memory, with the largest allowed pass over one slot and over two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opentinker.services.trainer.bank import adamw
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import BankLimits
from opentinker.services.trainer.bank.mixed_batch import MixedBatch, Piece
from opentinker.services.trainer.bank.pass_part import PassOptions, PassPart, Unit
from opentinker.services.trainer.learners.base import is_out_of_memory
from opentinker.shared.nn.layout import layout
from opentinker.shared.runtime.memory import memory_bytes, peak_bytes, reset_peak
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import JobFailed

MIB = 2**20
DEAREST = PassOptions(temperature=0.7, entropy_gradient=True, hits=True)
"""Options that take the most memory; a pass has those that any of its commands asks for."""


@dataclass(frozen=True)
class Capacity:
    usable_bytes: int
    """Bytes of the device's memory."""
    fixed_bytes: int
    """Measured: base and largest pass."""
    slot_bytes: int
    """Measured: what the second slot added, and at least its vectors."""
    most: int
    """Bound of the slots that the operator set."""

    @property
    def slots(self) -> int:
        return min(self.most, max(0, self.usable_bytes - self.fixed_bytes) // self.slot_bytes)

    def __str__(self) -> str:
        usable, fixed, slot = (n / MIB for n in (self.usable_bytes, self.fixed_bytes, self.slot_bytes))
        return (
            f"{self.slots} slots: {usable:,.0f} MiB usable - {fixed:,.0f} MiB for base and largest pass, "
            f"{slot:,.2f} MiB a slot, at most {self.most}"
        )


def measure(base: BaseModel, limits: BankLimits, *, most: int, memory_share: float = 0.8) -> Capacity:
    """Measure on the device of the base. Raises JobFailed if not even one slot fits."""
    lora = LoraSpec(rank=limits.rank, alpha=float(limits.rank))
    try:
        first = base.fresh_adapter("first", lora, seed=0)
        one = _peak(base, [first], limits)
        second = base.fresh_adapter("second", lora, seed=1)
        two = _peak(base, [first, second], limits)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise JobFailed(
            f"the largest pass over two adapters does not fit next to the base: {first_line(error)} Lower "
            "bank_tokens, or take a smaller base"
        ) from None
    slot = max(two - one, first.bytes + first.weights.nbytes)  # with `partial`
    found = Capacity(usable_memory(base.device, memory_share), one - slot, slot, most)
    if base.device == "cuda":
        torch.cuda.empty_cache()  # engines on the GPU measure what is free
    if found.slots < 1:
        raise JobFailed(f"no adapter fits next to the base: {found}. Lower bank_tokens, or take a smaller base")
    return found


def _peak(base: BaseModel, adapters: Sequence[Adapter], limits: BankLimits) -> int:
    """Return the most memory in use during the largest pass and a step."""
    _reset(base.device)
    rows = [limits.datum_tokens] * (limits.step_tokens // limits.datum_tokens)
    if rest := limits.step_tokens % limits.datum_tokens:
        rows.append(max(2, rest))
    units, share = [_random_unit(base.vocabulary, tokens) for tokens in rows], math.ceil(len(rows) / len(adapters))
    pieces = [
        Piece(one, PassPart(own, DEAREST), torch.zeros_like(one.weights))
        for n, one in enumerate(adapters)
        if (own := units[n * share : (n + 1) * share] or units[:1])
    ]
    MixedBatch(pieces).run(base)
    adamw.step(adapters, [adamw.AdamSettings(lr=0.0)] * len(adapters), adamw.gradient_norms(adapters))
    return torch.cuda.max_memory_allocated() if base.device == "cuda" else peak_bytes()


def _random_unit(vocabulary: int, tokens: int) -> Unit:
    ids_T = np.random.default_rng(tokens).integers(0, vocabulary, tokens, dtype=np.int32)
    return Unit(layout([ids_T], [np.arange(tokens) > 0]), tokens, lambda s: (s.entropy_M - s.logprobs_M).sum())


def _reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def usable_memory(device: str, share: float) -> int:
    """Return this share of the device's memory; of a GPU at most what other processes leave now."""
    usable = int(device_memory(device) * share)
    if device != "cuda":
        return usable
    free, _ = torch.cuda.mem_get_info()
    return min(usable, int(free + torch.cuda.memory_reserved()))


def device_memory(device: str) -> int:
    """Return all bytes of its memory."""
    return torch.cuda.mem_get_info()[1] if device == "cuda" else memory_bytes()
