"""What the HTTP API answers, as types: of what the client returns, and of the answers in `/openapi.json`.

They are dictionaries, as JSON has them; a test holds them against the answers of a scheduler. A field that is not
always there is NotRequired; one that may be null says so.
"""

from typing import Any, Literal, NotRequired, TypedDict

State = Literal["queued", "starting", "running", "paused", "succeeded", "failed", "cancelled"]


class JobSummary(TypedDict):
    """A job, as lists have it."""

    id: str
    name: str
    kind: str
    """rl, sft, dpo, inference or eval."""
    tenant: str
    key: str
    """Id of the API key that it was submitted with; empty where the server asks for none."""
    state: State
    reason: str
    """Why it is in this state, where there is more to say."""
    waiting_for: str
    """What it lacks to start or to go on; empty when it lacks nothing."""
    asleep: bool
    """An inference job that nobody asks anything: it gets workers when somebody does."""
    epoch: int
    """Counts the trainers that it has had."""
    restarts: int
    priority: int
    step: int
    steps: int
    """Of an eval job: episodes; 0: only the trainer can know."""
    progress: dict[str, Any]
    """What the trainer last reported."""
    created: float
    """Unix seconds, as all times."""
    updated: float
    since: float
    """When it came to the queue or, of a job that has begun, when it started."""
    finished: float | None
    """Null while it is not over."""
    trace: str
    """`traceparent` of the request that submitted it."""
    model: str
    environment: NotRequired[str]
    """Its name, of jobs that have one."""
    data: NotRequired[str]
    """The path, of jobs that learn from rows."""
    endpoint: NotRequired[str]
    """Of an inference job: below it are OpenAI's routes."""


class Ledger(TypedDict):
    """Groups of episodes, counted."""

    issued: int
    running: int
    accepted: int
    trained: int
    pending: int
    discarded: dict[str, int]
    """By reason."""
    failed: dict[str, int]
    """By reason."""
    version: str
    """Newest weights, EPOCH.STEP."""
    balanced: bool
    """Accepted are as many as trained, pending and discarded together."""


class JobWorker(TypedDict):
    """A worker that is leased to the job."""

    id: str
    pool: str
    status: str
    """idle, loading, ready or draining."""
    host: str
    pid: int
    detail: dict[str, Any]


class LastMetrics(TypedDict):
    """The newest point of a source."""

    step: int
    time: float
    values: dict[str, float]


class KeptArtifacts(TypedDict):
    """What the job leaves behind."""

    rule: str
    """What is kept, and how long."""
    bytes: int
    expires: float | None
    published: list[str]
    """Names of its checkpoints."""


class Job(JobSummary):
    """One job."""

    spec: dict[str, Any]
    ledger: Ledger
    workers: list[JobWorker]
    metrics: dict[str, LastMetrics]
    """By source."""
    result: NotRequired[dict[str, Any]]
    """Of an eval job that has succeeded: version, step and metrics."""
    artifacts: KeptArtifacts


class Jobs(TypedDict):
    """A page of them, newest first."""

    jobs: list[JobSummary]
    cursor: str
    """`before` of the next page."""
    more: bool


class Event(TypedDict):
    """An entry of a job's log of events; what else belongs to it stands beside these fields."""

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
    """What one source said of one step."""

    cursor: int
    """`after` of the next call."""
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


class Said(TypedDict):
    """A message of an episode, as text."""

    role: str
    content: str


class Tokens(TypedDict):
    """The first tokens of an episode, column by column."""

    text: list[str]
    ids: list[int]
    mask: list[int]
    """1: sampled by the policy."""
    logprobs: list[float]
    """Of the distribution that was sampled from."""
    advantages: list[float] | None
    versions: list[list[Any]]
    """[first token, the one after the last, weights]."""
    left_out: int


class SeenTokens(TypedDict):
    """What one seat saw of an episode of an evaluation, in one of its contexts."""

    seat: str
    stream: str
    tokens: Tokens


