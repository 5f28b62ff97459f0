"""Which layers a model of the Tinker API adapts, by the names of the base's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opentinker.services.trainer.bank.limits import Refused
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.tinker import ALPHA, LoraShape

ATTENTION = re.compile(r"attn|attention")


def lora_of(shape: LoraShape, layers: Sequence[str]) -> LoraSpec:
    """Return the adapter's settings. `layers`: names of the base's linear layers. Raises Refused if none is left."""
    if shape.rank < 1:
        raise Refused(f"rank {shape.rank}: must be 1 or more")
    if shape.train_attn and shape.train_mlp:
        return LoraSpec(rank=shape.rank, alpha=ALPHA)
    chosen = {name for name in layers if (shape.train_attn if ATTENTION.search(name) else shape.train_mlp)}
    if not chosen:
        raise Refused("train_mlp and train_attn leave no layer to train; set one of them")
    leaves = {name.rpartition(".")[2] for name in chosen}
    if leaves.isdisjoint(name.rpartition(".")[2] for name in layers if name not in chosen):
        return LoraSpec(rank=shape.rank, alpha=ALPHA, target_modules=sorted(leaves))
    return LoraSpec(rank=shape.rank, alpha=ALPHA, target_modules=sorted(chosen))
