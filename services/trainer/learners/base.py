"""Protocols between the training loops and learners, and a learner that only simulates time.

No torch here. The real RL learner is `rl.RlLearner`.
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
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.services.trainer.data.examples import Example
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.error_text import first_line
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.manifest import SeatBaselines
from opentinker.shared.types.swap import SIMULATED, Probe, TensorInfo
from opentinker.shared.types.trajectories import Group

BUCKET_BYTES = 64 * 2**20
"""Weights are sent in flat buckets of at most this size."""


class NonFinite(JobFailed):
    """A loss or gradient norm is NaN or infinite: the step was refused, weights and optimizer are as before it."""


class TooLong(JobFailed):
    """A batch has a sequence that no pass takes: nothing has been computed, and the weights are as before it."""


class Interrupted(OpenTinkerError):
    """The work was interrupted on request. `alike`: on all ranks, at the same place; otherwise the other ranks still
    wait for this one."""

    def __init__(self, message: str, *, alike: bool = False) -> None:
        super().__init__(message)
        self.alike = alike


class SnapshotLike(Protocol):
    """A weight snapshot as the publisher uses it; `shared.nn.buckets.Snapshot` is the real one."""

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
    @property
    def base_bytes(self) -> int: ...


class Trainable(Protocol):
    """Weights, optimizer and random state of one policy. Call `load` or `start` first, then the others in any order."""

    def load(self, checkpoint: Path | None) -> None:
        """Load the base model, or weights, optimizer and random state of a checkpoint directory."""

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Load the weights (and optimizer moments) of another job's checkpoint; everything else as at a first start.

        Raises JobFailed, naming tensors, if they do not fit the job's model.
        """

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs: Hugging Face or PEFT layout, and a directory `trainer/`."""

    def interrupt(self) -> None:
        """Interrupt, from another thread, work under way or later: it raises Interrupted soon, without any change.
        Work that must not be interrupted completes instead."""

    def close(self) -> None:
        """Release resources outside this process, also in the middle of a step. Idempotent."""


def device_of(spec: JobSpec) -> str:
    """Return the device on which a trainer trains the job."""
    return "cuda" if spec.resources.trainer_gpus else "cpu"


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise out-of-memory errors: torch has a class for GPUs, which is not imported here, and none for CPUs."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def describe_out_of_memory(error: BaseException) -> str:
    """Return an error message for the job's owner."""
    return (
        f"it does not fit into memory: {first_line(error)} Lower train.tokens_per_micro_batch or the length of "
        "trajectories, or set train.gradient_checkpointing, model.lora, or train.parallel with more ranks"
    )


class RowLearner(Trainable, Protocol):
    """Learns from rows: sft and dpo. `step` raises NonFinite with nothing changed."""

    total_steps: int
    """Length of the learning-rate schedule; set once the rows have been counted."""

    def prepare(self, examples: list[Example], home: Path) -> None:
        """Compute, once after `load` or `start`, values that all training and evaluation examples need beforehand.

        `home`: the job's directory, with results of an earlier trainer of the job and the checkpoint that it started
        from.
        """

    def step(self, batch: list[Example]) -> dict[str, float]:
        """Run one optimizer step."""

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        """Return loss and metrics under the current weights; changes nothing."""


class Learner(Trainable, Protocol):
    """Learns from groups: rl. `step` raises NonFinite with nothing changed."""

    device: str
    """cpu | cuda | none: source device of the weight transport."""

    @property
    def credited(self) -> Sequence[F64] | None:
        """Advantages of the sampled tokens in the last step, per trajectory of the batch in order. None if nothing was
        computed."""

    @property
    def baselines(self) -> SeatBaselines:
        """Running baselines of the seats after the last step, for the manifest; `load` reads them from there."""

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        """Train on one batch (`updates_per_batch` optimizer steps); `version` names the weights before it."""

    def snapshot(self, version: WeightVersion) -> SnapshotLike:
        """Copy the weights to send: training may continue during the transfer."""

    def save_weights(self, directory: Path) -> None:
        """Write what `save` writes, without the directory `trainer/`."""


class EmptySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot without weights: only the version changes."""

    version: WeightVersion
    manifest: list[TensorInfo] = []
    buckets: list[Any] = []
    fingerprints: list[int] = []
    probe: Probe | None = None
    base_bytes: int = 0


class SimulatedLearner:
    """Waits `simulated_step_s` per step and learns nothing; for load tests and tests of everything around training."""

    device = SIMULATED
    credited: Sequence[F64] | None = None

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.baselines: SeatBaselines = {}
        self._interrupted = threading.Event()

    def load(self, checkpoint: Path | None) -> None:
        self.steps = 0 if checkpoint is None else int(orjson.loads(_state_file(checkpoint).read_bytes())["steps"])

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        self.load(checkpoint)  # the other job's learner was simulated too
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

    def save_weights(self, directory: Path) -> None:
        """There are none."""

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _state_file(directory: Path) -> Path:
    return directory / "trainer" / "state.json"
