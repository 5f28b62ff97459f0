"""From groups to tensors: the micro-batches of one optimizer step, and the numbers that a step leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opentinker.services.trainer.advantages import grpo
from opentinker.shared.errors import JobFailed
from opentinker.shared.nn.forward import Layout, layout
from opentinker.shared.nn.packing import pack
from opentinker.shared.spec import JobSpec
from opentinker.shared.types import Group, Trajectory, WeightVersion


@dataclass
class MicroBatch:
    """What one forward pass needs. M: mask-1 tokens, trajectory by trajectory."""

    plan: Layout
    behaviour_M: Tensor
    advantages_M: Tensor
    reference_M: Tensor | None
    current_M: Tensor
    """bool: sampled by the very weights that the trainer holds now."""
    lag_M: Tensor
    """float: versions that the weights which sampled the token lag behind the trainer's."""
    tokens: int
    """All tokens of its trajectories, prompts and observations included."""
    start_M: Tensor | None = None
    """Log-probabilities under the weights before the batch, where the update's own forward pass does not give them."""


def micro_batches(groups: list[Group], version: WeightVersion, spec: JobSpec, device: torch.device) -> list[MicroBatch]:
    """Whole groups -> micro-batches. Arrival order keeps a group, and so its shared prompt, together."""
    trajectories, advantages = [], []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        advantages += list(grpo(rewards, normalize_std=spec.algorithm.normalize_std))
        trajectories += group.trajectories
    sampled = [i for i, t in enumerate(trajectories) if t.mask.any()]
    if not sampled:
        raise JobFailed("a whole batch came without one sampled token: do the prompts fill the context window?")
    trajectories, advantages = [trajectories[i] for i in sampled], [advantages[i] for i in sampled]
    lengths = [len(t.mask_T) for t in trajectories]
    return [
        _micro_batch([trajectories[i] for i in members], [advantages[i] for i in members], version, spec, device)
        for members in pack(lengths, spec.train.tokens_per_micro_batch, "arrival")
    ]


def _micro_batch(
    trajectories: list[Trajectory],
    advantages: list[float],
    version: WeightVersion,
    spec: JobSpec,
    device: torch.device,
) -> MicroBatch:
    masks = [t.mask.astype(bool) for t in trajectories]
    reference = None
    if spec.algorithm.kl_coef > 0:
        lacking = [t.attempt for t in trajectories if t.ref_logprobs is None]
        if lacking:
            raise JobFailed(f"kl_coef > 0 but trajectory {lacking[0]} came without reference logprobs")
        reference = _tensor([t.ref_logprobs[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device)  # type: ignore[index]
    counts = [int(mask.sum()) for mask in masks]
    return MicroBatch(
        plan=layout([t.ids for t in trajectories], masks).to(device),
        behaviour_M=_tensor([t.logprobs[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device),
        advantages_M=_tensor([np.repeat(advantages, counts)], np.float32, device),
        reference_M=reference,
        current_M=_tensor([_current(t, version)[m] for t, m in zip(trajectories, masks, strict=True)], bool, device),
        lag_M=_tensor([_lags(t, version)[m] for t, m in zip(trajectories, masks, strict=True)], np.float32, device),
        tokens=sum(len(m) for m in masks),
    )


def _current(trajectory: Trajectory, version: WeightVersion) -> npt.NDArray[np.bool_]:
    current = np.zeros(len(trajectory.mask_T), dtype=bool)
    for span in trajectory.spans:
        if span.version == version:
            current[span.start : span.end] = True
    return current


def _lags(trajectory: Trajectory, version: WeightVersion) -> npt.NDArray[np.int64]:
    """Steps, whatever the epochs: after a resume the trainer stands on the steps of the epochs before."""
    lags = np.zeros(len(trajectory.mask_T), dtype=np.int64)
    for span in trajectory.spans:
        lags[span.start : span.end] = version.step - span.version.step
    return lags


def _tensor(parts: list[Any], dtype: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False)).to(device)


@dataclass
class StepRecord:
    """Per-token results of a batch's updates, kept on the device until one transfer at the end."""

    logprobs: list[Tensor] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=list)
    """|log pi - log mu| under the weights before the batch, of the tokens for which that is known."""
    same: list[Tensor] = field(default_factory=list)
    """bool, beside `start`: sampled by these very weights."""
    behaviour: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """entropy, clip_share, loss/kl, ratio/{mean,max,k3,outside}, ess, mismatch/{mean,max,tokens}, drift/mean.

        ratio = pi / mu before any clipping, pi being the weights of each update's forward pass; k3 = ratio - log ratio
        - 1; outside: share of tokens whose ratio leaves [0.9, 1.1]; ess = (sum ratio)^2 / (n sum ratio^2).
        mismatch = |log pi - log mu| with pi the weights before the batch, over the tokens that these same weights
        sampled: what is left is numerics (and, with top_p or top_k, the truncation: mu is renormalised over the tokens
        left, pi is not). No such tokens, no mismatch. drift: the same over all tokens. Of several updates per batch
        the first one is measured, or all with a recomputed proximal policy.
        """
        log_ratio = _joined(self.logprobs) - _joined(self.behaviour)
        gap = _joined(self.start)
        same = gap[_joined(self.same).astype(bool)]
        ratio = np.exp(np.minimum(log_ratio, 700.0))
        metrics = {
            "entropy": float(_joined(self.entropy).mean()),
            "clip_share": float(_joined(self.clipped).mean()),
            "ratio/mean": float(ratio.mean()),
            "ratio/max": float(ratio.max()),
            "ratio/k3": float((ratio - log_ratio - 1.0).mean()),
            "ratio/outside": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
            "ess": effective_sample_size(log_ratio),
            "mismatch/tokens": float(len(same)),
            "drift/mean": float(gap.mean()),
        }
        if len(same):
            metrics |= {"mismatch/mean": float(same.mean()), "mismatch/max": float(same.max())}
        if self.kl:
            metrics["loss/kl"] = float(_joined(self.kl).mean())
        return metrics


def effective_sample_size(log_weights: npt.NDArray[np.float64]) -> float:
    """(sum w)^2 / (n * sum w^2), between 1/n and 1."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _joined(parts: Iterable[Tensor]) -> npt.NDArray[np.float64]:
    return torch.cat(list(parts)).double().cpu().numpy()  # type: ignore[no-any-return]
