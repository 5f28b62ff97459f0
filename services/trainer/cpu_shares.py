"""Divides the processor time of a process among the jobs that it trains, by the tokens of their passes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentinker.shared.state.usage import cpu_seconds


@dataclass
class CpuShare:
    """A job under way."""

    tokens: Callable[[], int] = lambda: 0
    """Tokens of its passes so far."""
    counted: int = 0
    """Those whose time is divided."""


class CpuShares:
    """Shares add up to the time of the process while it has jobs. Call it from any thread."""

    def __init__(self, process_seconds: Callable[[], float] = cpu_seconds) -> None:
        self._process_seconds, self._lock = process_seconds, threading.Lock()
        self._divided_s = process_seconds()
        self._jobs: dict[str, CpuShare] = {}
        self._totals: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def job(self, worker: str) -> Iterator[CpuShare]:
        """The worker has a job."""
        with self._lock:
            self._divide()
            self._jobs[worker] = share = CpuShare()
        try:
            yield share
        finally:
            with self._lock:
                self._divide()
                del self._jobs[worker]

    def seconds(self, worker: str) -> float:
        """Return the processor seconds of all jobs that the worker has had. Blocking."""
        with self._lock:
            self._divide()
            return self._totals[worker]

    def _divide(self) -> None:
        """Divide the time since the last call: by tokens, or equally if no pass has ended."""
        now = self._process_seconds()
        spent, self._divided_s = max(0.0, now - self._divided_s), max(now, self._divided_s)
        new = {worker: share.tokens() - share.counted for worker, share in self._jobs.items()}
        total = sum(new.values())
        for worker, tokens in new.items():
            self._totals[worker] += spent * (tokens / total if total else 1 / len(new))
            self._jobs[worker].counted += tokens
