"""Artifacts of jobs: checkpoints, files, names."""

from typing import Literal, TypedDict

from opentinker.shared.api_types.episodes import Category


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


class Evaluation(TypedDict):
    """An eval job that played a checkpoint, or the evaluation that its own job made while it trained."""

    job: str
    """The eval job; during training, the job itself."""
    name: str
    policy: str
    """Policy of the checkpoint, of a job with several policies; otherwise empty."""
    step: int
    """Step of the checkpoint."""
    state: str
    environment: str
    """Empty for sft and dpo, which are evaluated on rows."""
    setting: str
    """Results may be compared where it is equal, e.g. `gsm8k split=test; greedy; 512 tokens`: environment, config and
    tools, players, sampling and limits of episodes, start states; or the rows and how they become tokens. It names what
    differs from a default; a text of more than 200 characters ends with a digest of the whole."""
    finished: float | None
    values: dict[str, float]
    """val/* metrics; NAME/low and NAME/high are the 95% interval of NAME. Empty until it has succeeded."""
    categories: list[Category]
    """By name; empty where the environment names none."""
    during_training: bool
    """Whether the job itself made it while it trained, by `[validation]` or `[data]`."""


class Evaluations(TypedDict):
    """By policy and step."""

    evaluations: list[Evaluation]


class Ranked(TypedDict):
    """The value by which a list of checkpoints is sorted."""

    metric: str
    setting: str
    value: float


class RegisteredCheckpoint(TypedDict):
    """A checkpoint of the tenant, with its origin and its evaluations."""

    checkpoint: str
    """JOB@STEP, or JOB~POLICY@STEP."""
    job: str
    job_name: str
    kind: str
    """Kind of the job: rl, sft or dpo."""
    policy: str
    """Policy, in a job with several; otherwise empty."""
    step: int
    created: float
    bytes: int
    model_bytes: int
    """Without the trainer's state."""
    project: str
    tags: list[str]
    base_model: str
    weights: Literal["whole", "lora", "none"]
    """`none`: of a simulated learner."""
    lora_rank: int | None
    published: list[str]
    """Names under which it is published."""
    lineage: list[str]
    """The base model, then JOB@STEP of each checkpoint from which training continued; without the checkpoint itself."""
    evaluations: list[Evaluation]
    """The newest first."""
    compared: dict[str, int]
    """By setting, the place in `evaluations` of the one that counts when checkpoints are compared: the newest with
    values, whether an eval job or the checkpoint's own job made it."""
    ranked: Ranked | None
    """In a list that is sorted by a metric: its value in the one setting by which all are sorted, if it has one."""


class CheckpointRegistry(TypedDict):
    """A page of the tenant's checkpoints."""

    checkpoints: list[RegisteredCheckpoint]
    cursor: str
    """The `before` of the next page."""
    more: bool
    metrics: list[str]
    """Metrics by which all of the tenant's may be sorted: the first 100, without `val/`; those of categories last."""
    settings: list[str]
    """Settings in which the tenant's were evaluated, those of most checkpoints first: 100 at most. Only those with the
    metric, if it sorts."""
    complete: bool
    """Whether the list is of all the tenant's: false once there are 1,000, of which those are the newest; of older ones
    only those with a name are listed."""


Kind = Literal["checkpoint", "adapter", "state", "metrics", "transcripts", "log"]


class Artifact(TypedDict):
    """A file that the job has left so far."""

    path: str
    kind: Kind
    """State is what only a trainer needs, to resume."""
    bytes: int
    sha256: str
    """Empty where it is known only after reading it."""
    created: float


class Artifacts(TypedDict):
    """By path."""

    artifacts: list[Artifact]
    bytes: int
    """Sum over all of them."""


class DeletedArtifacts(TypedDict):
    """Deleted artifacts."""

    job: str
    steps: list[int]
    """Steps of the deleted checkpoints."""
    bytes: int


class Publication(TypedDict):
    """A checkpoint that has a name."""

    name: str
    checkpoint: str
    """JOB@STEP."""
    job: str
    step: int
    bytes: int
    created: float
    key: str
    """Id of the API key, or name of the user, that published it."""


class Publications(TypedDict):
    """By name."""

    published: list[Publication]
