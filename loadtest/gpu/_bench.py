"""What a check of the GPU suite gets, and what it reports.

A check is a generator function of a `Bench`: it yields a `Finding` for each thing that it has looked at, and raises
`Skipped` where the machine lacks what it needs. The same checks run on a CPU with tiny shapes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch


class Skipped(Exception):
    """The machine lacks something that the check needs; the message says what."""


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    seen: str
    wanted: str = ""
    good: bool = True


@dataclass(frozen=True)
class Bench:
    device: str
    """cuda | cpu"""
    small: bool
    """Tiny shapes: everything runs, and no figure means anything."""
    place: Path
    """A directory for the checks' files, removed at the end."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def now(self) -> float:
        """Return the time once the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def free_bytes(self) -> int:
        """Return the unused memory of the GPU, with what this process keeps for later tensors. Raises Skipped."""
        if not self.on_gpu:
            raise Skipped("memory is measured on GPUs alone")
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def forget(self) -> None:
        """Give back the memory of the check before."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


Check = Callable[[Bench], Iterator[Finding]]


def at_most(what: str, seen: float, limit: float, unit: str = "") -> Finding:
    """Return a finding that is good if `seen` is a number of at most `limit`."""
    return Finding(what, f"{seen:.3g}{unit}", f"<= {limit:g}{unit}", seen <= limit)


def at_least(what: str, seen: float, limit: float, unit: str = "") -> Finding:
    return Finding(what, f"{seen:.3g}{unit}", f">= {limit:g}{unit}", seen >= limit)


def holds(what: str, good: bool, seen: object) -> Finding:
    return Finding(what, str(seen), "", good)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
