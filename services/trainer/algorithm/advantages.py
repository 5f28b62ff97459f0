"""Advantage estimators: rewards in, advantages out. Pure numpy, float64.

Shapes: G trajectories of a group, T sampled (mask-1) tokens of a trajectory, K turns of a trajectory. Functions of
several groups or trajectories accept and return lists of such arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from opentinker.shared.types.match_results import alike

F64 = npt.NDArray[np.float64]
EPSILON = 1e-4
TINY = 1e-8
MAX_LOG_RATIO = 20.0
"""Ratios are bounded at e^20 = 4.9e8, where they have no gradient. float32 overflows at e^88.7, and inf * 0, which is
what a clip or an advantage of 0 makes of that, is NaN. Source of the number: verl (github.com/volcengine/verl),
`core_algos.py`, which clamps the log ratio to [-20, 20]; below -20 nothing overflows, so nothing is clamped here."""


def grpo(rewards_G: npt.ArrayLike, *, normalize_std: bool = True, turns_G: Sequence[int] | None = None) -> F64:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4); without `normalize_std` the numerator alone.

    `std` is the sample standard deviation (N - 1 in the denominator). A group of equal rewards gets zeros. Mean and std
    are those of the group's trajectories (N = G) or, with `turns_G`, the number of turns of each, those of the group's
    turns (N = sum of K_i), each of which has its trajectory's reward: a trajectory counts K_i times.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; over turns: Dr. MAS, arXiv 2602.08847, equation 5, where a group is
    all action steps of one agent.
    """
    rewards = _group(rewards_G)
    counted = rewards if turns_G is None else np.repeat(rewards, turns_G)
    if alike(rewards.tolist()) or len(counted) < 2:
        return np.zeros_like(rewards)
    centred: F64 = rewards - counted.mean()
    if normalize_std:
        centred /= counted.std(ddof=1) + EPSILON
    return centred


def dr_grpo(rewards_G: npt.ArrayLike, *, turns_G: Sequence[int] | None = None) -> F64:
    """A_i = r_i - mean(r), the mean as in `grpo`. Source: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    return grpo(rewards_G, normalize_std=False, turns_G=turns_G)


def rloo(rewards_G: npt.ArrayLike) -> F64:
    """A_i = r_i - mean of the other G - 1 rewards = G / (G - 1) * (r_i - mean(r)).

    Source: RLOO, arXiv 2402.14740, section 4.1.
    """
    rewards = _group(rewards_G)
    return dr_grpo(rewards) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards_G: npt.ArrayLike) -> F64:
    """A_i = (r_i - mean(r)) / mean(r): hard prompts weigh more than easy ones. Rewards must not be negative.

    A group without any reward gets zeros. Source: MaxRL, arXiv 2602.02710.
    """
    rewards = _group(rewards_G)
    if (rewards < 0).any():
        raise ValueError("maxrl divides by the group's mean reward: rewards must not be negative")
    mean = rewards.mean()
    return dr_grpo(rewards) / mean if mean > 0 else np.zeros_like(rewards)


def reinforce_pp(returns_S: Sequence[F64]) -> list[F64]:
    """A_t = (R_t - mean(R)) / (std(R) + 1e-8), mean and std over all tokens of the batch.

    `returns_S` holds [T] per trajectory: R_t = r - beta * sum_{i >= t} KL_i, see `returns_to_go`; without KL in the
    reward it is r at every token. Source: REINFORCE++, arXiv 2501.03262, equations 5 and 8.
    """
    flat = np.concatenate(list(returns_S))
    mean, std = flat.mean(), flat.std()
    return [(returns - mean) / (std + TINY) for returns in returns_S]


def reinforce_pp_baseline(rewards_B: Sequence[npt.ArrayLike], counts_B: Sequence[Sequence[int]]) -> list[F64]:
    """A_i = c_i / (std(c) + 1e-8) with c_i = r_i - mean of its group, std over all tokens of the batch.

    `rewards_B` is [G] per group, `counts_B` the sampled tokens of the same trajectories; the result is [G] per group.
    The mean that is taken off before dividing is that of the tokens too. Source: REINFORCE++, arXiv 2501.03262,
    section 3.3 (REINFORCE++-baseline).
    """
    centred_B = [dr_grpo(rewards) for rewards in rewards_B]
    tokens = np.concatenate([np.repeat(c, n) for c, n in zip(centred_B, counts_B, strict=True)])
    return [(c - tokens.mean()) / (tokens.std() + TINY) for c in centred_B]


def rae(rewards_N: npt.ArrayLike, baseline: float, *, decay: float) -> tuple[F64, float]:
    """A_i = r_i - b, and then b <- decay * b + (1 - decay) * r_i, one trajectory after the other; not normalised.

    `rewards_N` are those of one seat in one environment, in the order of training; `baseline` is b before the first of
    them, 0 at a job's start. Returns (advantages [N], b after the last). A reward is never compared with a mean that
    it is part of, so there is no bias and groups may have any size.
    Source: role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119, algorithm 1 (decay 0.95), in the order of
    its reference implementation.
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    found = np.empty_like(rewards)
    for i, reward in enumerate(rewards.tolist()):
        found[i] = reward - baseline
        baseline = decay * baseline + (1.0 - decay) * reward
    return found, baseline


