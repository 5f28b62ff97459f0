"""Who beats still, by the clock of whoever watches: a heartbeat carries a number that grows, and a worker whose number
has not moved for its `ttl_s` of the watcher's own monotonic clock is silent. No clock of another machine, and no step
of any, takes part. A beat without a `ttl_s` is of the release before that: its key expires by itself.

The scheduler that leads watches all workers and takes the silent ones out of Redis (`LeaseTable.lose`): so everybody
else only has to read who is there. A trainer watches too, but only while a rollout worker owes it an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentinker.shared.types.core import Heartbeat


class Pulses:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, int, float]] = {}
        """Of each worker: incarnation and number of its last beat, and for how long that has been the last."""
        self._looked_at = clock()

    def silent(self, beats: Iterable[Heartbeat]) -> list[Heartbeat]:
        """One look. `beats`: the last one of each worker.

        The time between two looks counts for half of a `ttl_s` at most: we may have been stopped, or Redis away, and
        who could not beat meanwhile has the time until the next look to do so.
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