class Transcript(TypedDict):
    """An episode of an evaluation."""

    index: int
    state: NotRequired[int]
    """Which beginning it has, where each is played several times."""
    sample: NotRequired[int]
    """Which time it is."""
    reward: float
    seats: NotRequired[dict[str, float]]
    """Rewards, where several play."""
    metrics: dict[str, float]
    ending: str
    messages: list[Said]
    views: NotRequired[list[SeenTokens]]
    """The same token by token; of those that were kept before there were any, none."""


class Transcripts(TypedDict):
    """Of one step; `steps`: of which there are some."""

    steps: list[int]
    step: int | None
    transcripts: list[Transcript]


class View(TypedDict):
    """What one seat saw of an episode."""

    seat: str
    stream: str
    """Which of the seat's contexts."""
    reward: float
    messages: list[Said]
    tokens: Tokens | None


class Rollout(TypedDict):
    """A training episode."""

    step: int
    group: int
    sample: int
    environment: str
    worker: str
    versions: list[str]
    """Weights that sampled it, EPOCH.STEP."""
    reward: float
    rewards: dict[str, float]
    """By seat."""
    group_rewards: dict[str, list[float]]
    """By seat, of each sample."""
    components: dict[str, float]
    scores: dict[str, float]
    metrics: dict[str, float]
    ending: str
    stops: list[str]
    tokens: int
    turns: int
    seconds: float
    views: list[View]


class Rollouts(TypedDict):
    """Of one step; `steps`: of which there are some."""

    steps: list[int]
    step: int | None
    rollouts: list[Rollout]


class CheckpointFile(TypedDict):
    """A file of a checkpoint."""

    bytes: int
    sha256: str


class Checkpoint(TypedDict):
    """A committed one."""

    step: int
    epoch: int
    version: list[int]
    """[epoch, step] of the weights."""
    created: float
    bytes: int
    model_bytes: int
    """Without what only a trainer needs."""
    files: dict[str, CheckpointFile]


class Checkpoints(TypedDict):
    """Oldest first."""

    checkpoints: list[Checkpoint]


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


class Lease(TypedDict):
    """Who may act for a job."""

    job: str
    worker: str
    incarnation: str
    epoch: int
    pool: str
    leaves_by: float
    """Time until which the worker may end what it has begun; 0: it stays."""


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
    lease: Lease | None


class Workers(TypedDict):
    """All that are alive."""

    workers: list[Worker]


class Spent(TypedDict):
    """What was used."""

    worker_s: float
    """Seconds of leased workers."""
    gpu_s: float
    """The same times their GPUs."""
    cpu_s: float
    tokens_generated: float
    tokens_trained: float
    bytes_stored: float
    """Of a day: the most at a time."""


class UsageRow(Spent):
    """Of a job, a day or a key, as `by` says."""

    job: NotRequired[str]
    name: NotRequired[str]
    kind: NotRequired[str]
    state: NotRequired[State]
    key: NotRequired[str]
    """Id of the API key; also with the job."""
    jobs: NotRequired[int]
    """Of a key: how many."""
    day: NotRequired[str]


class Usage(TypedDict):
    """What jobs cost."""

    by: Literal["job", "day", "key"]
    usage: list[UsageRow]
    total: Spent


class Key(TypedDict):
    """An API key, without its secret."""

    id: str
    tenant: str
    role: str
    scopes: list[str]
    name: str
    state: str
    """live, expired or revoked."""
    created: float
    created_by: str
    expires: float | None
    last_used: float | None
    previous_valid_until: float | None
    """Of the secret before it, after a rotation."""


class MadeKey(Key):
    """The only answer that has the secret."""

    key: str


class Keys(TypedDict):
    """Oldest first."""

    keys: list[Key]


class WhoAmI(TypedDict):
    """Of the key that asks."""

    auth: Literal["on", "off"]
    """Off: the server asks nobody for a key."""
    tenant: str
    role: str
    scopes: list[str]
    key: str | None
    """Its id."""
    name: str
    expires: float | None
