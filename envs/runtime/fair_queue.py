"""Who waits for a child process while others have all of them: in the end everybody gets one."""

from __future__ import annotations

TURN_S = 10.0
"""Who has been refused for so long is given the next child that can be had."""
ASKS_S = 5.0
"""Who has not asked again for so long does not wait any more."""


class FairQueue:
    """By key; times are of the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, float]] = {}
        """Refused first, refused last."""

    def placed(self, key: str) -> None:
        self._waiting.pop(key, None)

    def refused(self, key: str, now: float) -> None:
        self._waiting[key] = (self._waiting.get(key, (now, now))[0], now)

    def due(self, now: float) -> str | None:
        """Whose turn it is, if somebody has waited for it."""
        self._waiting = {key: times for key, times in self._waiting.items() if now - times[1] <= ASKS_S}
        key = min(self._waiting, key=lambda waiting: self._waiting[waiting][0], default=None)
        return key if key is not None and now - self._waiting[key][0] >= TURN_S else None
