"""Learners of several ranks: this process is rank 0 and has the others do with it whatever the loop asks for.

                        rank 0, in the trainer           rank 1 ... N-1, processes of `rank_main.py`
    load, start, step,
    prepare, evaluate   a Policy   <--collectives-->     a Policy of the same kind
    snapshot, save      a Policy   <--collectives-->     a Policy      where the ranks share weights or optimizer

Each rank computes its part of every batch; what the batch is worth and what it weighs is settled over the whole of it,
so that the result does not depend on the number of ranks. `RankedLearner` stands behind `learner.Learner`, `RankedRows`
behind `learner.RowLearner`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.distributed.process_group import HOST, PATIENCE_S, ProcessGroup
from opentinker.services.trainer.distributed.rank_main import LEARNERS, make
from opentinker.services.trainer.distributed.rank_processes import RankProcesses
from opentinker.services.trainer.distributed.rank_protocol import (
    Command,
    Evaluate,
    Gather,
    Join,
    Load,
    Prepare,
    RowStep,
    Step,
    rows_of,
)
from opentinker.services.trainer.learners.rl import TorchLearner
from opentinker.services.trainer.learners.supervised import RowPolicy
from opentinker.shared.nn import transport
from opentinker.shared.runtime.gpus import ORDER, VISIBLE, nearest, visible
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.errors import JobFailed, OpenTinkerError
from opentinker.shared.types.trajectories import Group

T = TypeVar("T")


class MultiRankLearner:
    """What learners of groups and of rows have in common."""

    def __init__(self, spec: JobSpec, device: str) -> None:
        self.spec, self.device = spec, device
        self.world = spec.resources.ranks
        self.total_steps = spec.train.steps
        self.ranks: RankProcesses | None = None
        self.own: Any = LEARNERS[spec.kind](spec, device)
        self._threads = torch.get_num_threads()
        self._closing = threading.Lock()
        self._closed = False

    def load(self, checkpoint: Path | None) -> None:
        """Starts the ranks, too. Raises JobFailed, RankLost."""
        command = self._prepare(None if checkpoint is None else str(checkpoint), resume=True)
        self._run(command, lambda: self.own.load(checkpoint))

    def start(self, checkpoint: Path, *, optimizer: bool) -> None:
        """As `load`."""
        command = self._prepare(str(checkpoint), resume=False, optimizer=optimizer)
        self._run(command, lambda: self.own.start(checkpoint, optimizer=optimizer))

    def _prepare(self, checkpoint: str | None, *, resume: bool, optimizer: bool = False) -> Load:
        if self.ranks is None:
            self._start_ranks()
        self.own.close()
        self.own = make(self.spec, self.own.gang)
        self.own.total_steps = self.total_steps
        return Load(self.spec.model_dump_json().encode(), checkpoint, resume, optimizer, self.total_steps)

    def save(self, directory: Path) -> None:
        if self.spec.train.parallel == "data":
            self.own.save(directory)
        else:  # a disk that refuses is not the other ranks' affair
            self.own.write(directory, self._run(Gather(checkpoint=True), self.own.collect))

    def interrupt(self) -> None:
        """Our own part is given up; the other ranks are of no use afterwards, and ended when the learner is closed.

        Otherwise where they share weights or optimizer, see `Policy.go_on`.
        """
        self.own.interrupt()

    def close(self) -> None:
        """Ends the other ranks; from another thread also in the middle of a step. Raises OpenTinkerError: see Ranks."""
        with self._closing:
            self._closed = True
            ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close(self._leave)
            torch.set_num_threads(self._threads)

    def _leave(self) -> None:
        self.own.close()
        self.own.gang.leave()

    def _start_ranks(self) -> None:
        if self.device == "cuda" and torch.cuda.device_count() < self.world:
            raise JobFailed(
                f"resources.trainer_gpus = {self.world}, but this trainer has {torch.cuda.device_count()} GPUs"
            )
        threads = max(1, min(self._threads, (os.cpu_count() or 1) // self.world))
        torch.set_num_threads(threads)
        ranks = RankProcesses(self.world, partial(_variables, threads))
        with self._closing:
            closed = self._closed
            self.ranks = None if closed else ranks
        if closed:  # while they were starting
            ranks.close(self._leave)
            raise OpenTinkerError("the job has been let go")
        store, port = transport.host_store(HOST, self.world, PATIENCE_S)
        self.own.gang = self._run(
            Join(self.device, port, self.world), lambda: ProcessGroup.join(port, 0, self.world, self.device, store)
        )

    def _run(self, command: Command, part: Callable[[], T]) -> T:
        assert self.ranks is not None, "load comes first"
        return self.ranks.run(command, part)


class RankedLearner(MultiRankLearner):
    own: TorchLearner

    @property
    def credited(self) -> Sequence[F64] | None:
        """Of all trajectories: every rank sees the whole batch."""
        return self.own.credited

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        return self._run(Step(groups, version), lambda: self.own.step(groups, version))

    def snapshot(self, version: WeightVersion) -> transport.Snapshot:
        if self.spec.train.parallel != "zero3":  # the others hold all of it
            return self.own.snapshot(version)
        return self._run(Gather(checkpoint=False), lambda: self.own.snapshot(version))


class RankedRows(MultiRankLearner):
    own: RowPolicy

    def prepare(self, examples: list[Example], home: Path) -> None:
        if self.own.prepares:
            self._run(Prepare(rows_of(examples), str(home)), lambda: self.own.prepare(examples, home))

    def step(self, batch: list[Example]) -> dict[str, float]:
        return self._run(RowStep(rows_of(batch)), lambda: self.own.step(batch))

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        return self._run(Evaluate(rows_of(examples)), lambda: self.own.evaluate(examples))


def _gpus() -> list[str]:
    """As CUDA is told of them, in the order in which ranks take them: the first, which is ours, and what is nearest to
    it."""
    told = os.environ.get(VISIBLE)
    listed = told.split(",") if told else []
    if ORDER.items() <= os.environ.items() and len(found := nearest(visible())) >= len(listed):
        return [str(gpu.index) for gpu in found]
    return listed  # CUDA counts in an order of its own, or NVML does not know them all


def _variables(threads: int, rank: int) -> dict[str, str]:
    """Of a rank's environment: its share of the processors, the GPU that is its own, our import path."""
    gpus = _gpus()
    if not gpus and VISIBLE not in os.environ:  # nobody has said which there are; an empty list says none
        gpus = [str(number) for number in range(rank + 1)]
    return {
        "OMP_NUM_THREADS": str(threads),
        VISIBLE: gpus[rank] if rank < len(gpus) else "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
