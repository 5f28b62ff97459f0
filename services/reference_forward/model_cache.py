"""LRU cache of the frozen models in memory, limited by bytes. No torch here.

absent --load--> loaded --least recently used, and the memory is needed--> absent
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

MIN_STAY_LOADS = 4.0
"""A model that groups wait for is not evicted before it has been in memory for this multiple of its load time."""
MIN_LOAD_S = 1.0
"""Lower bound of the load time in that rule."""


@dataclass
class CachedModel:
    model: Any
    bytes: int
    since: float
    """Monotonic."""
    load_s: float


class ModelCache:
    """The weights of the models in memory never exceed `budget_bytes`."""

    def __init__(self, budget_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_bytes = budget_bytes
        self.loads = 0
        self.evictions = 0
        self._clock = clock
        self._models: OrderedDict[ModelKey, CachedModel] = OrderedDict()
        """Least recently used first."""
        self._in_use: ModelKey | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._models

    def __iter__(self) -> Iterator[ModelKey]:
        """Iterate least recently used first: the order in which models take turns."""
        return iter(list(self._models))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def used_bytes(self) -> int:
        return sum(resident.bytes for resident in self._models.values())

    @contextmanager
    def use(self, key: ModelKey) -> Iterator[Any]:
        """Yield the model, which is not evicted while it is in use. One at a time."""
        self._models.move_to_end(key)
        self._in_use = key
        try:
            yield self._models[key].model
        finally:
            self._in_use = None

    def check(self, key: ModelKey, wanted: int) -> None:
        """Raise JobFailed if the model exceeds the whole budget."""
        if wanted > self.budget_bytes:
            raise JobFailed(
                f"model {key.base!r} takes {_gb(wanted)} in {key.dtype}, and this reference-forward holds at most "
                f"{_gb(self.budget_bytes)} of models (setting reference_memory_gb): raise it where there is memory "
                "for it, or take a smaller model or dtype"
            )

    def make_room(self, wanted: int, waited_for: Container[ModelKey]) -> bool:
        """Evict models, least recently used first, until `wanted` more bytes fit. Returns False if that is not possible
        yet.

        Models that no group waits for go first; the others only after their minimum stay. Nothing is evicted unless it
        frees enough memory.
        """
        now = self._clock()
        idle, busy = [], []
        for key, resident in self._models.items():
            if key == self._in_use:
                continue
            if key not in waited_for:
                idle.append(key)
            elif now - resident.since >= MIN_STAY_LOADS * max(MIN_LOAD_S, resident.load_s):
                busy.append(key)
        free, leaving = self.budget_bytes - self.used_bytes, []
        for key in idle + busy:
            if free >= wanted:
                break
            leaving.append(key)
            free += self._models[key].bytes
        if free < wanted:
            return False
        for key in leaving:
            del self._models[key]
            self.evictions += 1
        return True

    def put(self, key: ModelKey, model: Any, bytes: int, load_s: float) -> None:
        """Add a model after `make_room`. It takes the next turn."""
        self._models[key] = CachedModel(model, bytes, self._clock(), load_s)
        self._models.move_to_end(key, last=False)
        self.loads += 1


def _gb(bytes: int) -> str:
    return f"{bytes / 1e9:.3g} GB"
