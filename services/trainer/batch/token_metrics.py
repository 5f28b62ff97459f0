"""Metrics of one training step from its tokens: off-policyness and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.objective import Objective
from opentinker.services.trainer.batch.distributions import ratio_counts
from opentinker.services.trainer.batch.micro_batch import MicroBatch


@dataclass
class StepRecord:
    """Per-token results, kept on the device until one transfer at the end."""

    logprobs: list[Tensor] = field(default_factory=list)
    behaviour: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    masked: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=list)
    """|log pi - log mu| under the weights before the batch, for the tokens where it is known."""
    same: list[Tensor] = field(default_factory=list)
    """bool, parallel to `start`: sampled by exactly these weights."""

    def add(self, micro: MicroBatch, logprobs_M: Tensor, entropy_M: Tensor, found: Objective) -> None:
        self.logprobs.append(logprobs_M.detach())
        self.behaviour.append(micro.behaviour_M)
        self.advantages.append(micro.advantages_M)
        self.entropy.append(entropy_M.detach())
        self.clipped.append(found.clipped_M)
        self.masked.append(found.masked_M)
        if found.kl_M is not None:
            self.kl.append(found.kl_M)
        if micro.start_M is not None:
            self.start.append((micro.start_M - micro.behaviour_M).abs())
            self.same.append(micro.current_M)

    def extend(self, later: StepRecord) -> None:
        for column in fields(self):
            getattr(self, column.name).extend(getattr(later, column.name))

    def columns(self) -> dict[str, Tensor]:
        return {column.name: _joined(getattr(self, column.name)) for column in fields(self)}


def record_metrics(columns: Mapping[str, F64]) -> dict[str, float]:
    """entropy, clip_share, masked/{positive,negative}, loss/kl, ratio/{mean,max,k3,outside}, ess,
    mismatch/{mean,max,tokens}, drift/mean, and the ratio's histogram (distributions.py). `columns`: those of a record,
    of all ranks.

    ratio = pi / mu before any clipping, pi being the weights of each update's forward pass; k3 = ratio - log ratio
    - 1; outside: share of tokens whose ratio leaves [0.9, 1.1]; ess = (sum ratio)^2 / (n sum ratio^2).
    masked/SIGN: of the tokens with an advantage of that sign, the share that clip or correction left without
    gradient (absent if no token has that sign).
    mismatch = |log pi - log mu| with pi the weights before the batch, over the tokens that these same weights
    sampled: what is left is numerics (and, with top_p or top_k, the truncation: mu is renormalised over the tokens
    left, pi is not). No such tokens, no mismatch. drift: the same over all tokens. Of several updates per batch
    the first one is measured, or all with a recomputed proximal policy.
    """
    log_ratio = columns["logprobs"] - columns["behaviour"]
    gap = columns["start"]
    same = gap[columns["same"].astype(bool)]
    ratio = np.exp(np.minimum(log_ratio, 700.0))
    metrics = {
        "entropy": float(columns["entropy"].mean()),
        "clip_share": float(columns["clipped"].mean()),
        "ratio/mean": float(ratio.mean()),
        "ratio/max": float(ratio.max()),
        "ratio/k3": float((ratio - log_ratio - 1.0).mean()),
        "ratio/outside": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        **ratio_counts(ratio),
        "ess": effective_sample_size(log_ratio),
        "mismatch/tokens": float(len(same)),
        "drift/mean": float(gap.mean()),
    }
    if len(same):
        metrics |= {"mismatch/mean": float(same.mean()), "mismatch/max": float(same.max())}
    advantages, masked = columns["advantages"], columns["masked"]
    for name, signed in (("positive", advantages > 0), ("negative", advantages < 0)):
        if signed.any():
            metrics[f"masked/{name}"] = float(masked[signed].mean())
    if len(columns["kl"]):
        metrics["loss/kl"] = float(columns["kl"].mean())
    return metrics


def effective_sample_size(log_weights: npt.NDArray[np.float64]) -> float:
    """(sum w)^2 / (n * sum w^2), between 1/n and 1; `log_weights` [n]. Source: Kish, "Survey Sampling" (1965)."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).float() if parts else torch.empty(0)
