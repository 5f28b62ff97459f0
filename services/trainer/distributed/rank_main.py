"""Main module of ranks 1 ... N-1: processes that trainers start for a job of several ranks.

    python -m opentinker.services.trainer.distributed.rank_main FD RANK      (started by a trainer, never by hand)

Consumes commands of rank 0 from the socket FD and executes each together with the other ranks, produces one answer per
command and a heartbeat per second; waits for the next command; ends with its trainer, and with the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

import orjson

from opentinker.services.trainer.distributed.process_group import ProcessGroup
from opentinker.services.trainer.distributed.rank_protocol import (
    HEAD,
    Answer,
    Beat,
    Command,
    Done,
    Evaluate,
    FromRank,
    Gather,
    Join,
    Load,
    Prepare,
    RankStep,
    RowStep,
    StepRefused,
    ToRank,
    examples_of,
    frame,
)
from opentinker.services.trainer.learners.base import Interrupted, NonFinite, describe_out_of_memory, is_out_of_memory
from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.runtime.parent_death import set_death_signal
from opentinker.shared.spec import JobSpec, read_stored
from opentinker.shared.types import codec
from opentinker.shared.types.errors import JobFailed

BEAT_S = 1.0


def main() -> None:
    end_with_trainer()
    code = 1
    try:
        with socket.socket(fileno=int(sys.argv[1])) as trainer:
            Rank(trainer, int(sys.argv[2])).serve()
        code = 0
    except Exception:  # noqa: BLE001 - printed to the trainer's log, and the trainer detects the exit
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # a process group that has lost a member may never let the interpreter end


def end_with_trainer() -> None:
    """Ignore signals: the trainer ends this process when it releases its job, and the kernel does when it dies."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    set_death_signal()


LEARNERS: dict[str, type[PolicyModel]] = {"rl": RlLearner, "sft": SftLearner, "dpo": DpoLearner}
"""Learner of one rank, by kind of job."""


def make_learner(spec: JobSpec, process_group: ProcessGroup) -> PolicyModel:
    learner = LEARNERS[spec.kind]
    if spec.train.parallel != "data":
        from opentinker.services.trainer.distributed.zero import zero_class  # deepspeed is imported only if needed

        learner = zero_class(learner)
    return learner(spec, process_group.device, process_group)


class Rank:
    def __init__(self, trainer: socket.socket, rank: int) -> None:
        self._trainer, self._rank = trainer, rank
        self._writing = threading.Lock()
        self._process_group = ProcessGroup()
        self._learner: Any = None

    def serve(self) -> None:
        """Execute commands until rank 0 is gone."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        with self._trainer.makefile("rb") as commands:
            while len(head := _next_head(commands)) == HEAD.size:
                command = codec.decode(ToRank, commands.read(HEAD.unpack(head)[0])).command
                try:
                    self._execute(command)
                except NonFinite as error:
                    self._send(StepRefused(str(error), finite=False))
                except (JobFailed, Interrupted) as error:
                    self._send(StepRefused(str(error), finite=True))
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._send(StepRefused(describe_out_of_memory(error), finite=True))
                else:
                    self._send(Done())

    def _execute(self, command: Command) -> None:
        match command:
            case Join(device=device, address=address, port=port, secret=secret, world=world, separate=separate):
                self._process_group = ProcessGroup.join(
                    address, port, self._rank, world, device, separate=separate, secret=secret
                )
            case Load():
                self._load(command)
            case RankStep(groups=groups, version=version):
                self._learner.step(groups, version)
            case Prepare(rows=rows, home=home):
                self._learner.prepare(examples_of(rows), Path(home))
            case RowStep(rows=rows):
                self._learner.step(examples_of(rows))
            case Evaluate(rows=rows):
                self._learner.evaluate(examples_of(rows))
            case Gather(checkpoint=True):
                self._learner.collect()
            case Gather():
                self._learner.probe()
                for _ in self._learner.named_weights():
                    pass

    def _load(self, command: Load) -> None:
        if self._learner is not None:
            self._learner.close()
        self._learner = None  # its memory is needed
        learner = make_learner(read_stored(orjson.loads(command.spec)), self._process_group)
        learner.total_steps = command.total_steps
        checkpoint = None if command.checkpoint is None else Path(command.checkpoint)
        if checkpoint is None or command.resume:
            learner.load(checkpoint)
        else:
            learner.start(checkpoint, optimizer=command.optimizer)
        self._learner = learner

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            try:
                self._send(Beat())
            except OSError:  # rank 0 is gone, and a collective may wait for it
                os._exit(0)

    def _send(self, answer: Answer) -> None:
        with self._writing:
            self._trainer.sendall(frame(FromRank(answer)))


def _next_head(commands: IO[bytes]) -> bytes:
    """Return the next bytes of a command; fewer than HEAD.size when rank 0 is gone."""
    try:
        return commands.read(HEAD.size)
    except ConnectionError:
        return b""


if __name__ == "__main__":
    main()
