"""Assigns sequences to ranks and to forward passes under a token budget. Pure Python."""

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


def share(lengths: Sequence[int], ranks: int) -> list[range]:
    """Indices into `lengths`, one run of neighbours per rank, such that the longest share is as short as can be.

    Siblings stand side by side and share a prompt, so most of them stay together. The first shares are the full ones:
    with fewer trajectories than ranks the last ranks get none.
    """
    if ranks < 1:
        raise ValueError("there must be at least one rank")
    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(pack(lengths, max(1, middle))) <= ranks else (middle + 1, high)
    runs = [range(run[0], run[-1] + 1) for run in pack(lengths, max(1, low))]
    return runs + [range(len(lengths), len(lengths))] * (ranks - len(runs))


def passes_by_rank(lengths: Sequence[int], tokens_per_micro_batch: int, ranks: int) -> list[list[list[int]]]:
    """Indices into `lengths`, by rank and forward pass: those of `share`, packed."""
    return [
        [[own[n] for n in places] for places in pack([lengths[n] for n in own], tokens_per_micro_batch)]
        for own in share(lengths, ranks)
    ]
