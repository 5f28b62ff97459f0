"""Names what workers wait for, and since when, from the newest segments of their timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from opentinker.shared.runtime.timeline import REPORT_S
from opentinker.shared.types.telemetry import Segment

FRESH_S = 5.0
"""A segment that ended this long ago or less may still go on: workers report once a second, and clocks differ."""
GAP_S = 3.0
"""Between segments of a worker that continues with the same: it reports once a second."""

WAITS: Mapping[tuple[str, str], str] = {
    ("training", "wait"): "groups, other policies or an evaluation",
    ("swap", "find"): "the answers of rollout workers",
    ("swap", "join"): "the members of its weight group",
    ("swap", "sleep"): "engines to fall asleep",
    ("swap", "wake"): "engines to wake",
    ("generation", "weights"): "the trainer's first weights",
    ("generation", "tickets"): "tickets",
    ("generation", "exams"): "evaluation episodes",
    ("generation", "store"): "room in the message store",
    ("reference", "queue"): "a pass of frozen models",
    ("reference", "loading"): "frozen models to load",
}
"""The object of a worker's wait, by lane and kind of its segments; segments of other kinds are work."""
NOTHING_TO_PLAY = (WAITS["generation", "tickets"], WAITS["generation", "exams"])
"""Objects of the waits of a rollout worker without episodes."""


class Wait(msgspec.Struct, frozen=True):
    worker: str
    what: str
    seconds: float


def waits_of(segments: Mapping[str, Sequence[Segment]], until: float) -> list[Wait]:
    """Return the workers that wait at that time and do nothing else, the longest wait first. `segments`: by worker."""
    found = []
    for worker, own in segments.items():
        end = max((one.end for one in own), default=0.0)
        now = {(one.lane, one.kind) for one in own if end - one.end < REPORT_S}
        if until - end <= FRESH_S and now and now <= WAITS.keys():
            began, (lane, kind) = min((began_at(own, *one), one) for one in now)
            found.append(Wait(worker, WAITS[lane, kind], max(0.0, until - began)))
    return sorted(found, key=lambda one: -one.seconds)


def began_at(segments: Sequence[Segment], lane: str, kind: str) -> float:
    """Return when the newest uninterrupted activity of a kind began, or infinity."""
    began = math.inf
    for segment in sorted((one for one in segments if (one.lane, one.kind) == (lane, kind)), key=lambda one: -one.end):
        if began - segment.end > GAP_S and began < math.inf:
            break
        began = min(began, segment.since or segment.start)
    return began
