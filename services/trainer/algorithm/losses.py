"""Losses per token. Pure torch functions; inputs and outputs are [M], one entry per mask-1 token of a micro-batch.

mu is the policy that sampled (behaviour), pi the trained policy, pi_prox the centre of the clip range, called pi_old
in the papers (`corrections.py` and the option `proximal`). All inputs are log-probabilities in nats,
except the advantages; gradients flow through `logprobs_M` alone. `objective.py` chooses by `algorithm.loss`;
names, options and presets are in shared/spec/algorithm.py and algorithm_parts.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opentinker.services.trainer.algorithm.advantages import MAX_LOG_RATIO


class PolicyLoss(NamedTuple):
    loss_M: Tensor
    clipped_M: Tensor
    """bool: the token has no gradient (cispo: a bounded weight)."""


def ppo(
    logprobs_M: Tensor,
    proximal_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """loss = - min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A),  u = pi / pi_prox

    and, with `dual_clip` c, for A < 0: loss = - max(that minimum, c * A), so that a token which became much more likely
    cannot push without bound. clip_low = clip_high is PPO's symmetric range; clip_high above clip_low leaves room for
    unlikely tokens to rise ("clip-higher").
    Sources: PPO, arXiv 1707.06347, equation 7; clip-higher: DAPO, arXiv 2503.14476, section 3.1; dual clip: Ye et al.,
    arXiv 1912.09729, equation 5.
    """
    ratio_M, extreme_M = _ratio(logprobs_M, proximal_M)
    free_M = ratio_M * advantages_M
    bounded_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_M
    objective_M, clipped_M = torch.minimum(free_M, bounded_M), (bounded_M < free_M) | extreme_M
    if dual_clip is not None:
        floor_M = dual_clip * advantages_M
        below_M = (advantages_M < 0) & (objective_M < floor_M)
        objective_M, clipped_M = torch.where(below_M, floor_M, objective_M), clipped_M | below_M
    return PolicyLoss(-objective_M, clipped_M.detach())


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

    with u = pi / pi_prox and w = min(pi_prox / mu, behaviour_cap), which carries no gradient.
    Sources: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equations 4 and 5; the cap is that of truncated
    importance sampling (Yao et al. 2025).
    """
    proximal_M = proximal_M.detach()
    weight_M = (proximal_M - behaviour_M).exp().clamp(max=behaviour_cap)
    clipped = ppo(logprobs_M, proximal_M, advantages_M, clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss(weight_M * clipped.loss_M, clipped.clipped_M)


def importance_sampling(logprobs_M: Tensor, behaviour_M: Tensor, advantages_M: Tensor) -> PolicyLoss:
    """loss = - (pi / mu) * A, with no bound but MAX_LOG_RATIO: unbiased per token, at the price of its variance.

    Source: the off-policy policy gradient, e.g. Degris et al., arXiv 1205.4839, with per-token ratios.
    """
    ratio_M, extreme_M = _ratio(logprobs_M, behaviour_M)
    return PolicyLoss(-ratio_M * advantages_M, extreme_M)


def cispo(
    logprobs_M: Tensor, proximal_M: Tensor, advantages_M: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """loss = - sg(clip(u, 1 - clip_low, 1 + clip_high)) * A * log pi,  u = pi / pi_prox, sg: no gradient.

    REINFORCE with a bounded weight: no token ever loses its gradient. clip_low = 1 leaves the weight without a floor.
    Sources: MiniMax-M1, arXiv 2506.13585, equations 4 and 5; ScaleRL, arXiv 2510.13786, equation 4.
    """
    ratio_M = (logprobs_M.detach() - proximal_M.detach()).exp()
    weight_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight_M * advantages_M * logprobs_M, weight_M != ratio_M)


def gspo(
    logprobs_M: Tensor,
    proximal_M: Tensor,
    advantages_M: Tensor,
    sequence_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """loss = - min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A),  s = exp(mean over the sequence of log u)

    with u = pi / pi_prox, at every token of the sequence: its mean over the sequence is the sequence's loss.
    `sequence_M` (int64, 0, 1, ...) says which sequence a token belongs to; `advantages_M` is constant within one.
    Source: GSPO, arXiv 2507.18071, equations 5 to 7.
    """
    mean_S = sequence_means(logprobs_M - proximal_M.detach(), sequence_M)
    mean_M = mean_S.index_select(0, sequence_M)
    return ppo(mean_M, torch.zeros_like(mean_M), advantages_M, clip_low=clip_low, clip_high=clip_high)


def dppo(
    logprobs_M: Tensor, behaviour_M: Tensor, advantages_M: Tensor, *, tv_limit: float, log_ratio_penalty: float
) -> PolicyLoss:
    """loss = - keep * (pi / mu) * A + log_ratio_penalty * (log pi - log mu)^2

    keep = 0 where pi - mu > tv_limit and A > 0, or pi - mu < -tv_limit and A < 0: |pi - mu| is the total variation
    between the two policies seen as "this token or another" (binary). Probabilities, not ratios, so that rare tokens
    may move by large factors and frequent ones may not.
    Source: DPPO, arXiv 2602.04879 (binary TV mask); the penalty on all tokens is that of prime-rl's default loss.
    """
    log_ratio_M = logprobs_M - behaviour_M
    moved_M = (logprobs_M.exp() - behaviour_M.exp()).detach()
    dropped_M = ((advantages_M > 0) & (moved_M > tv_limit)) | ((advantages_M < 0) & (moved_M < -tv_limit))
    ratio_M, extreme_M = _ratio(logprobs_M, behaviour_M)
    gain_M = ratio_M * advantages_M
    loss_M = -torch.where(dropped_M, torch.zeros_like(gain_M), gain_M) + log_ratio_penalty * log_ratio_M.square()
    return PolicyLoss(loss_M, dropped_M | extreme_M)


def sapo(
    logprobs_M: Tensor, proximal_M: Tensor, advantages_M: Tensor, *, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """loss = - (4 / tau) * sigmoid(tau * (u - 1)) * A,  u = pi / pi_prox, tau by the sign of A.

    A clip without corners: its slope in u is 1 at u = 1 and fades away from it, faster for a larger tau.
    Source: SAPO, arXiv 2511.20347, equations 5 and 6 (tau 1.0 where A > 0, 1.05 elsewhere).
    """
    ratio_M, extreme_M = _ratio(logprobs_M, proximal_M)
    tau_M = torch.full_like(ratio_M, tau_negative).masked_fill(advantages_M > 0, tau_positive)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1.0)) * 4.0 / tau_M
    return PolicyLoss(-gate_M * advantages_M, extreme_M)


def dro(logprobs_M: Tensor, behaviour_M: Tensor, advantages_M: Tensor, *, beta: float) -> PolicyLoss:
    """loss = - A * log pi + beta / 2 * (log pi - log mu)^2: a squared penalty in the place of a ratio.

    Source: the policy's part of DRO, arXiv 2405.19107, section 4, divided by beta, with per-token log-probabilities.
    """
    penalty_M = (logprobs_M - behaviour_M).square() * (beta / 2.0)
    return PolicyLoss(penalty_M - advantages_M * logprobs_M, torch.zeros_like(logprobs_M, dtype=torch.bool))


def k1(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """log pi - log reference: unbiased for KL(pi || reference), of either sign. Source: Schulman, as `k3`.

    As a term of the loss its gradient is 0 on average; in the reward it is the usual choice.
    """
    return logprobs_M - reference_M


def k2(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """(log pi - log reference)^2 / 2: biased a little, but its gradient is that of KL(pi || reference) on policy.

    Source: Schulman, as `k3`.
    """
    return (logprobs_M - reference_M).square() / 2.0


def k3(logprobs_M: Tensor, reference_M: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) per token: exp(d) - d - 1 with d = log reference - log pi. Never negative.

    d is at most MAX_LOG_RATIO, beyond which there is no gradient.
    Source: Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO, arXiv 2402.03300, equation 4.
    """
    difference_M = (reference_M - logprobs_M).clamp(max=MAX_LOG_RATIO)
    return difference_M.exp() - difference_M - 1.0


KL = {"k1": k1, "k2": k2, "k3": k3}


def value_loss(values_M: Tensor, before_M: Tensor, returns_M: Tensor, *, value_clip: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2 per token

    with V_old (`before_M`) the critic's value before the batch; gradients flow through `values_M` alone.
    Source: PPO's reference code; arXiv 2006.05990, C13.
    """
    bounded_M = before_M + (values_M - before_M).clamp(-value_clip, value_clip)
    return torch.maximum((values_M - returns_M).square(), (bounded_M - returns_M).square()) / 2.0


def token_mean(counts_S: Tensor, tokens: int) -> Tensor:
    """Weight of each token: 1 / mask-1 tokens of the whole batch. [M], sequences one after the other.

    Weights are those of the batch, so that its loss is the same however it was cut into micro-batches, and they are
    taken before any loss masking: masking tokens must not inflate the gradients of the others.
    Source: DAPO, arXiv 2503.14476, section 3.3.
    """
    return torch.full((int(counts_S.sum()),), 1.0 / tokens, device=counts_S.device)


def sequence_mean(counts_S: Tensor, sequences: int, wholes_S: Tensor | None = None) -> Tensor:
    """Weight 1 / (sequences of the batch * tokens of the own sequence). Source: GRPO, arXiv 2402.03300, equation 3.

    `wholes_S`: tokens of the whole that each one is a stream of, where `sequences` counts wholes.
    """
    wholes_S = counts_S if wholes_S is None else wholes_S
    return (1.0 / (wholes_S.double() * sequences)).float().repeat_interleave(counts_S)


def constant(counts_S: Tensor, sequences: int, max_tokens: int) -> Tensor:
    """Weight 1 / (sequences of the batch * max_tokens), regardless of the sequence's length.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2 and its listing 1.
    """
    return torch.full((int(counts_S.sum()),), 1.0 / (sequences * max_tokens), device=counts_S.device)


def _ratio(logprobs_M: Tensor, old_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return pi / old, at most e^MAX_LOG_RATIO, and where it was clamped, bool. `logprobs_M` alone has a gradient."""
    log_ratio_M = logprobs_M - old_M.detach()
    return log_ratio_M.clamp(max=MAX_LOG_RATIO).exp(), (log_ratio_M > MAX_LOG_RATIO).detach()


def sequence_means(values_M: Tensor, sequence_M: Tensor) -> Tensor:
    """[S] mean of each sequence's tokens; every sequence 0..S-1 has some."""
    count = int(sequence_M.max()) + 1
    sums_S = values_M.new_zeros(count).index_add(0, sequence_M, values_M)
    return sums_S / values_M.new_zeros(count).index_add(0, sequence_M, torch.ones_like(values_M))
