"""Corrections for the difference between the sampling policy and the trained policy. Pure torch functions.

mu, pi_prox and pi as in `losses.py`. A correction is a weight per token [M] without gradient, by which the token's
policy loss is multiplied; 0 drops the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.losses import sequence_means


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


def tis(proximal_M: Tensor, behaviour_M: Tensor, *, tis_cap: float) -> Tensor:
    """min(pi_prox / mu, tis_cap): truncated importance sampling.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (tis_cap 2 there).
    """
    return (proximal_M - behaviour_M).detach().exp().clamp(max=tis_cap)


def icepop(proximal_M: Tensor, behaviour_M: Tensor, *, icepop_low: float, icepop_high: float) -> Tensor:
    """k = pi_prox / mu where icepop_low <= k <= icepop_high, else 0: tokens far off are dropped.

    Source: IcePop, Ring team 2025 ("Small leak can sink a great ship"), equation of the masking function M(k).
    """
    ratio_M = (proximal_M - behaviour_M).detach().exp()
    return torch.where((ratio_M >= icepop_low) & (ratio_M <= icepop_high), ratio_M, torch.zeros_like(ratio_M))


def geometric(
    logprobs_M: Tensor, behaviour_M: Tensor, sequence_M: Tensor, *, geometric_low: float, geometric_high: float
) -> Tensor:
    """1 for the tokens of sequences with geometric_low <= exp(mean_t log(pi / mu)) <= geometric_high, else 0.

    The mean makes long and short sequences comparable. `sequence_M` as in `losses.gspo`.
    Source: geometric sequence masking as described by SkyRL and in Li et al. 2025 ("When speed kills stability").
    """
    mean_S = sequence_means((logprobs_M - behaviour_M).detach(), sequence_M)
    kept_S = (mean_S.exp() >= geometric_low) & (mean_S.exp() <= geometric_high)
    return kept_S.to(logprobs_M.dtype).index_select(0, sequence_M)
