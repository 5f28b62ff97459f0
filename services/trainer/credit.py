"""Which token gets how much: the groups of a batch -> one advantage per sampled token. Pure numpy.

rewards --overlong penalty--> --KL in the reward--> --estimator of the spec--> --what the teacher says--> advantages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from opentinker.services.trainer import advantages
from opentinker.services.trainer.advantages import F64
from opentinker.shared.errors import JobFailed
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.types import Group, Trajectory

GROUPWISE = {"grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo, "maxrl": advantages.maxrl}


@dataclass
class Credit:
    """Per trajectory of the batch, in order, [T] over its sampled tokens."""

    advantages_S: list[F64]
    returns_S: list[F64] | None
    """What the critic learns; None without one that is trained."""
    metrics: dict[str, float]


def assign(groups: Sequence[Group], algorithm: AlgorithmSpec, values_S: Sequence[F64] | None = None) -> Credit:
    """Advantages of a whole batch. `values_S`: for gae, the values per trajectory of a critic that is trained; without
    it those that came with the trajectories.

    Raises JobFailed where rewards, reference logprobs or values do not suit the algorithm.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    counts = [int(np.count_nonzero(t.mask)) for t in trajectories]
    metrics: dict[str, float] = {}
    outcomes = np.array([t.reward for t in trajectories])
    penalty = np.zeros(len(trajectories))
    if algorithm.overlong_shaping:
        assert algorithm.overlong_length and algorithm.overlong_buffer
        penalty = advantages.overlong_penalty(
            counts, length=algorithm.overlong_length, buffer=algorithm.overlong_buffer
        )
        metrics["reward/overlong"] = float(penalty.mean())
    costs_S = [np.zeros(count) for count in counts]
    if algorithm.kl_in == "reward":
        kl_S = [_kl(t, algorithm.kl_estimator or "k1") for t in trajectories]
        costs_S = [algorithm.kl_coef * kl for kl in kl_S]
        metrics["reward/kl"] = float(np.concatenate(kl_S).mean())
    frozen_S = [_value(t) for t in trajectories] if algorithm.advantage == "gae" and values_S is None else None
    try:
        advantages_S, returns_S = _estimate(
            groups, algorithm, outcomes + penalty, costs_S, penalty, values_S or frozen_S
        )
    except ValueError as error:
        raise JobFailed(f"advantage = {algorithm.advantage!r}: {error}") from error
    if frozen_S is not None and returns_S is not None:
        metrics |= _foresight(np.concatenate(frozen_S), np.concatenate(returns_S))
        returns_S = None
    if algorithm.distill_coef:
        advice_S, said = _teach(trajectories)
        advantages_S = [a + algorithm.distill_coef * advice for a, advice in zip(advantages_S, advice_S, strict=True)]
        metrics |= said
    return Credit(advantages_S, returns_S, metrics)


def _estimate(
    groups: Sequence[Group],
    algorithm: AlgorithmSpec,
    rewards: F64,
    costs_S: list[F64],
    penalty: F64,
    values_S: Sequence[F64] | None,
) -> tuple[list[F64], list[F64] | None]:
    """`rewards` per trajectory with the `penalty` in it; `costs_S` per token, the KL that is taken off."""
    name, options = algorithm.advantage, algorithm.options("advantage")
    trajectories = [t for group in groups for t in group.trajectories]
    counts = [len(costs) for costs in costs_S]
    if name == "none":
        return [np.zeros(count) for count in counts], None
    if name == "reinforce_pp":
        returns_S = [r - advantages.returns_to_go(costs, 1.0) for r, costs in zip(rewards, costs_S, strict=True)]
        return advantages.reinforce_pp(returns_S), None
    if name == "gae":
        assert values_S is not None
        return _gae(trajectories, penalty, costs_S, values_S, options["gamma"], options["lam"])
    sizes = np.cumsum([len(group.trajectories) for group in groups])[:-1]
    if name == "per_turn":
        turns_S = [_turn_rewards(t, p, costs) for t, p, costs in zip(trajectories, penalty, costs_S, strict=True)]
        found: list[F64] = []
        for members in np.split(np.arange(len(trajectories)), sizes):
            turns_G = [turns_S[i] for i in members]
            values_G = advantages.per_turn(turns_G, gamma=options["gamma"], normalize_std=options["normalize_std"])
            found += [_spread(trajectories[i], values) for i, values in zip(members, values_G, strict=True)]
        return found, None
    totals_B = np.split(rewards - np.array([costs.sum() for costs in costs_S]), sizes)
    if name == "reinforce_pp_baseline":
        counts_B = [part.tolist() for part in np.split(np.array(counts), sizes)]
        values_B = advantages.reinforce_pp_baseline(totals_B, counts_B)
    else:
        values_B = [GROUPWISE[str(name)](totals, **options) for totals in totals_B]
    return [np.full(n, a) for n, a in zip(counts, np.concatenate(values_B), strict=True)], None


