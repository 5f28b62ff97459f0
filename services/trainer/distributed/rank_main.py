"""A rank beyond the first: a process that the trainer has started to train with it.

    python -m opentinker.services.trainer.distributed.rank_main FD RANK      (started by rank_processes.py, never by
    hand)

Consumes commands from the socket FD and carries each out in step with the other ranks, produces one answer per command
and a beat per second; waits for the next command; ends when the trainer is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

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
    RowStep,
    Step,
    StepRefused,
    ToRank,
    examples_of,
    frame,
)
from opentinker.services.trainer.learners.base import Interrupted, NonFinite, is_out_of_memory, too_large
from opentinker.services.trainer.learners.dpo import DpoLearner
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.services.trainer.learners.rl import TorchLearner
from opentinker.services.trainer.learners.sft import SftLearner
from opentinker.shared.runtime.parent_death import set_death_signal
from opentinker.shared.spec import JobSpec, parse_spec
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
    except Exception:  # noqa: BLE001 - told in the trainer's log, and the trainer sees the end of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # a process group that has lost a member may never let the interpreter end


def end_with_trainer() -> None:
    """Signals are the trainer's affair: it ends us when it has let go of its job, and the kernel when it dies."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    set_death_signal()


LEARNERS: dict[str, type[PolicyModel]] = {"rl": TorchLearner, "sft": SftLearner, "dpo": DpoLearner}
"""By kind of job, of one rank."""


def make(spec: JobSpec, gang: ProcessGroup) -> PolicyModel:
    """One rank's learner."""
    learner = LEARNERS[spec.kind]
    if spec.train.parallel != "data":
        from opentinker.services.trainer.distributed.zero import sharing  # deepspeed is for those who ask for it

        learner = sharing(learner)
    return learner(spec, gang.device, gang)


class Rank:
    def __init__(self, trainer: socket.socket, rank: int) -> None:
        self._trainer, self._rank = trainer, rank
        self._writing = threading.Lock()
        self._gang = ProcessGroup()
        self._learner: Any = None

    def serve(self) -> None:
        """Returns when the trainer is gone."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        with self._trainer.makefile("rb") as commands:
            while len(head := commands.read(HEAD.size)) == HEAD.size:
                command = codec.decode(ToRank, commands.read(HEAD.unpack(head)[0])).command
                try:
                    self._obey(command)
                except NonFinite as error:
                    self._say(StepRefused(str(error), finite=False))
                except (JobFailed, Interrupted) as error:
                    self._say(StepRefused(str(error), finite=True))
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._say(StepRefused(too_large(error), finite=True))
                else:
                    self._say(Done())

    def _obey(self, command: Command) -> None:
        match command:
            case Join(device=device, port=port, world=world):
                self._gang = ProcessGroup.join(port, self._rank, world, device)
            case Load():
                self._load(command)
            case Step(groups=groups, version=version):
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
        learner = make(parse_spec(orjson.loads(command.spec)), self._gang)
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
                self._say(Beat())
            except OSError:  # the trainer is gone, and where the kernel did not end us with it, we do
                os._exit(1)

    def _say(self, answer: Answer) -> None:
        with self._writing:
            self._trainer.sendall(frame(FromRank(answer)))


if __name__ == "__main__":
    main()
