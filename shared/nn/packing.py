"""Which trajectories share a forward pass: micro-batches under a token budget. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Indices into `lengths`, micro-batch by micro-batch, in order: siblings, which share a prompt, stay together.

    No trajectory is split; one that is longer than the budget is alone in its own.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError("tokens_per_micro_batch must be positive")
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = tokens_per_micro_batch
        batches[-1].append(index)
        room -= length
    return batches
