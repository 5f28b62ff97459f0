"""Environment of a rank's process: its share of the processors, its GPU, the import path. No torch."""

from __future__ import annotations

import os
import sys

from opentinker.shared.runtime.gpus import ORDER, VISIBLE, nearest, visible

SETTINGS_PREFIX = "OPENTINKER_"
"""Prefix of this service's settings, such as the addresses of NATS and Redis, which ranks do not receive."""
THREADS = "OMP_NUM_THREADS"


def threads_of(ranks: int, threads: int | None = None) -> int:
    """Return the threads of each of `ranks` ranks on this machine. `threads`: most of one process; default: as the
    environment says."""
    cores = os.cpu_count() or 1
    told = os.environ.get(THREADS, "")
    most = threads or (int(told) if told.isdecimal() else cores)
    return max(1, min(most, cores // ranks))


def rank_environment(threads: int, place: int) -> dict[str, str]:
    """Return the variables of a rank that differ from ours. `place`: its number among the ranks of this trainer."""
    gpus = _gpus()
    if not gpus and VISIBLE not in os.environ:  # not set: all GPUs are visible; an empty list means none
        gpus = [str(number) for number in range(place + 1)]
    return {
        THREADS: str(threads),
        VISIBLE: gpus[place] if place < len(gpus) else "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def inherited() -> dict[str, str]:
    """Return the variables that a rank has from its trainer."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS_PREFIX)}


def _gpus() -> list[str]:
    """Return GPUs as CUDA_VISIBLE_DEVICES names them, in the order of ranks: rank 0's own, then those nearest to it."""
    told = os.environ.get(VISIBLE)
    listed = told.split(",") if told else []
    if ORDER.items() <= os.environ.items() and len(found := nearest(visible())) >= len(listed):
        return [str(gpu.index) for gpu in found]
    return listed  # CUDA uses another order than NVML, or NVML does not know them all
