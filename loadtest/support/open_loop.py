"""Arrivals that do not wait for answers, so that a server that stalls is charged for everybody who came meanwhile.

With a closed loop (ask, wait, ask again) whoever would have come during a stall is not there to be counted, the
coordinated omission of G. Tene. Here arrival times are drawn beforehand, and a latency runs from that time on: it has
in it what the load generator itself was late, and what a request waited for one of `most` places.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

QUANTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(slots=True)
class Latencies:
    """Every single one is kept: percentiles are exact, however far out."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """By what went wrong; those are in no latency."""

    def summary(self) -> dict[str, float]:
        """In seconds."""
        if not self.seconds:
            return {"count": 0, "errors": float(self.errors.total())}
        found = np.percentile(self.seconds, QUANTILES)
        named = {f"p{quantile:g}": float(value) for quantile, value in zip(QUANTILES, found, strict=True)}
        return {"count": len(self.seconds), "errors": float(self.errors.total()), **named, "max": max(self.seconds)}


def arrivals(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Times of a Poisson process with `rate` arrivals a second, in seconds from its beginning, at least one."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, max(1, int(rate * seconds * 1.5) + 20))
    times = np.cumsum(gaps)
    return times[times < seconds] if times[0] < seconds else times[:1]


async def open_loop(
    times: NDArray[np.float64], call: Callable[[int], Awaitable[object]], into: Latencies, *, most: int = 1000
) -> None:
    """Call `call(number)` at each of `times` from now; returns when all have ended. What it raises is counted."""
    began = time.perf_counter()
    places = asyncio.Semaphore(most)

    async def one(number: int, due: float) -> None:
        try:
            async with places:
                await call(number)
        except Exception as error:  # noqa: BLE001 - a load test counts whatever goes wrong
            into.errors[f"{type(error).__name__}: {str(error)[:100]}"] += 1
        else:
            into.seconds.append(time.perf_counter() - began - due)

    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(times):
            ahead = due - (time.perf_counter() - began)
            if ahead > 0:
                await asyncio.sleep(ahead)
            group.create_task(one(number, float(due)))
