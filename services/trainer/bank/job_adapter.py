"""A job's adapter in a bank: the calls of its learner, which come from threads, to the bank's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from opentinker.services.trainer.bank.adamw import AdamSettings
from opentinker.services.trainer.bank.adapter import Adapter
from opentinker.services.trainer.bank.adapter_bank import StepResult
from opentinker.services.trainer.bank.bank_loop import BankLoop
from opentinker.services.trainer.bank.base_model import BaseModel
from opentinker.services.trainer.bank.limits import NotFinite, Refused
from opentinker.services.trainer.bank.pass_part import PassOptions, Unit
from opentinker.services.trainer.learners.base import Interrupted
from opentinker.shared.spec import LoraSpec
from opentinker.shared.types.core import F32
from opentinker.shared.types.errors import JobFailed, NotFound, OpenTinkerError

T = TypeVar("T")


class JobAdapter:
    """Adapter `name`, of a tenant with the same name: jobs share the passes equally. Call it from any thread but that
    of the bank's event loop. Raises JobFailed for what the bank refuses."""

    def __init__(self, bank: BankLoop, name: str) -> None:
        self.bank, self.name = bank, name
        self._lock = threading.Lock()
        self._interrupted = False
        self._passing: Future[Any] | None = None

    @property
    def base(self) -> BaseModel:
        return self.bank.bank.base

    @property
    def longest(self) -> int:
        """Tokens of the largest unit that a pass takes."""
        return self.bank.bank.limits.datum_tokens

    @property
    def waited_s(self) -> float:
        """Seconds that its commands have waited for others."""
        return self.bank.waited_s[self.name]

    @property
    def other_jobs_s(self) -> float:
        """Seconds of those in which the bank worked for other jobs, not for other policies of this one."""
        return self.bank.other_jobs[self.name]

    def create(self, lora: LoraSpec, seed: int, *, deterministic: bool = False) -> None:
        """Add the adapter as a job with this seed begins; an earlier one of this name is removed."""
        self.remove()
        self._wait(self._start(self.bank.create(self.name, self.name, lora, seed, deterministic=deterministic)))

    def remove(self) -> None:
        with suppress(NotFound):
            self._wait(self._start(self.bank.remove(self.name, self.name)))

    def discard(self) -> None:
        """Remove the adapter once its commands so far have ended, without waiting for that."""
        self._start(self.bank.remove(self.name, self.name))

    def read(self) -> Adapter:
        return self._wait(self._start(self.bank.read(self.name, self.name)))

    def write(self, vectors: Mapping[str, Tensor], steps: int | None = None) -> None:
        """Replace vectors, and unless None the step count; the gradient sum is dropped."""
        self._wait(self._start(self.bank.write(self.name, self.name, vectors, steps)))

    def step(self, settings: AdamSettings) -> StepResult:
        """Step the optimizer. Raises NotFinite."""
        return self._wait(self._start(self.bank.optim_step(self.name, self.name, settings)))

    def run(self, units: Sequence[Unit], options: PassOptions, *, backward: bool, completes: bool = False) -> list[F32]:
        """Run units in passes, in order; returns the log-probabilities of each. Raises NotFinite and, unless it
        `completes`, Interrupted after `interrupt`: parts of the gradient may then be in the sum."""
        found: list[F32] = []
        for chosen in _commands(units, self.bank.bank.limits.command_tokens):
            with self._lock:
                if self._interrupted and not completes:
                    raise Interrupted("the job was cancelled")
                passing = self._start(self.bank.run_units(self.name, self.name, chosen, options, backward=backward))
                self._passing = None if completes else passing
            found += self._wait(passing).logprobs
        return found

    def interrupt(self) -> None:
        """End passes under way or later; `run` raises Interrupted."""
        with self._lock:
            self._interrupted = True
            if self._passing is not None:
                self._passing.cancel()

    def _start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self.bank.events)

    def _wait(self, started: Future[T]) -> T:
        try:
            return started.result()
        except CancelledError:
            if self._interrupted and started is self._passing:
                raise Interrupted("the job was cancelled") from None
            raise OpenTinkerError("the adapter bank of this trainer has ended") from None
        except NotFinite:
            raise
        except Refused as error:
            raise JobFailed(
                f"its trainer is shared (resources.trainer), and the adapter bank refuses: {error}"
            ) from None


def _commands(units: Sequence[Unit], most: int) -> list[list[Unit]]:
    """Cut into commands of at most `most` tokens, or one unit."""
    commands: list[list[Unit]] = []
    room = 0
    for unit in units:
        if not commands or unit.tokens > room:
            commands.append([])
            room = most
        commands[-1].append(unit)
        room -= unit.tokens
    return commands
