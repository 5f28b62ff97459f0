"""Attributes every second of a job's recent past to one cause, from the timeline of its workers.

The trainer decides: while it computes, the time is its own. While it waits, the time belongs to what it waits for:
generation, environments and evaluations side by side, by how many episodes are in each; frozen models, if nothing else
is busy; and `nothing`, if no worker does anything for the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from opentinker.shared.types.telemetry import Segment

OWN = {"checkpoint": "checkpoint", "wait": ""}
"""Cause for kinds of segments on the lane `training`; other kinds count as training."""
PLAYED = ("rollout", "evaluation")
"""Kinds of a rollout worker. On the lane `env` its episodes wait for env workers, whose own kinds are calls."""
CALLS = {"open": "environment starts", "turn": "environment turns"}
QUEUED = "waiting for env workers"
FIRST = ("training", "checkpoint", "swap")
"""Causes that hide all others, in this order."""
SHARED = ("generation", "environment", "evaluation")
NOTHING = "nothing"


def seconds_by_cause(segments: Iterable[Segment], since: float, until: float) -> dict[str, float]:
    """Return the seconds of each cause, which add up to the whole time. Times are Unix seconds."""
    edges: list[tuple[float, str, float]] = [(until, NOTHING, 0.0)]
    calls: dict[str, float] = defaultdict(float)
    for segment in segments:
        start, end = max(segment.start, since), min(segment.end, until)
        if end <= start:
            continue
        if segment.lane == "env" and segment.kind not in PLAYED:
            calls[segment.kind] += segment.level * (end - start)
        elif cause := _cause_of(segment):
            edges += [(start, cause, segment.level), (end, cause, -segment.level)]
    found: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    in_environments, now = 0.0, since
    for at, cause, level in sorted(edges):
        for name, share in _shares(busy).items():
            found[name] += share * (at - now)
        in_environments += busy["environment"] * (at - now)
        busy[cause] = max(0.0, busy[cause] + level) if abs(busy[cause] + level) > 1e-9 else 0.0
        now = max(now, at)
    return dict(_split(found, calls, in_environments))


def _cause_of(segment: Segment) -> str:
    """Return the cause that a segment stands for; empty: it is a wait itself."""
    if segment.lane == "training":
        return OWN.get(segment.kind, "training")
    if segment.lane in ("generation", "env"):
        own = "generation" if segment.lane == "generation" else "environment"
        return "evaluation" if segment.kind == "evaluation" else own
    return segment.lane


def _shares(busy: dict[str, float]) -> dict[str, float]:
    """Return whose a moment is. `busy`: how many are at each cause."""
    for cause in FIRST:
        if busy[cause]:
            return {cause: 1.0}
    whole = sum(busy[cause] for cause in SHARED)
    if whole:
        return {cause: busy[cause] / whole for cause in SHARED if busy[cause]}
    return {"reference" if busy["reference"] else NOTHING: 1.0}


def _split(found: dict[str, float], calls: dict[str, float], episodes_s: float) -> dict[str, float]:
    """Divide `environment` into the calls of env workers during that time and, for the rest, the wait for them.
    `calls`: seconds of their calls by kind; `episodes_s`: seconds of episodes in environments."""
    seconds = found.pop("environment", 0.0)
    left = seconds
    for kind, name in CALLS.items():
        part = min(left, seconds * calls.get(kind, 0.0) / episodes_s) if episodes_s else 0.0
        found[name] += part
        left -= part
    found[QUEUED] += left
    return {cause: spent for cause, spent in found.items() if spent > 0.0}
