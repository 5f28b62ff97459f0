"""Converts examples to tensors: the micro-batches of a batch of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from opentinker.services.trainer.data.chat import Tokens
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.shared.nn.layout import Layout, layout
from opentinker.shared.nn.packing import passes_by_rank


@dataclass
class RowBatch:
    """Input of one forward pass. S: token sequences, example by example; M: learned tokens, sequence by sequence."""

    examples: list[Example]
    places: list[int]
    """Indices of the examples in their batch; empty if the rank only takes part in collectives."""
    plan: Layout
    sequence_M: Tensor
    """int64: the sequence that a token belongs to."""
    tokens: int
    """All tokens of the sequences."""
    last: bool
    """Whether this is the last of this rank's passes over the batch."""
    reference_S: Tensor | None = None
    """dpo: log-probabilities of a reference without the adapter, where they were computed before."""

    def sums_S(self, values_M: Tensor) -> Tensor:
        """Return per sequence the sum over its learned tokens."""
        sequences = sum(len(example.parts) for example in self.examples)
        return values_M.new_zeros(sequences).index_add(0, self.sequence_M, values_M)


def row_batches(
    examples: Sequence[Example],
    tokens_per_micro_batch: int,
    device: torch.device,
    process_group: ProcessGroup | None = None,
) -> Iterator[RowBatch]:
    """Yield micro-batches in order; the parts of an example stay together, and their common prefix is computed once.

    With a process group, yield this rank's: consecutive examples, about equally many tokens each. All ranks run the
    same number of passes, because they may share weights; a rank with fewer micro-batches adds smallest passes.
    """
    process_group = process_group or ProcessGroup()
    passes_R = passes_by_rank([len(example) for example in examples], tokens_per_micro_batch, process_group.world)
    own_passes = passes_R[process_group.rank]
    count = max(map(len, passes_R))
    for number in range(count):
        places = own_passes[number] if number < len(own_passes) else []
        chosen = [examples[place] for place in places] or [_shortest(examples[0])]
        yield _row_batch(chosen, places, device, last=number == count - 1)


def _row_batch(examples: list[Example], places: list[int], device: torch.device, *, last: bool) -> RowBatch:
    parts = [part for example in examples for part in example.parts]
    learned = torch.tensor([int(part.learned_T.sum()) for part in parts], device=device)
    return RowBatch(
        examples=examples,
        places=places,
        plan=layout([part.ids_T for part in parts], [part.learned_T for part in parts]).to(device),
        sequence_M=torch.arange(len(parts), device=device).repeat_interleave(learned),
        tokens=sum(len(part) for part in parts),
        last=last,
    )


def _shortest(example: Example) -> Example:
    """Return the example cut to one learned token of each part and the token before it."""
    parts = []
    for part in example.parts:
        first = int(np.flatnonzero(part.learned_T)[0])
        parts.append(Tokens(part.ids_T[first - 1 : first + 1], part.learned_T[first - 1 : first + 1]))
    return replace(example, parts=tuple(parts))


def learned_tokens(examples: Sequence[Example]) -> int:
    return sum(int(part.learned_T.sum()) for example in examples for part in example.parts)
