"""Base of the sft and dpo learners: optimizer steps and evaluations on batches of rows. See `base.RowLearner`.

A subclass computes a micro-batch's contribution to the batch's loss and metrics, as shares of the whole batch, so that
the result does not depend on packing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from opentinker.services.trainer.batch.micro_batch import size_metrics
from opentinker.services.trainer.batch.row_batch import RowBatch, row_batches
from opentinker.services.trainer.data.examples import Example
from opentinker.services.trainer.learners.base import NonFinite
from opentinker.services.trainer.learners.policy_model import PolicyModel


class SupervisedLearner(PolicyModel, ABC):
    advice = "a lower lr"
    """Advice shown when a step is refused."""
    hits = False
    """Whether `share` needs to know which tokens are the likeliest."""

    @property
    def needs_preparation(self) -> bool:
        """Return whether `prepare` has anything to compute."""
        return False

    def prepare(self, examples: list[Example], home: Path) -> None:
        """Do nothing: there is nothing to compute."""

    @abstractmethod
    def weight(self, batch: list[Example]) -> int:
        """Return the denominator of the micro-batches' shares."""

    @abstractmethod
    def share(self, micro: RowBatch, logprobs_M: Tensor, hits_M: Tensor, weight: int) -> dict[str, Tensor]:
        """Return the micro-batch's contribution to `loss`, with a gradient, and to the metrics of its batch."""

    def step(self, batch: list[Example]) -> dict[str, float]:
        began = time.perf_counter()
        self.process_group.seed_dropout_by_rank(self.spec.train.seed, self.steps)
        lr = self.set_lr()
        self.dropout(on=True)
        with self.undo_if_interrupted():
            sums, counts = self._sums(batch, backward=True)
        result = self._apply(sums)
        self.steps += 1
        return {**result, "lr": lr, **counts, "step_seconds": time.perf_counter() - began}

    def _apply(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Step the optimizer; returns the sums with the gradient's norm. Raises NonFinite instead if one is not
        finite."""
        sums["grad_norm"] = self.clip().double()
        try:
            result = self.require_finite(sums, self.advice)
        except NonFinite:
            self.discard_gradients()
            raise
        self.optimizer_step()
        return result

    def evaluate(self, examples: list[Example]) -> dict[str, float]:
        self.dropout(on=False)
        with torch.no_grad():
            sums, counts = self._sums(examples, backward=False)
        return {name: value.item() for name, value in sums.items()} | {"tokens": counts["tokens"]}

    def _sums(self, batch: list[Example], *, backward: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return loss and metrics, float64, and token counts, over all ranks; `backward` accumulates the gradient."""
        weight = self.weight(batch)
        sums: dict[str, Tensor] = {}
        sizes = dict.fromkeys(("tokens", "tokens/total", "tokens/computed"), 0)
        for micro in row_batches(
            batch, self.spec.train.tokens_per_micro_batch, torch.device(self.device), self.process_group
        ):
            self.raise_if_interrupted(changes=backward)
            logprobs_M, _, hits_M = self.forward(micro.plan, hits=self.hits)
            found = self.share(micro, logprobs_M, hits_M, weight)
            counts = bool(micro.places)
            if backward:
                self.backward(found["loss"] * counts, last=micro.last)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double() * counts
            if counts:
                sizes["tokens"] += len(micro.sequence_M)
                sizes["tokens/total"] += micro.tokens
                sizes["tokens/computed"] += len(micro.plan.ids_N)
        totals = self.process_group.sum(torch.stack(list(sums.values())))
        columns = self.process_group.gather({name: torch.tensor([size]) for name, size in sizes.items()})
        return dict(zip(sums, totals, strict=True)), size_metrics(columns)
