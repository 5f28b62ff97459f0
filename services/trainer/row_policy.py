"""What sft and dpo have in common: batches of rows in, optimizer steps and evaluations out. See `learner.RowLearner`.

A kind of job says what a micro-batch adds to the batch's loss and metrics, as shares of the whole batch: so the result
is the same however the batch is packed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from opentinker.services.trainer.examples import Example
from opentinker.services.trainer.learner import Interrupted, NonFinite
from opentinker.services.trainer.policy import Policy
from opentinker.services.trainer.row_batch import RowBatch, learned_tokens, row_batches
from opentinker.shared.spec import JobSpec


class RowPolicy(Policy, ABC):
    advice = "a lower lr"
    """To whom a step is refused."""

    def __init__(self, spec: JobSpec, device: str = "cpu") -> None:
        super().__init__(spec, device)
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        self._interrupted.set()

    def go_on(self) -> None:
        """Asked between micro-batches of long work. Raises Interrupted."""
        if self._interrupted.is_set():
            raise Interrupted("the job was cancelled")

    def prepare(self, examples: list[Example], home: Path) -> None:
        """Nothing has to be known beforehand."""

    @abstractmethod
    def weight(self, batch: list[Example]) -> int:
        """What the shares of micro-batches are shares of."""

    @abstractmethod
    def share(self, micro: RowBatch, weight: int) -> dict[str, Tensor]:
        """`loss`, with a gradient, and the metrics that go with it: what the micro-batch adds to those of its batch."""

    def step(self, batch: list[Example]) -> dict[str, float]:
        began = time.perf_counter()
        lr = self.set_lr()
        self.dropout(on=True)
        sums, counts = self._sums(batch, backward=True)
        sums["grad_norm"] = self.clip().double()
        try:
            result = self.finite(sums, self.advice)
        except NonFinite:
            self.forget()
            raise
        self.apply()
        self.steps += 1
        return {**result, "lr": lr, **counts, "step_seconds": time.perf_counter() - began}

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        self.dropout(on=False)
        with torch.no_grad():
            sums, counts = self._sums(examples, backward=False)
        return {name: value.item() for name, value in sums.items()} | {"tokens": counts["tokens"]}

    def _sums(self, batch: list[Example], *, backward: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Loss and metrics, float64, and the counts of tokens; `backward` adds up the gradient."""
        weight = self.weight(batch)
        sums: dict[str, Tensor] = {}
        counts = {"tokens": float(learned_tokens(batch)), "tokens/total": 0.0, "tokens/computed": 0.0}
        for micro in row_batches(batch, self.spec.train.tokens_per_micro_batch, torch.device(self.device)):
            if not backward:
                self.go_on()
            found = self.share(micro, weight)
            if backward:
                found["loss"].backward()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
            counts["tokens/total"] += micro.tokens
            counts["tokens/computed"] += len(micro.plan.ids_N)
        return sums, counts
