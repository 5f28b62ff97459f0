"""From examples to tensors: the micro-batches of a batch of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opentinker.services.trainer.examples import Example
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.packing import pack


@dataclass
class RowBatch:
    """What one forward pass needs. S: token sequences, example by example; M: learned tokens, sequence by sequence."""

    examples: list[Example]
    plan: Layout
    sequence_M: Tensor
    """int64: the sequence that a token belongs to."""
    tokens: int
    """All tokens of the sequences."""

    def sums_S(self, values_M: Tensor) -> Tensor:
        """Per sequence, the sum over its learned tokens."""
        sequences = sum(len(example.parts) for example in self.examples)
        return values_M.new_zeros(sequences).index_add(0, self.sequence_M, values_M)


def row_batches(examples: Sequence[Example], tokens_per_micro_batch: int, device: torch.device) -> Iterator[RowBatch]:
    """In order; the parts of an example stay together, and what they begin with alike is computed once."""
    for places in pack([len(example) for example in examples], tokens_per_micro_batch):
        chosen = [examples[place] for place in places]
        parts = [part for example in chosen for part in example.parts]
        learned = torch.tensor([int(part.learned_T.sum()) for part in parts], device=device)
        yield RowBatch(
            examples=chosen,
            plan=layout([part.ids_T for part in parts], [part.learned_T for part in parts]).to(device),
            sequence_M=torch.arange(len(parts), device=device).repeat_interleave(learned),
            tokens=sum(len(part) for part in parts),
        )


def learned_tokens(examples: Sequence[Example]) -> int:
    return sum(int(part.learned_T.sum()) for example in examples for part in example.parts)
