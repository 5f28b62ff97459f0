"""RL learner: turns batches into gradient steps, weight snapshots and checkpoints. Implements `base.Learner`.

Weights, optimizer and random state are those of `policy_model.PolicyModel`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.credit_assignment import Credit, Values, assign
from opentinker.services.trainer.algorithm.objective import objective
from opentinker.services.trainer.batch.batch_metrics import batch_metrics
from opentinker.services.trainer.batch.micro_batch import (
    MicroBatch,
    end_values_of,
    give_credit,
    micro_batches,
    size_metrics,
    sizes,
    trains_critic,
    values_of,
)
from opentinker.services.trainer.batch.token_metrics import StepRecord, record_metrics
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from opentinker.services.trainer.learners.critic import Critic, critic_columns, critic_metrics
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.manifest import CRITIC, SeatBaselines, read_manifest
from opentinker.shared.types.trajectories import Group

ADVICE = "a lower lr, or a tighter bound on the ratio"
"""Shown when a step is refused."""
PROBE_TOKENS = 16
"""Maximum number of tokens in a probe: each version has one, and the trainer makes a pass over it."""


class RlLearner(PolicyModel):
    """AdamW on the loss of the spec's algorithm, on one device; with a process group, this rank's part of it."""

    credited: Sequence[F64] | None = None

    def _build(self, checkpoint: Path | None) -> None:
        super()._build(checkpoint)
        self.critic = Critic(self.spec, self.device) if trains_critic(self.spec) else None
        self.baselines: SeatBaselines = {}

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is not None and self.critic is not None:
            self.critic.load(checkpoint)
        if checkpoint is not None and self.spec.algorithm.advantage == "rae":
            self.baselines = read_manifest(checkpoint).baselines
        super()._resume(checkpoint)

    def _load_start(self, checkpoint: Path, *, moments: bool) -> None:
        """Restore the critic too, if the checkpoint has one and this job trains one."""
        if self.critic is not None and (checkpoint / CRITIC).exists():
            self.critic.load(checkpoint, moments=moments)
        super()._load_start(checkpoint, moments=moments)

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        with self.random_state.held(), self.undo_if_interrupted():
            return self._step(groups, version)

    def _step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        start = time.perf_counter()
        algorithm, lr_share = self.spec.algorithm, self.lr_share
        self.process_group.seed_dropout_by_rank(self.spec.train.seed, self.steps)
        batches = micro_batches(groups, version, self.spec, torch.device(self.plan_device), self.process_group)
        micros = [micro for update in batches for micro in update]
        credit = self._give_credit(groups, micros)
        of_the_start = algorithm.proximal == "recomputed" or algorithm.correction == "geometric"
        if self.has_dropout or (algorithm.updates_per_batch > 1 and of_the_start):
            self._measure_start(micros)
        lr = self.set_lr()
        record = StepRecord()
        undo = [part.rollback_point() for part in (self, self.critic) if part is not None and len(batches) > 1]
        try:
            results = [self._update(update, record, lr_share, first=u == 0) for u, update in enumerate(batches)]
        except (NonFinite, Interrupted):
            for back in undo:
                back()
            raise
        self.steps += 1
        self.baselines = credit.baselines
        self.probed = choose_probe(groups)
        found = self.process_group.gather({**record.columns(), **sizes(micros), **critic_columns(micros)})
        return {
            "loss/policy": sum(r["policy"] for r in results) / len(results),
            "grad_norm": max(r["norm"] for r in results),
            "lr": lr,
            **size_metrics(found),
            **record_metrics(found),
            **credit.metrics,
            **({} if self.critic is None else critic_metrics(found, results)),
            **batch_metrics(groups, version),
            "step_seconds": time.perf_counter() - start,
        }

    def _give_credit(self, groups: list[Group], micros: list[MicroBatch]) -> Credit:
        """Assign advantages to the whole batch; with a critic, from its values before the batch; values of a frozen one
        come with the batch."""
        values = None
        if self.critic is not None:
            trajectories = [t for group in groups for t in group.trajectories]
            self.critic.measure(micros, self.raise_if_interrupted)
            values = Values(
                values_of(micros, [int(t.mask.sum()) for t in trajectories], self.process_group),
                end_values_of(micros, len(trajectories), self.process_group),
            )
        credit = assign(groups, self.spec.algorithm, values, self.baselines)
        self.credited = credit.advantages_S
        give_credit(micros, credit)
        return credit

    def _update(
        self, micros: list[MicroBatch], record: StepRecord, lr_share: float, *, first: bool
    ) -> dict[str, float]:
        """Run one optimizer step; returns losses and gradient norms before clipping. Raises NonFinite instead of
        stepping.

        `first`: the weights are still those before the batch.
        """
        self.dropout(on=True)
        sums = self._accumulate(micros, record, first=first)
        totals = self.process_group.sum(torch.stack(list(sums.values())))
        return self._apply(dict(zip(sums, totals, strict=True)), lr_share)

    def _accumulate(self, micros: list[MicroBatch], record: StepRecord, *, first: bool) -> dict[str, Tensor]:
        """Add the gradient of the micro-batches; returns the sums of their losses."""
        sums = {name: torch.zeros((), device=self.device) for name in ("policy", "total", "value")}
        for micro in micros:
            self.raise_if_interrupted()
            logprobs_M, entropy_M, _ = self._forward(micro)
            last = micro is micros[-1]
            if not micro.members:
                self.backward(logprobs_M.sum() * 0.0, last=last)
                continue
            found = self._objective(micro, logprobs_M, entropy_M, record, sums, first=first)
            self.backward(found, last=last)
            if self.critic is not None:
                sums["value"] += self.critic.accumulate(micro)
        return sums

    def _objective(
        self,
        micro: MicroBatch,
        logprobs_M: Tensor,
        entropy_M: Tensor,
        record: StepRecord,
        sums: dict[str, Tensor],
        *,
        first: bool,
    ) -> Tensor:
        """Return the micro-batch's loss, and enter it into the record and the sums."""
        if micro.start_M is None and first:
            micro.start_M = logprobs_M.detach()
        found = objective(logprobs_M, entropy_M, micro, self.spec.algorithm)
        sums["policy"] += found.policy
        sums["total"] += found.loss.detach()
        record.add(micro, logprobs_M, entropy_M, found)
        return found.loss

    def _apply(self, sums: dict[str, Tensor], lr_share: float) -> dict[str, float]:
        """Step the optimizer. Raises NonFinite instead if a loss or norm is not finite."""
        sums["norm"] = self.clip()
        if self.critic is not None:
            self.process_group.sum_gradients(self.critic.parameters.values())
            sums["critic_norm"] = self.critic.clip()
        try:
            result = self.require_finite(sums, ADVICE)
        except NonFinite:
            self.discard_gradients()
            raise
        self.optimizer_step()
        if self.critic is not None:
            self.critic.step(lr_share)
        return result

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        return self.forward(
            micro.plan,
            temperature=self.spec.rollout.temperature,
            entropy_gradient=bool(self.spec.algorithm.entropy_coef),
        )

    def _measure_start(self, micros: list[MicroBatch]) -> None:
        """Compute log-probabilities of the whole batch under the weights before its first update, without dropout."""
        self.dropout(on=False)
        with torch.no_grad():
            for micro in micros:
                self.raise_if_interrupted()
                micro.start_M = self._forward(micro)[0]

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()

    def save(self, directory: Path) -> None:
        super().save(directory)
        if self.critic is not None:
            self.critic.save(directory)


def choose_probe(groups: Sequence[Group]) -> list[int]:
    """Return a prefix of the batch's first trajectory without images, short enough for the engine to add a token."""
    whole = next((t.ids for group in groups for t in group.trajectories if not t.pictures and len(t.mask_T) > 2), None)
    return [] if whole is None else whole[: min(PROBE_TOKENS, len(whole) - 1)].tolist()
