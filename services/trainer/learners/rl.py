"""The learner: batches in, gradient steps, weight snapshots and checkpoints out. Stands behind `learner.Learner`.

Weights, optimizer and random state are those of `policy.PolicyModel`; here is what RL does with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.credit_assignment import Credit, Values, assign
from opentinker.services.trainer.algorithm.objective import objective
from opentinker.services.trainer.batch.metrics import batch_metrics
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
from opentinker.services.trainer.batch.step_metrics import StepRecord, record_metrics
from opentinker.services.trainer.learners.base import Interrupted, NonFinite
from opentinker.services.trainer.learners.critic import Critic, critic_columns, critic_metrics
from opentinker.services.trainer.learners.policy_model import PolicyModel
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.manifest import CRITIC
from opentinker.shared.types.trajectories import Group

PROBE_TOKENS = 64
"""At most."""
PROBE_EVERY = 4
"""Versions. A pass over a few tokens takes 4 % of a step of the smallest models."""


class TorchLearner(PolicyModel):
    """AdamW on the loss that the spec's algorithm puts together, on one device; with a gang, its rank's part of it."""

    credited: Sequence[F64] | None = None

    def _build(self, checkpoint: Path | None) -> None:
        super()._build(checkpoint)
        self.critic = Critic(self.spec, self.device) if trains_critic(self.spec) else None

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is not None and self.critic is not None:
            self.critic.load(checkpoint)
        super()._resume(checkpoint)

    def _take_over(self, checkpoint: Path, *, moments: bool) -> None:
        """A critic too, if there is one and this job trains one."""
        if self.critic is not None and (checkpoint / CRITIC).exists():
            self.critic.load(checkpoint, moments=moments)
        super()._take_over(checkpoint, moments=moments)

    def step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        with self.whole_step():
            return self._step(groups, version)

    def _step(self, groups: list[Group], version: WeightVersion) -> dict[str, float]:
        start = time.perf_counter()
        algorithm, lr_share = self.spec.algorithm, self.lr_share
        self.gang.separate_noise(self.spec.train.seed, self.steps)
        batches = micro_batches(groups, version, self.spec, torch.device(self.device), self.gang)
        micros = [micro for update in batches for micro in update]
        credit = self._give_credit(groups, micros)
        of_the_start = algorithm.proximal == "recomputed" or algorithm.correction == "geometric"
        if self.drops_out or (algorithm.updates_per_batch > 1 and of_the_start):
            self._measure_start(micros)
        lr = self.set_lr()
        record = StepRecord()
        undo = self._remember() if len(batches) > 1 else []
        try:
            results = [self._update(update, record, lr_share, first=u == 0) for u, update in enumerate(batches)]
        except (NonFinite, Interrupted):
            for back in undo:
                back()
            raise
        self.steps += 1
        self.probed = probe_of(groups) if self.steps % PROBE_EVERY == 1 else []
        found = self.gang.gather({**record.columns(), **sizes(micros), **critic_columns(micros)})
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
        """Advantages of the whole batch; with a critic, from its values before the batch; a frozen one's are in it."""
        values = None
        if self.critic is not None:
            trajectories = [t for group in groups for t in group.trajectories]
            self.critic.measure(micros, self.go_on)
            values = Values(
                values_of(micros, [int(t.mask.sum()) for t in trajectories], self.gang),
                end_values_of(micros, len(trajectories), self.gang),
            )
        credit = assign(groups, self.spec.algorithm, values)
        self.credited = credit.advantages_S
        give_credit(micros, credit)
        return credit

    def _remember(self) -> list[Callable[[], None]]:
        return [self.remember(), *([self.critic.remember()] if self.critic else [])]

    def _update(
        self, micros: list[MicroBatch], record: StepRecord, lr_share: float, *, first: bool
    ) -> dict[str, float]:
        """One optimizer step: losses and gradient norms before clipping. Raises NonFinite instead of stepping.

        `first`: the weights are still those before the batch.
        """
        sums = {name: torch.zeros((), device=self.device) for name in ("policy", "total", "value")}
        self.dropout(on=True)
        for micro in micros:
            self.go_on()
            logprobs_M, entropy_M, _ = self._forward(micro)
            last = micro is micros[-1]
            if not micro.members:
                self.backward(logprobs_M.sum() * 0.0, last=last)
                continue
            if micro.start_M is None and first:
                micro.start_M = logprobs_M.detach()
            found = objective(logprobs_M, entropy_M, micro, self.spec.algorithm)
            self.backward(found.loss, last=last)
            sums["policy"] += found.policy
            sums["total"] += found.loss.detach()
            record.add(micro, logprobs_M, entropy_M, found)
            if self.critic is not None:
                sums["value"] += self.critic.accumulate(micro)
        sums = dict(zip(sums, self.gang.sum(torch.stack(list(sums.values()))), strict=True))
        sums["norm"] = self.clip()
        if self.critic is not None:
            self.gang.sum_gradients(self.critic.parameters.values())
            sums["critic_norm"] = self.critic.clip()
        try:
            result = self.finite(sums, "a lower lr, or a tighter bound on the ratio")
        except NonFinite:
            self.forget()
            raise
        self.apply()
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
        """Log-probabilities of the whole batch under the weights before its first update, without dropout."""
        self.dropout(on=False)
        with torch.no_grad():
            for micro in micros:
                self.go_on()
                micro.start_M = self._forward(micro)[0]

    def forget(self) -> None:
        super().forget()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()

    def save(self, directory: Path) -> None:
        super().save(directory)
        if self.critic is not None:
            self.critic.save(directory)


def probe_of(groups: Sequence[Group]) -> list[int]:
    """The beginning of the batch's first trajectory without images; it leaves the engine room for a token more."""
    whole = next((t.ids for group in groups for t in group.trajectories if not t.pictures and len(t.mask_T) > 2), None)
    return [] if whole is None else whole[: min(PROBE_TOKENS, len(whole) - 1)].tolist()
