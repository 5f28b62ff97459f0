"""Learners of several ranks: this process is rank 0 and runs each call of the training loop on all ranks.

                        rank 0, in the trainer             rank 1 ... N-1, processes of `rank_main.py`
    load, start, step,
    prepare, evaluate   PolicyModel   <--collectives-->    PolicyModel of the same kind
    snapshot, save      PolicyModel   <--collectives-->    PolicyModel, where the ranks share weights or optimizer

Each rank computes its part of every batch; advantages and loss weights are determined over the whole batch, so that the
result does not depend on the number of ranks. `MultiRankRlLearner` implements `base.Learner`, `MultiRankRowLearner`
implements `base.RowLearner`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.distributed.process_group import COLLECTIVE_TIMEOUT_S, HOST, ProcessGroup
from opentinker.services.trainer.distributed.rank_environment import rank_environment, threads_of
from opentinker.services.trainer.distributed.rank_listener import RankListener
from opentinker.services.trainer.distributed.rank_main import LEARNERS, make_learner
from opentinker.services.trainer.distributed.rank_processes import RankProcesses
from opentinker.services.trainer.distributed.rank_protocol import (
    Command,
    Evaluate,
    Gather,
    Join,
    Load,
    Prepare,
    RankStep,
    RowStep,
    rows_of,
)
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.learners.supervised import SupervisedLearner
from opentinker.shared.nn import buckets, transport
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.train import all_ranks
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.manifest import SeatBaselines
from opentinker.shared.types.trajectories import Group

T = TypeVar("T")


class MultiRankLearner:
    """Base of the multi-rank learners of groups and of rows."""

    def __init__(self, spec: JobSpec, device: str, listener: RankListener | None = None) -> None:
        """`listener`: for the ranks that other trainers run."""
        self.spec, self.device, self.listener = spec, device, listener
        self.world = spec.resources.ranks
        self.total_steps = spec.train.steps
        self.ranks: RankProcesses | None = None
        self.own: Any = LEARNERS[spec.kind](spec, device)
        self._threads = torch.get_num_threads()
        self._closing = threading.Lock()
        self._closed = False

    def load(self, checkpoint: Path | None) -> None:
        """Start the ranks if needed and load on all of them. Raises JobFailed, RankLost."""
        command = self._prepare(None if checkpoint is None else str(checkpoint), resume=True)
        self._run(command, lambda: self.own.load(checkpoint))

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Start the ranks if needed and start from the checkpoint on all of them. Raises JobFailed, RankLost."""
        command = self._prepare(str(checkpoint), resume=False, optimizer=optimizer)
        self._run(command, lambda: self.own.start(checkpoint, optimizer=optimizer))

    def _prepare(self, checkpoint: str | None, *, resume: bool, optimizer: bool = False) -> Load:
        if self.ranks is None:
            self._start_ranks()
        self.own.close()
        self.own = make_learner(self.spec, self.own.process_group)
        self.own.total_steps = self.total_steps
        return Load(self.spec.model_dump_json().encode(), checkpoint, resume, optimizer, self.total_steps)

    def save(self, directory: Path) -> None:
        if self.spec.train.parallel == "data":
            self.own.save(directory)
        else:  # a disk error does not concern the other ranks
            self.own.write(directory, self._run(Gather(checkpoint=True), self.own.collect))

    def interrupt(self) -> None:
        """Interrupt rank 0's own part; the other ranks are unusable afterwards and end when the learner is closed.

        Ranks that share weights or optimizer behave differently, see `PolicyModel.raise_if_interrupted`.
        """
        self.own.interrupt()

    def close(self) -> None:
        """End the other ranks; from another thread also in the middle of a step. Raises OpenTinkerError, see
        `RankProcesses.close`."""
        if self.listener is not None:
            self.listener.close()
        with self._closing:
            self._closed = True
            ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close(self._leave)
            torch.set_num_threads(self._threads)

    def _leave(self) -> None:
        self.own.close()
        self.own.process_group.leave()

    def _start_ranks(self) -> None:
        listener = self.listener
        local = all_ranks(self.spec) if listener is None else listener.local
        if self.device == "cuda" and torch.cuda.device_count() < (gpus := min(local, self.world)):
            raise JobFailed(f"it takes {gpus} GPUs of this trainer, which has {torch.cuda.device_count()}")
        threads = threads_of(local, self._threads)
        torch.set_num_threads(threads)
        ranks = RankProcesses(self.world, partial(rank_environment, threads), listener)
        with self._closing:
            closed = self._closed
            self.ranks = None if closed else ranks
        if closed:  # while they were starting
            ranks.close(self._leave)
            raise OpenTinkerError("the job was released while its ranks were starting")
        host = HOST if listener is None else listener.host
        secret = transport.new_secret()
        store, port = transport.host_store(host, self.world, COLLECTIVE_TIMEOUT_S, secret)
        # Learners of several policies are in this process; DeepSpeed needs the default group.
        separate = len(self.spec.policies) > 1 and self.spec.train.parallel == "data"
        self.own.process_group = self._run(
            Join(self.device, host, port, secret, self.world, separate),
            lambda: ProcessGroup.join(host, port, 0, self.world, self.device, separate=separate, store=store),
        )

    def _run(self, command: Command, part: Callable[[], T]) -> T:
        assert self.ranks is not None, "load comes first"
        return self.ranks.run(command, part)


class MultiRankRlLearner(MultiRankLearner):
    own: RlLearner

    @property
    def credited(self) -> Sequence[F64] | None:
        """Advantages of all trajectories: every rank sees the whole batch."""
        return self.own.credited

    @property
    def baselines(self) -> SeatBaselines:
        """Running baselines, which every rank has for itself: alike, from the same batches."""
        return self.own.baselines

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        return self._run(RankStep(groups, version), lambda: self.own.step(groups, version))

    def snapshot(self, version: WeightVersion) -> buckets.Snapshot:
        if self.spec.train.parallel != "zero3":  # every rank holds all weights
            return self.own.snapshot(version)
        return self._run(Gather(checkpoint=False), lambda: self.own.snapshot(version))

    def save_weights(self, directory: Path) -> None:
        if self.spec.train.parallel != "zero3":
            self.own.save_weights(directory)
        else:  # a disk error does not concern the other ranks
            self.own.write_weights(directory, self._run(Gather(checkpoint=True), self.own.collect).weights)


class MultiRankRowLearner(MultiRankLearner):
    own: SupervisedLearner

    def prepare(self, examples: list[Example], home: Path) -> None:
        if self.own.needs_preparation:
            self._run(Prepare(rows_of(examples), str(home)), lambda: self.own.prepare(examples, home))

    def step(self, batch: list[Example]) -> dict[str, float]:
        return self._run(RowStep(rows_of(batch)), lambda: self.own.step(batch))

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        return self._run(Evaluate(rows_of(examples)), lambda: self.own.evaluate(examples))
