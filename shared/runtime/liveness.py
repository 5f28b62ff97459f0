"""Detects dead workers by the watcher's clock: a heartbeat carries a growing number, and a worker whose number has not
changed for its `ttl_s` of the watcher's own monotonic clock is dead. No other machine's clock, and no clock adjustment,
takes part. A heartbeat without `ttl_s` comes from the previous release: its key expires by itself.

The scheduler that leads watches all workers and takes the silent ones out of Redis (`LeaseTable.lose`): so everybody
else only has to read who is there. A trainer watches too, but only while a rollout worker owes it an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentinker.shared.types.workers import Heartbeat


class HeartbeatWatch:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, int, float]] = {}
        """Per worker: incarnation and number of its last heartbeat, and for how long it has been the last."""
        self._looked_at = clock()

    def silent(self, beats: Iterable[Heartbeat]) -> list[Heartbeat]:
        """Observe once. `beats`: the last one of each worker.

        Return the heartbeats of dead workers. The time between two calls counts for at most half of a `ttl_s`: we may
        have been stopped, or Redis away, and workers that could not send heartbeats have until the next call to do so.
        """
        now = self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        before, self._seen = self._seen, {}
        found = []
        for beat in beats:
            incarnation, number, silence_s = before.get(beat.id, ("", -1, 0.0))
            if (incarnation, number) == (beat.incarnation, beat.number):
                silence_s += min(passed_s, beat.ttl_s / 2)
            else:
                silence_s = 0.0
            self._seen[beat.id] = (beat.incarnation, beat.number, silence_s)
            if beat.ttl_s and silence_s >= beat.ttl_s:
                found.append(beat)
        return found
