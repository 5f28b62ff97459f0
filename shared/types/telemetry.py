"""What is said of a running job while it runs: metrics, log lines, the timeline of its workers, episodes that are kept,
events. Nobody's work waits for any of it."""

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
"""Of log lines, in order."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a service said about a job."""

    job: str
    service: str
    worker: str
    level: str
    time: float
    """Unix seconds, by the clock of the machine that said it."""
    event: str
    fields: dict[str, Any] = {}
    trace: str = ""
    """The exception, if it is about one."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did without a break, on one lane of a job's timeline."""

    lane: str
    """generation | env | reference | training | swap"""
    kind: str
    """What it was there: rollout, evaluation; step, wait, checkpoint; transfer, pause, load, resume, publish..."""
    start: float
    """Unix seconds, by the clock of the worker's machine."""
    end: float
    version: str = ""
    """Of the weights that it was done with, or that came of it; empty where there are none."""
    level: float = 1.0
    """How many at a time on average: episodes, groups."""


class TimelinePart(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last second; what goes on then goes on in the next part."""

    job: str
    worker: str
    incarnation: str
    seq: int
    """Counts per worker and incarnation, as in MetricPoint."""
    segments: list[Segment]
    left_out: int = 0
    """Shorter ones for which there was no room."""


class KeptEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """What is said live of a training episode that was kept word by word."""

    group: int
    sample: int
    reward: float
    ending: str
    tokens: int
    turns: int


class KeptStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's episodes are there to be read."""

    job: str
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
