"""How many tokens a pass takes: as many as are allowed, or, while several tenants send, as many as take a short time.

A tenant that comes while a pass is under way waits for its end, however small its own command is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

SHARED_PASS_S = 0.3
"""Seconds that a pass takes about, while several tenants send."""
RECENT_S = 2.0
"""A tenant whose last command is older sends no more, as far as passes are concerned."""
SMALLEST = 256
"""Tokens of a pass, however slow the device is."""
WEIGHT = 0.3
"""Weight of the last pass in the mean speed."""


class PassBudget:
    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: tokens that a pass may have."""
        self._most, self._clock = most, clock
        self._sent: dict[str, float] = {}
        """When each tenant sent its last command."""
        self._rate = 0.0
        """Tokens per second; 0 before the first pass."""

    def sent(self, tenant: str) -> None:
        self._sent[tenant] = self._clock()

    def passed(self, tokens: int, seconds: float) -> None:
        """Take note of the speed of a pass."""
        if seconds > 0:
            rate = tokens / seconds
            self._rate = rate if not self._rate else (1 - WEIGHT) * self._rate + WEIGHT * rate

    def tokens(self, waiting: Iterable[str]) -> int:
        """Return how many the next pass may have. A larger unit has a pass alone. `waiting`: tenants with tokens in the
        queue."""
        now = self._clock()
        self._sent = {tenant: at for tenant, at in self._sent.items() if now - at < RECENT_S}
        if len(self._sent.keys() | set(waiting)) < 2:
            return self._most
        return min(self._most, max(SMALLEST, int(self._rate * SHARED_PASS_S)))
