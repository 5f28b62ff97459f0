"""Attributes every second of a job's recent past to one cause, from the timeline of its workers.

The trainer decides: while it computes, the time is its own. While it waits, the time belongs to what it waits for:
generation, environments and evaluations side by side, by how many episodes are in each, unless a swap stops them all or
a step waits for engines that must sleep.
If no episode is played, it belongs to frozen models, to the queue for them, to the weight group and its
transfers, to the loading of models, to what idle rollout workers wait for, in this order; and to `nothing`, if no
worker reports anything for the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from opentinker.shared.types.telemetry import Segment

Cause = tuple[int, str]
"""Its place in the order, in which each hides all later ones, and its name. Those in one place share the time."""

STOPPED, PLAYED, IDLE = 3, 4, 9
"""Places of what stops all engines, or a step that has its batch; of the episodes; and of what rollout workers wait for
that play none."""
CAUSES: dict[str, dict[str, Cause | None]] = {
    "training": {
        "queue": (0, "waiting for other jobs' training"),
        "": (1, "training"),
        "checkpoint": (2, "checkpoint"),
        "evaluation": (2, "validation"),
        "wait": None,
    },
    "swap": {
        "": (STOPPED, "swap"),
        "snapshot": (2, "copying the version"),
        "sleep": (STOPPED, "engines fall asleep or wake"),
        "wake": (STOPPED, "engines fall asleep or wake"),
        "find": (STOPPED, "looking for rollout workers"),
        "join": (7, "forming the weight group"),
        "transfer": (7, "swap"),
        "publish": (7, "swap"),
    },
    "generation": {
        "": (PLAYED, "generation"),
        "evaluation": (PLAYED, "evaluation"),
        "weights": (IDLE, "waiting for the first weights"),
        "tickets": (IDLE, "waiting for tickets"),
        "exams": (IDLE, "waiting for evaluation episodes"),
        "store": (IDLE, "waiting for room in the message store"),
    },
    "env": {"": (PLAYED, "environment"), "evaluation": (PLAYED, "evaluation")},
    "reference": {
        "": (5, "reference"),
        "queue": (6, "waiting for frozen models"),
        "loading": (6, "waiting for frozen models"),
    },
    "loading": {"": (8, "loading")},
}
"""By lane and kind, with the empty kind for all others of a lane. None: a wait for something that has its own segments.
Segments of env workers, the calls, divide `environment`."""
EPISODES = ("rollout", "evaluation")
"""Kinds of a rollout worker. On the lane `env` its episodes wait for env workers, whose own kinds are calls."""
CALLS = {"open": "environment starts", "turn": "environment turns"}
QUEUED = "waiting for env workers"
NOTHING = "nothing"
IDLE_CAUSES = (NOTHING, *(one[1] for kinds in CAUSES.values() for one in kinds.values() if one and one[0] == IDLE))
"""Those of time in which no worker is busy with the job."""


def seconds_by_cause(
    segments: Iterable[Segment], since: float, until: float, *, is_eval: bool = False
) -> dict[str, float]:
    """Return the seconds of each cause, which add up to the whole time. Times are Unix seconds. `is_eval`: of a job
    that plays evaluations and nothing else, in which they hold nothing up."""
    last: Cause = (99, NOTHING)
    edges: list[tuple[float, Cause, float]] = [(until, last, 0.0)]
    calls: dict[str, float] = defaultdict(float)
    episodes_s = 0.0
    for segment in segments:
        start, end = max(segment.start, since), min(segment.end, until)
        if end <= start:
            continue
        if segment.lane == "env":
            if segment.kind not in EPISODES:
                calls[segment.kind] += segment.level * (end - start)
                continue
            episodes_s += segment.level * (end - start)
        if cause := _cause_of(segment, is_eval):
            edges += [(start, cause, segment.level), (end, cause, -segment.level)]
    found: dict[str, float] = defaultdict(float)
    busy: dict[Cause, float] = {}
    now = since
    for at, cause, level in sorted(edges):
        for name, share in _shares(busy or {last: 1.0}).items():
            found[name] += share * (at - now)
        busy[cause] = busy.get(cause, 0.0) + level
        if busy[cause] <= 1e-9:
            del busy[cause]
        now = max(now, at)
    return _split(found, calls, episodes_s)


def _cause_of(segment: Segment, is_eval: bool) -> Cause | None:
    kinds = CAUSES.get(segment.lane, {})
    kind = "" if is_eval and segment.kind == "evaluation" else segment.kind
    return kinds.get(kind, kinds.get(""))


def _shares(busy: dict[Cause, float]) -> dict[str, float]:
    """Return whose a moment is. `busy`: how many are at each cause."""
    place = min(busy)[0]
    first = {name: level for (at, name), level in busy.items() if at == place}
    whole = sum(first.values())
    return {name: level / whole for name, level in first.items()}


def _split(found: dict[str, float], calls: dict[str, float], episodes_s: float) -> dict[str, float]:
    """Divide `environment` into the calls of env workers during that time and, for the rest, the wait for them.
    `calls`: seconds of their calls by kind; `episodes_s`: seconds of all episodes in environments, also of
    evaluations, because calls do not tell whose they are."""
    seconds = left = found.pop("environment", 0.0)
    for kind, name in CALLS.items():
        part = min(left, seconds * calls.get(kind, 0.0) / episodes_s) if episodes_s else 0.0
        found[name] = part
        left -= part
    found[QUEUED] = left
    return {cause: spent for cause, spent in found.items() if spent > 0.0}
