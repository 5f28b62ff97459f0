"""Queue of the keys that wait for a child process while others hold all of them: each gets one eventually."""

from __future__ import annotations

ASKS_S = 5.0
"""A key that has not asked again for this long no longer waits."""


class FairQueue:
    """Waiting keys. Times are those of the event loop."""

    def __init__(self, turn_s: float = 10.0) -> None:
        """`turn_s`: a key that has been refused for this long gets the next child."""
        self._turn_s = turn_s
        self._waiting: dict[str, tuple[float, float]] = {}
        """Times of the first and the last refusal, by key."""

    def placed(self, key: str) -> None:
        self._waiting.pop(key, None)

    def refused(self, key: str, now: float) -> None:
        self._waiting[key] = (self._waiting.get(key, (now, now))[0], now)

    def due(self, now: float) -> str | None:
        """Return the key that has waited longest, if it has waited long enough."""
        self._waiting = {key: times for key, times in self._waiting.items() if now - times[1] <= ASKS_S}
        key = min(self._waiting, key=lambda waiting: self._waiting[waiting][0], default=None)
        return key if key is not None and now - self._waiting[key][0] >= self._turn_s else None
