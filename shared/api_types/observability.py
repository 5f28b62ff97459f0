"""Observability of a job: events, failures, metrics, log, timeline, distributions."""

from typing import Any, Literal, NotRequired, TypedDict

from opentinker.shared.api_types.jobs import State


class Event(TypedDict):
    """An entry of a job's event log; further fields depend on the event."""

    id: str
    """`after` of the next call."""
    event: str
    time: float
    state: NotRequired[State]
    """Where the event changed it."""
    epoch: NotRequired[int]
    step: NotRequired[int]
    steps: NotRequired[list[int]]
    group: NotRequired[int]
    by: NotRequired[str]
    """The job, or the API key, that brought it about."""
    reason: NotRequired[str]
    error: NotRequired[str]


class Events(TypedDict):
    """With `format=json`."""

    events: list[Event]


class MetricPoint(TypedDict):
    """Values that one source reported for one step."""

    cursor: int
    """`after` of the next call. Cursors of what the full history has dropped, and metrics.jsonl has, are lower."""
    source: str
    incarnation: str
    """New at every start of the process."""
    seq: int
    """Counts per source and incarnation."""
    time: float
    step: int
    values: dict[str, float]


class Metrics(TypedDict):
    """A page of them, oldest first."""

    metrics: list[MetricPoint]
    cursor: int
    """`after` of the next page."""
    more: bool


class Failure(TypedDict):
    """A group or an episode that failed permanently; further fields depend on the kind."""

    id: str
    event: str
    """group_failed, group_rejected or exam_failed."""
    time: float
    reason: str
    error: str
    """The end of it."""
    group: NotRequired[int]
    episode: NotRequired[int]
    """For eval jobs."""


class Failures(TypedDict):
    """The newest of them, newest first."""

    failures: list[Failure]
    counts: dict[str, int]
    """Groups, of all that there were, by reason."""


class LogLine(TypedDict):
    """A service's log line about the job."""

    cursor: int
    """`after` of the next call."""
    job: str
    service: str
    worker: str
    level: Literal["debug", "info", "warning", "error", "critical"]
    time: float
    """By the clock of the sending machine."""
    event: str
    fields: dict[str, Any]
    trace: str
    """The exception, if it is about one."""


class LogLines(TypedDict):
    """A page of them, oldest first; with `format=json`."""

    lines: list[LogLine]
    cursor: int
    """`after` of the next page."""
    more: bool


class Segment(TypedDict):
    """Uninterrupted activity of a worker on one lane of the timeline."""

    lane: str
    """generation, env, reference, training or swap."""
    kind: str
    """Activity: rollout, evaluation; step, checkpoint; transfer, pause, load, resume, publish...; or a wait: for groups
    (`wait`), `tickets`, `exams`, `weights`, room in the message `store`"""
    start: float
    """By the clock of the worker's machine."""
    end: float
    version: str
    """Weights, EPOCH.STEP; empty where there are none."""
    level: float
    """How many at a time on average: episodes, groups."""
    since: float
    """When it began, if earlier parts have its beginning; else 0."""


class TimelinePart(TypedDict):
    """A worker's last second; running activity continues in the next part."""

    cursor: int
    """`after` of the next call."""
    job: str
    worker: str
    incarnation: str
    """New at every start of the process."""
    seq: int
    """Counts per worker and incarnation."""
    segments: list[Segment]
    left_out: int
    """Shorter ones for which there was no room."""


class Timeline(TypedDict):
    """A page of parts, in the order in which they came."""

    timeline: list[TimelinePart]
    cursor: int
    """`after` of the next page."""
    more: bool


class Histogram(TypedDict):
    """Numbers, counted."""

    edges: list[float]
    counts: list[int]
    """One more than edges: below the first, from each to the next, from the last one on."""


class Distribution(TypedDict):
    """Distributions of the batch of a step."""

    epoch: int
    step: int
    time: float
    reward: Histogram
    """Rewards of seats; length and turns are of seats too."""
    length: Histogram
    """In tokens."""
    turns: Histogram
    staleness: Histogram
    """In versions, of trajectories."""
    ratio: NotRequired[Histogram]
    """Importance ratio of tokens, where the learner says it."""


class Distributions(TypedDict):
    """Oldest first."""

    distributions: list[Distribution]


class StreamCredentials(TypedDict):
    """Credentials for the live streams of a job on NATS. No other answer contains the token."""

    servers: list[str]
    """URLs, of WebSockets."""
    token: str
    """`auth_token` of CONNECT."""
    inbox: str
    """The prefix below which answers may be heard."""
    expires_at: float
    subjects: dict[str, str]
    """By name: what may be heard."""
    history: dict[str, str]
    """By the same names: the path at which what came before is read."""


class CauseOfTime(TypedDict):
    """Seconds of one cause."""

    cause: str
    """training, checkpoint, swap; while the trainer waits: generation, evaluation, reference, environment starts or
    turns, waiting for env workers; while no episode is played: what workers wait for; nothing: no process worked for
    the job."""
    seconds: float


class Wait(TypedDict):
    """A worker that has done nothing but wait for this time."""

    worker: str
    what: str
    """What for, such as `tickets` or `groups, other policies or an evaluation`."""
    seconds: float


class SilentWorker(TypedDict):
    """A worker of a job that has done nothing for it for a while."""

    worker: str
    seconds: float
    """Since it last did something for the job."""


class Finding(TypedDict):
    """A cause that holds a job up or spoils its learning, and the change that helps."""

    what: str
    advice: str


class Diagnosis(TypedDict):
    """The breakdown of a job's recent time, and why it is slow, waits or does not learn."""

    job: str
    state: str
    since: float
    until: float
    """Unix seconds; the causes add up to the time between them."""
    is_whole: bool
    """False: there was more activity than is looked at."""
    causes: list[CauseOfTime]
    """The largest first."""
    waits: list[Wait]
    """What workers wait for now, the longest wait first."""
    silent: list[SilentWorker]
    """Silent workers among those that hold the job."""
    findings: list[Finding]
    """The most urgent first."""
