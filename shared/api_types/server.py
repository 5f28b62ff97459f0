"""The server: its workers and streams, and what jobs cost it."""

from typing import Any, Literal, NotRequired, TypedDict

from opentinker.shared.api_types.jobs import State


class Gpu(TypedDict):
    """One that a worker may use."""

    index: int
    uuid: str
    model: str
    memory: int
    """Bytes."""
    numa: int
    """Node of the host's memory that is nearest; -1: unknown."""
    links: list[int]
    """Indices of the GPUs that NVLink joins it with."""


class RankShare(TypedDict):
    """The ranks that one trainer has of a job."""

    worker: str
    incarnation: str
    ranks: int


class Lease(TypedDict):
    """The lease of a worker: its right to act for a job."""

    job: str
    worker: str
    incarnation: str
    epoch: int
    pool: str
    leaves_by: float
    """Time until which the worker may end what it has begun; 0: it stays."""
    group: list[RankShare]
    """Trainers that share the job's ranks; empty: this one has all that its spec asks for."""


class Worker(TypedDict):
    """A live worker."""

    id: str
    incarnation: str
    """New at every start of its process."""
    pool: str
    host: str
    pid: int
    job: str | None
    epoch: int
    status: str
    """idle, loading, ready or draining."""
    address: str
    detail: dict[str, Any]
    gpus: list[Gpu]
    cores: int
    """CPUs of its machine; 0: it did not say."""
    machine: str
    """The same for all workers of one machine, in containers too; empty: it did not say."""
    max_ranks: int
    """Ranks of one job that a trainer takes; 0: any number."""
    bank: str
    """Trainer process in which it is one of several, whose jobs share a base model; empty: it has one to itself."""
    bank_tokens: int
    """Tokens of a forward and backward pass of that process; 0 without one."""
    lease: Lease | None


class Workers(TypedDict):
    """All that are alive."""

    workers: list[Worker]


class FreedWorker(TypedDict):
    """A job was cancelled, so that this worker is free in a moment."""

    worker: str
    job: str
    """Its id: the rest of it is for its tenant."""
    state: State


class Spent(TypedDict):
    """Resources used."""

    worker_s: float
    """Seconds of leased workers."""
    gpu_s: float
    """The same times their GPUs."""
    cpu_s: float
    tokens_generated: float
    tokens_trained: float
    bytes_stored: float
    """For a day: the maximum."""
    cost: float | None
    """By the operator's prices of worker and GPU hours; null where there are none."""


class UsageRow(Spent):
    """Usage of a job, a day or a key, as `by` says."""

    job: NotRequired[str]
    name: NotRequired[str]
    kind: NotRequired[str]
    state: NotRequired[State]
    key: NotRequired[str]
    """Id of the API key, or name of the user; also with the job."""
    jobs: NotRequired[int]
    """For a key: number of jobs."""
    day: NotRequired[str]


class Usage(TypedDict):
    """Cost of jobs."""

    by: Literal["job", "day", "key"]
    usage: list[UsageRow]
    total: Spent
    more: bool
    """Whether there are more jobs than these, which are the newest; not of days."""
    currency: str
    """Three letters; empty without prices."""


class Queue(TypedDict):
    """A stream of messages."""

    stream: str
    messages: int
    bytes: int
    consumers: int
    subjects: dict[str, int]
    """Messages, by subject."""


class Queues(TypedDict):
    """All of them."""

    queues: list[Queue]


class Health(TypedDict):
    """The process turns."""

    status: Literal["ok"]
    service: str
    worker: str
    """Its name."""
    auth: Literal["on", "off"]
    """Off: the server requires no key."""


class Readiness(TypedDict):
    """The readiness of a process."""

    ready: bool
    nats: bool
    """It is connected."""
