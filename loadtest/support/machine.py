"""Records the machine of a load test: CPU time of its own processes, CPU time of others, and a verdict."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import orjson
import psutil

QUIET_CORES = 0.15
"""Others may use so much of the machine; beyond it a missed target says little."""


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _everybody_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Of this process and of all below it that have ended and were waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def _below_s() -> float:
    """Of living processes below this one, such as the fork server of services, with those that they have waited for."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += sum(process.cpu_times()[:4])
    return found


class Others:
    """Cores that others use from its making until `stop`, when the services of the test have ended."""

    def __init__(self) -> None:
        self._own, self._everybody, self._began = own_s() + _below_s(), _everybody_s(), time.perf_counter()

    def stop(self) -> float:
        used = _everybody_s() - self._everybody - (own_s() + _below_s() - self._own)
        return max(0.0, used / (time.perf_counter() - self._began))


class Meter:
    """Measures from its making until `stop`; `pids` by name are the processes of the test."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._before, self._everybody = {name: _cpu_s(pid) for name, pid in pids.items()}, _everybody_s()
        self._began = time.perf_counter()
        self.seconds = 0.0
        self.used: dict[str, float] = {}
        """CPU seconds by process."""
        self.foreign = 0.0
        """Cores used by everybody else."""

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._began
        self.used = {name: _cpu_s(pid) - self._before[name] for name, pid in self._pids.items()}
        self.foreign = max(0.0, (_everybody_s() - self._everybody - sum(self.used.values())) / self.seconds)


def keep(path: Path | None, figures: Mapping[str, float]) -> None:
    """For programs, where one asks for them."""
    if path is not None:
        path.write_bytes(orjson.dumps(figures))


def met(what: str, seen: float, target: float, foreign: float) -> bool:
    """Says whether at least `target` of `what` was seen, and whether the machine was quiet enough to tell."""
    return verdict(f">= {target:,.0f} {what}", seen >= target, foreign)


def verdict(target: str, good: bool, foreign: float = 0.0) -> bool:
    """Says whether it was met; if not, also where others used the machine too much to tell. Returns `good`."""
    quiet = good or foreign <= QUIET_CORES
    disturbed = "" if quiet else f" (disturbed: others used {foreign:.2f} cores; measure again)"
    print(f"target: {target}: {'met' if good else 'MISSED'}{disturbed}")
    return good
