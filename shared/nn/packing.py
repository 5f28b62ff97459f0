"""Which trajectories share a forward pass: micro-batches under a token budget. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal


def pack(
    lengths: Sequence[int], tokens_per_micro_batch: int, order: Literal["longest_first", "arrival"] = "longest_first"
) -> list[list[int]]:
    """Indices into `lengths`, micro-batch by micro-batch. Each index appears once; no trajectory is split.

    `longest_first` spreads the trajectories over the smallest number of micro-batches that greedy filling reaches,
    about equally full. `arrival` fills one after the other. A trajectory longer than the budget is alone in its own.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError("tokens_per_micro_batch must be positive")
    if order == "arrival":
        return _fill(range(len(lengths)), lengths, tokens_per_micro_batch)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = -(-sum(lengths) // tokens_per_micro_batch)
    while True:
        spread = _spread(longest_first, lengths, count, tokens_per_micro_batch)
        if spread is not None:
            return spread
        count += 1


def _fill(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for i in indices:
        if not batches or lengths[i] > room:
            batches.append([])
            room = budget
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def _spread(indices: Sequence[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Always into the emptiest of `count` micro-batches; None if one would overflow with several."""
    emptiest: list[tuple[int, int]] = [(0, b) for b in range(count)]
    batches: list[list[int]] = [[] for _ in range(count)]
    for i in indices:
        load, b = heapq.heappop(emptiest)
        if batches[b] and load + lengths[i] > budget:
            return None
        batches[b].append(i)
        heapq.heappush(emptiest, (load + lengths[i], b))
    return [sorted(batch) for batch in batches if batch]
