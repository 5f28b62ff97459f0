"""Losses per token. Pure torch functions; inputs and outputs are [M], one entry per mask-1 token of a micro-batch.

mu is the policy that sampled (behaviour), pi_prox the weights before the batch's first update, pi the weights now.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    loss_M: Tensor
    clipped_M: Tensor
    """bool: the clip is active, the token has no gradient."""


def decoupled_ppo(
    logprobs_M: Tensor,
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behaviour_cap: float,
) -> PolicyLoss:
    """loss = - w * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A)

    with u = pi / pi_prox and w = min(pi_prox / mu, behaviour_cap), which carries no gradient. All inputs are
    log-probabilities (nats) except the advantages; gradients flow through `logprobs_M` alone.
    Sources: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equations 4 and 5; the cap is that of truncated
    importance sampling (Yao et al. 2025).
    """
    proximal_M = proximal_M.detach()
    weight_M = (proximal_M - behaviour_M).exp().clamp(max=behaviour_cap)
    ratio_M = (logprobs_M - proximal_M).exp()
    free_M = ratio_M * advantages_M
    bounded_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_M
    return PolicyLoss(-weight_M * torch.minimum(free_M, bounded_M), (bounded_M < free_M).detach())


def loglinear_proximal(logprobs_M: Tensor, behaviour_M: Tensor, lag_M: Tensor) -> Tensor:
    """log pi_prox = log mu + a (log pi - log mu),  a = (s - 1) / s,  and a = 0 where s <= 1. No gradient.

    s (`lag_M`) is the number of versions that the trainer is ahead of the weights that sampled the token. How to read
    it: the policy is taken to have walked from mu to pi in s equal steps of log-probability; pi_prox is where it stood
    one step ago. So u = pi / pi_prox = (pi / mu)^(1/s) is the walk of one version, and the clip range bounds that: up
    to s = 1 it is the trust region of PPO around mu itself, and each further version of lag allows one range more,
    while w = pi_prox / mu = (pi / mu)^((s-1)/s) weighs the rest. Nothing is computed twice.
    Source: AReaL (github.com/inclusionAI/AReaL), option `prox_logp_method = "loglinear"`, with
    a = (v_prox - v_mu) / (v - v_mu) and v_prox = v - 1.
    """
    share_M = (lag_M - 1.0).clamp(min=0.0) / lag_M.clamp(min=1.0)
    return behaviour_M + share_M * (logprobs_M.detach() - behaviour_M)


def k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) per token: exp(d) - d - 1 with d = log reference - log pi. Never negative.

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO, arXiv 2402.03300, equation 4.
    """
    difference_M = reference_M - logprobs_M
    return difference_M.exp() - difference_M - 1.0


def token_mean(loss_M: Tensor, batch_tokens: int) -> Tensor:
    """Sum over the tokens of this micro-batch / mask-1 tokens of the whole batch.

    Summed over the micro-batches of a batch this is the batch's token mean, however it was cut. The count is taken
    before any loss masking: masking tokens must not inflate the gradients of the others.
    Source: DAPO, arXiv 2503.14476, section 3.3.
    """
    return loss_M.sum() / batch_tokens