def per_turn(rewards_G: Sequence[npt.ArrayLike], *, gamma: float, normalize_std: bool = True) -> list[F64]:
    """One advantage per turn: A_ik = (R_ik - mean_k) / (std_k + 1e-4), R_ik = sum_{j >= k} gamma^(j-k) r_ij.

    `rewards_G` holds the turn rewards [K] of each trajectory, of differing length. mean_k and std_k are those of the
    k-th turns of the group, over the trajectories that have one: a late turn is never measured by the statistics of the
    first. Where only one trajectory got that far there is nothing to compare with, and A = 0.
    Source: returns-to-go per step as in group-in-group advantages, arXiv 2505.10978, section 4.2, with the turn's
    position as anchor.
    """
    _group(np.zeros(len(rewards_G)))
    returns_G = [returns_to_go(np.asarray(rewards, dtype=np.float64), gamma) for rewards in rewards_G]
    advantages_G = [np.zeros_like(returns) for returns in returns_G]
    for k in range(max(len(returns) for returns in returns_G)):
        there = [i for i, returns in enumerate(returns_G) if len(returns) > k]
        if len(there) > 1:
            values = grpo([returns_G[i][k] for i in there], normalize_std=normalize_std)
            for i, value in zip(there, values, strict=True):
                advantages_G[i][k] = value
    return advantages_G


def agent_turn(rewards_NK: Sequence[npt.ArrayLike], *, normalize_std: bool = True) -> list[F64]:
    """A_nk = (r_nk - mean_n) / (std_n + 1e-4), as in `grpo`, over the K candidates of each turn n of a seat, which were
    all sampled from the same state; 0 where a turn has one candidate.

    `rewards_NK` holds [K] per turn: r = w * team + (1 - w) * own reward of that turn alone, see
    `shared.spec.tree_sampling.turn_rewards`.
    Source: AT-GRPO, arXiv 2510.11062: groups per agent and turn, with tree sampling, and r = alpha * team + own. With
    w = alpha / (1 + alpha) that is the same reward times 1 + alpha, a factor that the division takes out.
    """
    rewards = [np.asarray(rewards_K, dtype=np.float64) for rewards_K in rewards_NK]
    return [grpo(r_K, normalize_std=normalize_std) if len(r_K) > 1 else np.zeros_like(r_K) for r_K in rewards]


def gae(rewards_T: F64, values_T: F64, *, gamma: float, lam: float, end_value: float = 0.0) -> tuple[F64, F64]:
    """A_t = sum_{l >= 0} (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t,  V after the end = end_value:
    0 after a termination, the value of the state that was left after a truncation (arXiv 1712.00378).

    Returns (advantages [T], returns [T]), returns_t = A_t + V_t being what the critic learns.
    Source: GAE, arXiv 1506.02438, equation 16.
    """
    following = np.append(values_T[1:], end_value)
    advantages = returns_to_go(rewards_T + gamma * following - values_T, gamma * lam)
    return advantages, advantages + values_T


def whiten(advantages_S: Sequence[F64]) -> list[F64]:
    """(A - mean) / (std + 1e-8) over all tokens of the batch, as usual for PPO (arXiv 2006.05990, choice C67)."""
    return reinforce_pp(advantages_S)


def returns_to_go(rewards_T: F64, gamma: float) -> F64:
    """R_t = sum_{i >= t} gamma^(i-t) r_i, [T] -> [T]. Source: Sutton and Barto (2018), equation 3.8."""
    returns, ahead = np.zeros(len(rewards_T)), 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        ahead = rewards_T[t] + gamma * ahead
        returns[t] = ahead
    return returns


def overlong_penalty(tokens: npt.ArrayLike, *, length: int, buffer: int) -> F64:
    """0 up to length - buffer tokens, then down linearly to -1 at `length`, and -1 beyond.

    Source: DAPO, arXiv 2503.14476, equation 13 (soft overlong punishment; length 20480, buffer 4096 there).
    """
    over = np.asarray(tokens, dtype=np.float64) - (length - buffer)
    penalty: F64 = -np.clip(over / buffer, 0.0, 1.0)
    return penalty


def distillation(behaviour_T: F64, teacher_T: F64) -> F64:
    """A_t = log q(y_t) - log mu(y_t) for each token y_t that mu sampled, q being the teacher; all [T].

    Its mean over mu is -KL(mu || q) at the position, and where the policy pi is still mu the policy gradient of it is
    the gradient of -KL(pi || q) there; the loss's ratio pi/mu corrects for the distance of the two. A token answers for
    itself alone and not for those after it (discount 0).
    Source: reverse KL on the student's own samples: MiniLLM, arXiv 2306.08543, section 2.1; on-policy GKD, arXiv
    2306.13649, section 3; as an advantage per token, without the sum over later ones: Thinking Machines Lab,
    "On-Policy Distillation", 2025.
    """
    return teacher_T - behaviour_T


def kl_estimate(behaviour_T: F64, reference_T: F64, estimator: str) -> F64:
    """k1, k2 or k3 of KL(mu || reference) per token [T], for the reward; `losses.KL` holds the same for the loss.

    With d = log mu - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, where d counts as at least -20, as
    there. Source: see `losses.k3`.
    """
    d = behaviour_T - reference_T
    bounded = np.maximum(d, -MAX_LOG_RATIO)
    estimates: dict[str, F64] = {"k1": d, "k2": d * d / 2.0, "k3": np.expm1(-bounded) + bounded}
    return estimates[estimator]


def _group(rewards_G: npt.ArrayLike) -> F64:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError("a group baseline needs at least two trajectories")
    return rewards
