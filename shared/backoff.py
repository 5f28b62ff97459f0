"""Exponential backoff: the delays of every retry loop."""

from __future__ import annotations

import asyncio
import random


def exponential_delay_s(failures: int, first_s: float, max_s: float) -> float:
    """Return the delay after consecutive failures, without jitter: `first_s` after one, doubled with each."""
    return min(max_s, first_s * 2.0 ** min(failures - 1, 64))


class Backoff:
    """Delays that grow by `factor` up to `max_s`, each with jitter of half of it either way."""

    def __init__(self, first_s: float, max_s: float, factor: float = 2.0) -> None:
        self.next_s = self._first_s = first_s
        """The next delay without its jitter."""
        self._max_s = max_s
        self._factor = factor

    def delay_s(self) -> float:
        """Return the next delay."""
        delay_s, self.next_s = self.next_s, min(self._factor * self.next_s, self._max_s)
        return delay_s * (0.5 + random.random())

    async def sleep(self) -> None:
        await asyncio.sleep(self.delay_s())

    def reset(self) -> None:
        self.next_s = self._first_s