def _gae(
    trajectories: list[Trajectory],
    penalty: F64,
    costs_S: list[F64],
    values_S: Sequence[F64],
    gamma: float,
    lam: float,
) -> tuple[list[F64], list[F64]]:
    """A turn's reward stands on the turn's last token, the penalty on the last token of all."""
    found = []
    for trajectory, extra, costs, values in zip(trajectories, penalty, costs_S, values_S, strict=True):
        rewards = -costs
        turn_T = _turn_of(trajectory)
        for k, reward in enumerate(_turn_rewards(trajectory, float(extra), np.zeros_like(costs))):
            places = np.flatnonzero(turn_T == k)
            if len(places):
                rewards[places[-1]] += reward
        found.append(advantages.gae(rewards, np.asarray(values, dtype=np.float64), gamma=gamma, lam=lam))
    return advantages.whiten([a for a, _ in found]), [returns for _, returns in found]


def _turn_of(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    """[T] the turn of each sampled token."""
    places = np.flatnonzero(trajectory.mask)
    return np.searchsorted([turn.start for turn in trajectory.turns], places, side="right") - 1


def _turn_rewards(trajectory: Trajectory, penalty: float, costs: F64) -> F64:
    """[K] reward of each turn, its tokens' KL taken off; the penalty falls on the last."""
    rewards = np.array([turn.reward for turn in trajectory.turns], dtype=np.float64)
    if len(rewards):
        rewards[-1] += penalty
        np.subtract.at(rewards, _turn_of(trajectory), costs)
    return rewards


def _spread(trajectory: Trajectory, values: F64) -> F64:
    """One value per turn -> one per sampled token."""
    return values[_turn_of(trajectory)] if len(values) else np.zeros(0)


def _teach(trajectories: list[Trajectory]) -> tuple[list[F64], dict[str, float]]:
    """What the teacher says of each sampled token; teacher/kl and teacher/k3 (estimates of KL(mu || teacher), k1 and
    k3), teacher/logprob."""
    behaviour_S, teacher_S = [], []
    for trajectory in trajectories:
        teacher = trajectory.teacher_logprobs
        if teacher is None:
            raise JobFailed(f"distill_coef > 0 but trajectory {trajectory.attempt} came without teacher logprobs")
        sampled = trajectory.mask.astype(bool)
        behaviour_S.append(trajectory.logprobs[sampled].astype(np.float64))
        teacher_S.append(teacher[sampled].astype(np.float64))
    behaviour, teachers = np.concatenate(behaviour_S), np.concatenate(teacher_S)
    metrics = {
        "teacher/kl": float(advantages.kl_estimate(behaviour, teachers, "k1").mean()),
        "teacher/k3": float(advantages.kl_estimate(behaviour, teachers, "k3").mean()),
        "teacher/logprob": float(teachers.mean()),
    }
    return [advantages.distillation(b, t) for b, t in zip(behaviour_S, teacher_S, strict=True)], metrics


def _value(trajectory: Trajectory) -> F64:
    values = trajectory.values
    if values is None:
        raise JobFailed(f"advantage = 'gae' but trajectory {trajectory.attempt} came without values")
    found: F64 = values[trajectory.mask.astype(bool)].astype(np.float64)
    return found


def _foresight(values: F64, returns: F64) -> dict[str, float]:
    """Of a frozen value model: value/mean and value/explained_variance = 1 - Var(R - V) / Var(R), absent if all returns
    are equal."""
    metrics, spread = {"value/mean": float(values.mean())}, float(returns.var())
    if spread > 0:
        metrics["value/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics


def _kl(trajectory: Trajectory, estimator: str) -> F64:
    reference = trajectory.ref_logprobs
    if reference is None:
        raise JobFailed(f"kl_coef > 0 but trajectory {trajectory.attempt} came without reference logprobs")
    sampled = trajectory.mask.astype(bool)
    return advantages.kl_estimate(
        trajectory.logprobs[sampled].astype(np.float64), reference[sampled].astype(np.float64), estimator
    )
