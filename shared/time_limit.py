"""Time limits that do not count the time in which nothing could happen, as that in which an engine sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

SHORTEST_CHECK_S = 0.01


class Stopwatch:
    """Sums the seconds between `start` and `stop`, both of which are idempotent."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._before_s, self._since = self.seconds, None


class TimeLimit:
    """Ends the body of `running` with TimeoutError after `limit_s` seconds, without those inside `paused` and those in
    which something that it waits for stood still: `stopped_s()` is their sum, which only grows."""

    def __init__(self, limit_s: float, stopped_s: Callable[[], float]) -> None:
        self.limit_s, self._stopped_s = limit_s, stopped_s
        self._left_s, self._began_s = limit_s, stopped_s()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stopped_s(self) -> float:
        """Return the seconds of `stopped_s` since it began."""
        return self._stopped_s() - self._began_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._timeout:
            self._check(self._now() + self._left_s)
            try:
                yield
            finally:
                self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time in which this is open does not count."""
        self._stop()
        try:
            yield
        finally:
            self._check(self._now() + self._left_s)

    def _now(self) -> float:
        return time.monotonic() - self._stopped_s()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._left_s = self._end - self._now()

    def _check(self, end: float) -> None:
        """End the body if its time is over, or look again when it may be."""
        self._end, left_s = end, end - self._now()
        loop = asyncio.get_running_loop()
        if left_s > 0.0:
            self._timer = loop.call_later(max(left_s, SHORTEST_CHECK_S), self._check, end)
        else:
            self._timeout.reschedule(loop.time())
