"""The seam between the trainer's loop and what learns: a protocol, and a learner that only takes time.

No torch here. The real one is `torch_learner.TorchLearner`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import orjson

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.batch.metrics import batch_metrics
from opentinker.services.trainer.data.examples import Example
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import SIMULATED, Probe, TensorInfo, WeightVersion
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.trajectories import Group

BUCKET_BYTES = 64 * 2**20
"""Weights travel in flat buckets of at most so many bytes."""


class NonFinite(JobFailed):
    """A loss or gradient norm is NaN or infinite: the step was refused, weights and optimizer are as before it."""


class Interrupted(OpenTinkerError):
    """The work was given up, as asked. `alike`: by all ranks, at the same place; otherwise this one has left the others
    behind."""

    def __init__(self, message: str, *, alike: bool = False) -> None:
        super().__init__(message)
        self.alike = alike


class SnapshotLike(Protocol):
    """What the publisher needs of a weight snapshot; `shared.nn.transport.Snapshot` is the real one."""

    @property
    def version(self) -> WeightVersion: ...
    @property
    def manifest(self) -> list[TensorInfo]: ...
    @property
    def buckets(self) -> Sequence[Any]: ...
    @property
    def fingerprints(self) -> list[int]: ...
    @property
    def probe(self) -> Probe | None: ...


class Trainable(Protocol):
    """Weights, optimizer and random state of one policy. `load` or `start` first; then any order of the others."""

    def load(self, checkpoint: Path | None) -> None:
        """The base model, or weights, optimizer and random state of a checkpoint directory."""

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """The weights (and optimizer moments) of another job's checkpoint; everything else as at a first start.

        Raises JobFailed, naming tensors, if they are not those of the job's model.
        """

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs: Hugging Face or PEFT layout, and `trainer/` beside it."""

    def interrupt(self) -> None:
        """From another thread: work under way, now or later, raises Interrupted soon, and has changed nothing then.
        Work that must not be given up is done to its end instead."""

    def close(self) -> None:
        """Let go of what is outside this process, also in the middle of a step. Idempotent."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for GPUs, which is not imported here, and none for processors."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def too_large(error: BaseException) -> str:
    """For who owns the job."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"it does not fit into memory: {said} Lower train.tokens_per_micro_batch or the length of trajectories, or set "
        "train.gradient_checkpointing, model.lora, or train.parallel with more ranks"
    )


class RowLearner(Trainable, Protocol):
    """Learns from rows: sft and dpo. `step` raises NonFinite with nothing changed."""

    total_steps: int
    """Of the learning rate's schedule; set once the rows have been counted."""

    def prepare(self, examples: list[Example], home: Path) -> None:
        """Once after `load` or `start`: what has to be known beforehand of all that will be trained or evaluated on.

        `home`: the job's directory: what an earlier trainer of the job has left of it, and what the job started from.
        """

    def step(self, batch: list[Example]) -> dict[str, float]:
        """One optimizer step."""

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        """Loss and what goes with it, under the weights as they are; changes nothing."""


class Learner(Trainable, Protocol):
    """Learns from groups: rl. `step` raises NonFinite with nothing changed."""

    device: str
    """cpu | cuda | none: what the weight transport moves from."""

    @property
    def credited(self) -> Sequence[F64] | None:
        """Of the last step, per trajectory of the batch in order: the advantage of each sampled token. None where
        nothing was computed."""

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        """Train on one batch (`updates_per_batch` optimizer steps); `version` names the weights before it."""

    def snapshot(self, version: WeightVersion) -> SnapshotLike:
        """A copy of the weights to send: training may go on while it travels."""


class EmptySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of nothing: only the version is news."""

    version: WeightVersion
    manifest: list[TensorInfo] = []
    buckets: list[Any] = []
    fingerprints: list[int] = []
    probe: Probe | None = None


class SimulatedLearner:
    """Takes `simulated_step_s` per step and learns nothing; for load tests and tests of everything around training."""

    device = SIMULATED
    credited: Sequence[F64] | None = None

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.steps = 0
        self._interrupted = threading.Event()

    def load(self, checkpoint: Path | None) -> None:
        self.steps = 0 if checkpoint is None else int(orjson.loads(_state_file(checkpoint).read_bytes())["steps"])

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        self.load(checkpoint)  # of a simulated learner too
        self.steps = 0

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        start = time.perf_counter()
        if self._interrupted.wait(self.spec.train.simulated_step_s or 0.0):
            raise Interrupted("the job was cancelled")
        self.steps += 1
        tokens = int(sum(np.count_nonzero(t.mask) for group in groups for t in group.trajectories))
        metrics = {"tokens": float(tokens), **batch_metrics(groups, version)}
        return metrics | {"step_seconds": time.perf_counter() - start}

    def snapshot(self, version: WeightVersion) -> EmptySnapshot:
        return EmptySnapshot(version=version)

    def save(self, directory: Path) -> None:
        _state_file(directory).parent.mkdir(parents=True, exist_ok=True)
        _state_file(directory).write_bytes(orjson.dumps({"steps": self.steps}))

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        """There is nothing."""


def _state_file(directory: Path) -> Path:
    return directory / "trainer" / "state.json"
