"""Jobs, and what is known of one before it is submitted."""

from typing import Any, Literal, NotRequired, TypedDict

from opentinker.shared.api_types.episodes import Category, Said

State = Literal["queued", "starting", "running", "paused", "succeeded", "failed", "cancelled"]


class JobSummary(TypedDict):
    """A job, as lists have it."""

    id: str
    name: str
    project: str
    """Empty if it has none."""
    tags: list[str]
    notes: str
    kind: str
    """rl, sft, dpo, eval, inference or tinker."""
    tenant: str
    key: str
    """Id of the API key, or name of the user, that submitted it; empty where the server asks for neither."""
    state: State
    reason: str
    """Why it is in this state, where there is more to say."""
    waiting_for: str
    """Resources that the job waits for; empty if none."""
    asleep: bool
    """A queued inference job without requests: it gets workers with the next request."""
    epoch: int
    """Counts the trainers that it has had."""
    restarts: int
    priority: int
    step: int
    steps: int
    """Eval jobs: number of episodes; 0: only the trainer can know."""
    progress: dict[str, Any]
    """The trainer's last report."""
    curve: list[float]
    """Mean reward, or loss, over the steps so far, as some dozens of values."""
    created: float
    """Unix seconds, as all times."""
    updated: float
    since: float
    """When it came to the queue or, of a job that has begun, when it started."""
    quiet_since: float
    """When the last request of a job that is asleep ended; 0 if it has never slept."""
    finished: float | None
    """Null while it is not over."""
    deleted: float | None
    """When all that it left was deleted; null while it is there."""
    trace: str
    """`traceparent` of the request that submitted it."""
    model: str
    environment: NotRequired[str]
    """Its name, of jobs that have one."""
    data: NotRequired[str]
    """The path, of jobs that learn from rows."""
    endpoint: NotRequired[str]
    """Inference jobs: URL below which OpenAI's routes are."""


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


class PolicyState(TypedDict):
    """One policy of a job with several."""

    ledger: Ledger


class PoolMember(TypedDict):
    """A past version of a policy, and how the policy does against it."""

    version: str
    """EPOCH.STEP."""
    won: int
    """Games that the policy has won against it since it became a member."""
    drawn: int
    lost: int
    win_rate: float | None
    """Of the policy in recent games (earlier ones lose half their weight at each candidate), with one more game that
    was drawn; null with less than one recent game."""
    rating: float | None
    """On the scale of the job's `val/rating`, from all its games; null while no game connects it with the anchor."""
    rating_error: float | None
    """Standard error."""


class OpponentPool(TypedDict):
    """An opponent pool of a job."""

    policy: str
    """Whose versions its members are; empty: of the job's one policy."""
    members: list[PoolMember]
    """Oldest first."""


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
    """Artifacts that the job keeps."""

    rule: str
    """Artifacts that are kept, and for how long."""
    bytes: int
    expires: float | None
    published: list[str]
    """Names of its checkpoints."""


class EvalResult(TypedDict):
    """Result of an eval job."""

    version: str
    """The evaluated weights, EPOCH.STEP."""
    step: int
    values: dict[str, float]
    """val/* metrics; NAME/low and NAME/high are the 95% interval of NAME."""
    categories: list[Category]
    """By name; empty where the environment names none."""


class Job(JobSummary):
    """One job."""

    spec: dict[str, Any]
    ledger: Ledger
    """In a job with several policies, that of the first."""
    policies: NotRequired[dict[str, PolicyState]]
    """By name, of a job with several."""
    pools: NotRequired[dict[str, OpponentPool]]
    """By name, of a job with opponent pools; without those that have no member yet."""
    workers: list[JobWorker]
    metrics: dict[str, LastMetrics]
    """By source."""
    result: NotRequired[EvalResult]
    """For succeeded eval jobs."""
    artifacts: KeptArtifacts


class Jobs(TypedDict):
    """A page of them."""

    jobs: list[JobSummary]
    cursor: str
    """`before` of the next page."""
    more: bool


class JobGroup(TypedDict):
    """Jobs that have a property in common."""

    name: str
    """The project, tag, state or other value; empty for jobs without one."""
    jobs: int
    states: dict[str, int]
    """Jobs by state."""


class JobGroups(TypedDict):
    """Jobs counted by a property, the largest group first."""

    groups: list[JobGroup]


class Mistake(TypedDict):
    """A mistake in a spec."""

    field: str
    value: Any
    problem: str
    suggestion: NotRequired[str]
    """Replacement: a setting's name, a value or a line of TOML."""


class Check(TypedDict):
    """One check."""

    what: str
    found: str
    result: Literal["ok", "note", "bad"]
    """A note holds nothing up now."""
    hint: str
    """Advice; may be empty."""


class JobEstimate(TypedDict):
    """Time and cost of a job or a sweep, estimated from earlier jobs like it; else simulated, or by round figures."""

    jobs: int
    """More than one of a sweep: as many as its budgets allow."""
    steps: int
    """Steps of each job; eval jobs: episodes. Of a sweep the mean over its combinations."""
    seconds: float
    """Duration of each job, from when it runs: the median of `like`. Of a sweep the mean over its combinations."""
    seconds_low: float
    """By the fastest of `like`; the same as `seconds` without several."""
    seconds_high: float
    worker_s: float
    """Seconds of leased workers, of all jobs together."""
    gpu_s: float
    """The same times their GPUs."""
    cost: float | None
    """By the operator's prices; null where there are none."""
    currency: str
    """Three letters; empty without a cost."""
    like: list[str]
    """Ids of the earlier jobs on which it rests, the newest first: of the same kind, model and environment, on as many
    workers as far as there are such. Empty where round figures were assumed, or a simulation was made."""
    basis: str
    """The data that it is based on, as a sentence."""


class Validation(TypedDict):
    """A spec, looked at as if it were submitted."""

    valid: bool
    mistakes: list[Mistake]
    """As of a submission; where there are some nothing else is looked at."""
    checks: list[Check]
    messages: list[Said]
    """Messages of the environment's first turn."""
    estimate: JobEstimate | None
    """Null where there is nothing to rest it on: no job like it has run here, and its model's size is unknown; and for
    jobs without an end."""
