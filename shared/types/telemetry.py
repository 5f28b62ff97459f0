"""Messages about a running job: metrics, log lines, timelines, kept episodes, events. No work waits for any of them."""

from __future__ import annotations

from typing import Any

import msgspec


class MetricPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics. `seq` counts per source and incarnation, so that a subscriber sees its gaps."""

    job: str
    source: str
    incarnation: str
    seq: int
    time: float
    """Unix seconds."""
    step: int
    values: dict[str, float]


LEVELS = ("debug", "info", "warning", "error", "critical")
"""Log levels in ascending order."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A service's log line about a job."""

    job: str
    service: str
    worker: str
    level: str
    time: float
    """Unix seconds, by the clock of the sending machine."""
    event: str
    fields: dict[str, Any] = {}
    trace: str = ""
    """The exception, if it is about one."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Uninterrupted activity of a worker on one lane of a job's timeline."""

    lane: str
    """generation | env | reference | training | swap | loading"""
    kind: str
    """Activity: rollout, evaluation; step, checkpoint; transfer, pause, load, resume, publish...; or a wait: for groups
    (`wait`), `tickets`, `exams`, `weights`, room in the message `store`"""
    start: float
    """Unix seconds, by the clock of the worker's machine."""
    end: float
    version: str = ""
    """Version of the weights used or produced; empty for activity without weights."""
    level: float = 1.0
    """How many at a time on average: episodes, groups."""
    since: float = 0.0
    """When it began, if earlier parts have its beginning; else 0."""


class TimelinePart(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last second; running activity continues in the next part."""

    job: str
    worker: str
    incarnation: str
    seq: int
    """Counts per worker and incarnation, as in MetricPoint."""
    segments: list[Segment]
    left_out: int = 0
    """Shorter ones for which there was no room."""


class KeptEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """Live notice of a training episode that was kept."""

    group: int
    sample: int
    reward: float
    ending: str
    tokens: int
    turns: int


class KeptStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's episodes are there to be read."""

    job: str
    policy: str = ""
    """Policy of the step, in a job with several."""
    epoch: int
    step: int
    time: float
    """Unix seconds."""
    episodes: list[KeptEpisode]


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a job's log of events."""

    job: str
    event: dict[str, Any]
    """As the route of events has it: `id`, `event`, `time` and what else belongs to it."""
