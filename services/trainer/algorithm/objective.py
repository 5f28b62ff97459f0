"""The loss of one micro-batch, composed of the parts that the spec names.

logprobs --policy loss--> --correction--> + KL - entropy bonus --aggregation--> one number
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opentinker.services.trainer.algorithm import corrections, losses
from opentinker.services.trainer.algorithm.losses import PolicyLoss
from opentinker.services.trainer.batch.micro_batch import MicroBatch
from opentinker.shared.spec import AlgorithmSpec


@dataclass
class Objective:
    """Results of one forward pass. `loss` has a gradient, the other fields have none."""

    loss: Tensor
    policy: Tensor
    """Its first term alone."""
    masked_M: Tensor
    """bool: no gradient from the policy loss, be it by the clip or by the correction (cispo: a bounded weight)."""
    clipped_M: Tensor
    """bool: by the clip."""
    kl_M: Tensor | None


def objective(logprobs_M: Tensor, entropy_M: Tensor, micro: MicroBatch, algorithm: AlgorithmSpec) -> Objective:
    """L = sum over the tokens m of scale_m * (c_m * l_m + kl_coef * KL_m - entropy_coef * H_m)

    with l the policy loss, c the correction's weight (1 without one) and scale the aggregation's weight, which is that
    of the whole optimizer step: the micro-batches' losses add up to its loss. `logprobs_M` and `entropy_M` (H) are
    those of the weights that are trained. The sources are those of the parts.
    """
    proximal_M = proximal(logprobs_M, micro, algorithm)
    losses_M = policy_loss(logprobs_M, proximal_M, micro, algorithm)
    weight_M = correction(logprobs_M, proximal_M, micro, algorithm)
    masked_M, loss_M = losses_M.clipped_M, losses_M.loss_M
    if weight_M is not None:
        loss_M = loss_M * weight_M
        masked_M = masked_M | (weight_M == 0)
    loss = (loss_M * micro.scale_M).sum()
    policy, kl_M = loss.detach(), None
    if micro.reference_M is not None:
        kl_M = losses.KL[algorithm.kl_estimator or "k3"](logprobs_M, micro.reference_M)
        loss = loss + algorithm.kl_coef * (kl_M * micro.scale_M).sum()
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * (entropy_M * micro.scale_M).sum()
    return Objective(loss, policy, masked_M, losses_M.clipped_M, None if kl_M is None else kl_M.detach())


def proximal(logprobs_M: Tensor, micro: MicroBatch, algorithm: AlgorithmSpec) -> Tensor:
    """log pi_prox; for losses that use mu alone, log mu."""
    match algorithm.proximal:
        case "loglinear":
            return corrections.loglinear_proximal(logprobs_M, micro.behaviour_M, micro.lag_M)
        case "recomputed":
            assert micro.start_M is not None
            return micro.start_M
        case _:
            return micro.behaviour_M


def policy_loss(logprobs_M: Tensor, proximal_M: Tensor, micro: MicroBatch, algorithm: AlgorithmSpec) -> PolicyLoss:
    options: dict[str, Any] = algorithm.options("loss")
    options.pop("proximal", None)
    advantages_M = micro.advantages_M
    match algorithm.loss:
        case "decoupled_ppo":
            return losses.decoupled_ppo(logprobs_M, proximal_M, micro.behaviour_M, advantages_M, **options)
        case "gspo":
            return losses.gspo(logprobs_M, proximal_M, advantages_M, micro.sequence_M, **options)
        case "importance_sampling":
            return losses.importance_sampling(logprobs_M, micro.behaviour_M, advantages_M)
        case "dppo":
            return losses.dppo(logprobs_M, micro.behaviour_M, advantages_M, **options)
        case _:
            return _CLIPPED[str(algorithm.loss)](logprobs_M, proximal_M, advantages_M, **options)


_CLIPPED: dict[str, Callable[..., PolicyLoss]] = {"ppo": losses.ppo, "cispo": losses.cispo, "sapo": losses.sapo}


def correction(logprobs_M: Tensor, proximal_M: Tensor, micro: MicroBatch, algorithm: AlgorithmSpec) -> Tensor | None:
    """Weight per token; None: all 1."""
    options: dict[str, Any] = algorithm.options("correction")
    match algorithm.correction:
        case "tis":
            return corrections.tis(proximal_M, micro.behaviour_M, **options)
        case "icepop":
            return corrections.icepop(proximal_M, micro.behaviour_M, **options)
        case "geometric":
            now_M = logprobs_M if micro.start_M is None else micro.start_M
            return corrections.geometric(now_M, micro.behaviour_M, micro.sequence_M, **options)
        case _:
            return None
