"""Artifacts of jobs: checkpoints, files, names."""

from typing import Literal, TypedDict


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
    """Id of the API key that published it."""


class Publications(TypedDict):
    """By name."""

    published: list[Publication]
