"""Which frozen models are in memory, and which one goes when another is wanted. No torch here.

absent --load--> resident --least recently used, and the memory is wanted--> absent
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.shared.types.errors import JobFailed

PATIENCE = 4.0
"""A model that groups wait for is not thrown out before it has been there so many times as long as it took to load."""
SHORTEST_S = 1.0
"""Loads that took less count as so long."""


@dataclass
class Resident:
    model: Any
    bytes: int
    since: float
    """Monotonic."""
    load_s: float


class ModelCache:
    """`budget_bytes` is never exceeded by the weights of what is resident."""

    def __init__(self, budget_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_bytes = budget_bytes
        self.loads = 0
        self.evictions = 0
        self._clock = clock
        self._residents: OrderedDict[ModelKey, Resident] = OrderedDict()
        """Least recently used first."""
        self._in_use: ModelKey | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def __iter__(self) -> Iterator[ModelKey]:
        """Least recently used first: the order in which models have their turn."""
        return iter(list(self._residents))

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def used_bytes(self) -> int:
        return sum(resident.bytes for resident in self._residents.values())

    @contextmanager
    def using(self, key: ModelKey) -> Iterator[Any]:
        """The model, which stays as long as it is in use. One at a time."""
        self._residents.move_to_end(key)
        self._in_use = key
        try:
            yield self._residents[key].model
        finally:
            self._in_use = None

    def check(self, key: ModelKey, wanted: int) -> None:
        """Raises JobFailed if the model can never be held."""
        if wanted > self.budget_bytes:
            raise JobFailed(
                f"model {key.base!r} takes {_gb(wanted)} in {key.dtype}, and this reference-forward holds at most "
                f"{_gb(self.budget_bytes)} of models (setting reference_memory_gb): raise it where there is memory "
                "for it, or take a smaller model or dtype"
            )

    def make_room(self, wanted: int, waited_for: Container[ModelKey]) -> bool:
        """Let go of models, the least recently used first, until `wanted` more bytes fit. False: not now.

        Models that nothing waits for go first; the others only after their time. None goes unless that is enough.
        """
        now = self._clock()
        idle, busy = [], []
        for key, resident in self._residents.items():
            if key == self._in_use:
                continue
            if key not in waited_for:
                idle.append(key)
            elif now - resident.since >= PATIENCE * max(SHORTEST_S, resident.load_s):
                busy.append(key)
        free, leaving = self.budget_bytes - self.used_bytes, []
        for key in idle + busy:
            if free >= wanted:
                break
            leaving.append(key)
            free += self._residents[key].bytes
        if free < wanted:
            return False
        for key in leaving:
            del self._residents[key]
            self.evictions += 1
        return True

    def put(self, key: ModelKey, model: Any, bytes: int, load_s: float) -> None:
        """A model for which room was made. Its first turn is the next one."""
        self._residents[key] = Resident(model, bytes, self._clock(), load_s)
        self._residents.move_to_end(key, last=False)
        self.loads += 1


def _gb(bytes: int) -> str:
    return f"{bytes / 1e9:.3g} GB"
