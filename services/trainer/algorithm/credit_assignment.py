"""Credit assignment: the groups of a batch -> one advantage per sampled token. Pure numpy.

A reward belongs to a `SeatPlay`, one seat in one sample, whose tokens may be in several trajectories.

rewards --overlong penalty--> --KL in the reward--> --estimator of the spec--> --teacher--> advantages
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.seats import SeatPlay, credit_groups
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.spec.matches.seat_lists import list_of
from opentinker.shared.spec.tree_sampling import turn_rewards
from opentinker.shared.types.core import F32
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.manifest import SeatBaselines
from opentinker.shared.types.match_results import alike
from opentinker.shared.types.trajectories import Group, Trajectory

GROUPWISE: dict[str, Callable[..., F64]] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "maxrl": advantages.maxrl,
}


@dataclass
class Credit:
    """Per trajectory of the batch, in order, [T] over its sampled tokens."""

    advantages_S: list[F64]
    returns_S: list[F64] | None
    """Targets of the critic; None unless one is trained."""
    metrics: dict[str, float]
    baselines: SeatBaselines
    """Running baselines after this batch; empty unless the estimator has them."""


class Values(NamedTuple):
    """A critic's values for the trajectories of a batch."""

    before_S: Sequence[F64]
    """[T] per trajectory: before its sampled tokens."""
    end_S: Sequence[float] | F64
    """Values of the end states of truncated trajectories."""


def assign(
    groups: Sequence[Group],
    algorithm: AlgorithmSpec,
    values: Values | None = None,
    baselines: SeatBaselines | None = None,
) -> Credit:
    """Assign advantages to a whole batch. `values`: for gae, those of a trained critic; without it, those that came
    with the trajectories. `baselines`: for rae, the running ones before the batch.

    Raises JobFailed if rewards, reference logprobs or values do not fit the algorithm.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    peers = credit_groups(groups, algorithm)
    plays = [play for group in peers for play in group]
    _require_listed_seats(groups, algorithm)
    metrics = _team_metrics(plays)
    penalty_P = np.zeros(len(plays))
    if algorithm.overlong_shaping:
        assert algorithm.overlong_length and algorithm.overlong_buffer
        penalty_P = advantages.overlong_penalty(
            [play.tokens for play in plays], length=algorithm.overlong_length, buffer=algorithm.overlong_buffer
        )
        metrics["reward/overlong"] = float(penalty_P.mean())
    costs_S = [np.zeros(np.count_nonzero(t.mask)) for t in trajectories]
    if algorithm.kl_in == "reward":
        kl_S = [_kl(t, algorithm.kl_estimator or "k1") for t in trajectories]
        costs_S = [algorithm.kl_coef * kl for kl in kl_S]
        metrics["reward/kl"] = float(np.concatenate(kl_S).mean())
    frozen = None
    if algorithm.advantage == "gae" and values is None:
        before_S = [_sampled(t, t.values, "values", "advantage = 'gae'") for t in trajectories]
        values = frozen = Values(before_S, [t.end_value for t in trajectories])
    claims = [
        Claim(play, float(penalty), play.join(costs_S), algorithm.team_weight or 0.0)
        for play, penalty in zip(plays, penalty_P, strict=True)
    ]
    after: SeatBaselines = {}
    try:
        if algorithm.advantage == "rae":
            (advantages_P, after, said), returns_P = _rae(claims, algorithm, baselines or {}), None
            metrics |= said
        elif algorithm.advantage == "agent_turn":
            (advantages_P, said), returns_P = credit_candidates(peers, algorithm), None
            metrics |= said
        else:
            advantages_P, returns_P = _estimate(claims, [len(group) for group in peers], algorithm, values)
    except ValueError as error:
        raise JobFailed(f"advantage = {algorithm.advantage!r}: {error}") from error
    advantages_S = _by_trajectory(plays, advantages_P)
    returns_S = None if returns_P is None else _by_trajectory(plays, returns_P)
    if frozen is not None and returns_S is not None:
        values_N, returns_N = np.concatenate(frozen.before_S), np.concatenate(returns_S)
        metrics |= {"value/mean": float(values_N.mean()), **explained_variance("value", values_N, returns_N)}
        returns_S = None
    if algorithm.distill_coef:
        advice_S, said = _teacher_advantages(trajectories)
        advantages_S = [a + algorithm.distill_coef * advice for a, advice in zip(advantages_S, advice_S, strict=True)]
        metrics |= said
    return Credit(advantages_S, returns_S, metrics, after)


@dataclass(frozen=True)
class Claim:
    """Reward, penalty and costs of a play; arrays are in its order of play."""

    play: SeatPlay
    penalty: float
    """Penalty for length, charged to the last turn."""
    costs_N: F64
    """The KL cost, per token."""
    team_weight: float
    """Share of the team's mean reward in its own, if it is in a team: r = w * team + (1 - w) * own."""

    @property
    def own_share(self) -> float:
        return 1.0 if self.play.team is None else 1.0 - self.team_weight

    @property
    def team_part(self) -> float:
        return 0.0 if self.play.team is None else self.team_weight * self.play.team[1]

    @property
    def reward(self) -> float:
        return self.own_share * self.play.reward + self.team_part + self.penalty

    @property
    def total(self) -> float:
        """The reward less the costs of all tokens."""
        return float(self.reward - self.costs_N.sum())

    def turn_rewards_K(self, *, less_costs: bool) -> F64:
        """The team's part is an outcome: it is paid at the last turn."""
        rewards = self.own_share * self.play.turn_rewards_K
        if len(rewards):
            rewards[-1] += self.team_part + self.penalty
            if less_costs:
                np.subtract.at(rewards, self.play.turn_N, self.costs_N)
        return rewards


def _require_listed_seats(groups: Sequence[Group], algorithm: AlgorithmSpec) -> None:
    """Raise JobFailed if a setting lists seats and none of them is in the game.

    With several policies, this one's seats need not be listed. Submission has checked this already, unless only the
    environment's server knows its seats.
    """
    for field, lists in (("team", algorithm.team), ("episode_peers", algorithm.episode_peers)):
        seats = {seat for group in groups for rewards in group.totals.values() for seat in rewards} if lists else set()
        if lists and not any(list_of(lists, seat) for seat in seats):
            names = ", ".join(map(repr, sorted(seats)))
            raise JobFailed(f"algorithm.{field} names no seat of this environment; its seats are: {names}")


def _team_metrics(plays: list[SeatPlay]) -> dict[str, float]:
    """Return reward/team/NAME: mean reward of the team over the samples and its seats."""
    rewards: dict[str, list[float]] = {}
    for team, reward in (play.team for play in plays if play.team is not None and play.is_played):
        rewards.setdefault(team, []).append(reward)
    return {f"reward/team/{team}": math.fsum(own) / len(own) for team, own in sorted(rewards.items())}


def _estimate(
    claims: list[Claim], sizes: list[int], algorithm: AlgorithmSpec, values: Values | None
) -> tuple[list[F64], list[F64] | None]:
    """Return advantages per play, [N] in order of play, and returns for a critic. `sizes`: numbers of consecutive
    plays that are compared with each other; a single play gets 0 where a group is the baseline. Normalisation over
    the batch is done seat by seat: seats may have opposite rewards."""
    name, options = algorithm.advantage, algorithm.options("advantage")
    options.pop("episode_peers", None)  # it made the groups
    if name == "none":
        return [np.zeros_like(claim.costs_N) for claim in claims], None
    if name == "reinforce_pp":
        returns_P = [claim.reward - advantages.returns_to_go(claim.costs_N, 1.0) for claim in claims]
        return _seat_by_seat(claims, returns_P, advantages.reinforce_pp), None
    if name == "gae":
        assert values is not None
        found = [_gae(claim, values, options["gamma"], options["lam"]) for claim in claims]
        return _seat_by_seat(claims, [a for a, _ in found], advantages.whiten), [returns for _, returns in found]
    values_P = [np.zeros_like(claim.costs_N) for claim in claims]
    ends = np.cumsum(sizes)
    members_B = [range(end - size, end) for size, end in zip(sizes, ends, strict=True) if size > 1]
    if name == "per_turn":
        for members in members_B:
            turns_G = [claims[i].turn_rewards_K(less_costs=True) for i in members]
            values_G = advantages.per_turn(turns_G, gamma=options["gamma"], normalize_std=options["normalize_std"])
            for i, values_K in zip(members, values_G, strict=True):
                values_P[i] = claims[i].play.spread(values_K)
        return values_P, None
    totals_P = np.array([claim.total for claim in claims])
    if name == "reinforce_pp_baseline":
        for seat in sorted({claim.play.seat for claim in claims}):
            own_B = [members for members in members_B if claims[members[0]].play.seat == seat]
            counts_B = [[claims[i].play.tokens for i in members] for members in own_B]
            found_B = advantages.reinforce_pp_baseline([totals_P[list(m)] for m in own_B], counts_B) if own_B else []
            for members, found_G in zip(own_B, found_B, strict=True):
                for i, value in zip(members, found_G, strict=True):
                    values_P[i] = np.full(claims[i].play.tokens, value)
        return values_P, None
    over_turns = options.pop("baseline_over", "episodes") == "turns"
    for members in members_B:
        counted = {"turns_G": [claims[i].play.turns for i in members]} if over_turns else {}
        scores_G = GROUPWISE[str(name)](totals_P[list(members)], **options, **counted)
        for i, value in zip(members, scores_G, strict=True):
            values_P[i] = np.full(claims[i].play.tokens, value)
    return values_P, None


def _rae(
    claims: list[Claim], algorithm: AlgorithmSpec, baselines: SeatBaselines
) -> tuple[list[F64], SeatBaselines, dict[str, float]]:
    """Return advantages per play, the running baselines after the batch, and the metrics reward/baseline and, where
    there are several seats, reward/baseline/SEAT: means of what the rewards were compared with."""
    after = {environment: dict(of_seats) for environment, of_seats in baselines.items()}
    own: dict[tuple[str, str], list[int]] = {}
    for i, claim in enumerate(claims):
        own.setdefault((claim.play.environment, claim.play.seat), []).append(i)
    scores_P, totals_P = np.empty(len(claims)), np.array([claim.total for claim in claims])
    for (environment, seat), places in own.items():
        before = after.setdefault(environment, {}).get(seat, 0.0)
        scores_P[places], after[environment][seat] = advantages.rae(
            totals_P[places], before, decay=algorithm.options("advantage")["baseline_decay"]
        )
    compared_P = totals_P - scores_P
    metrics = {"reward/baseline": float(compared_P.mean())}
    if len(seats := sorted({seat for _, seat in own})) > 1:
        for seat in seats:
            places = [i for i, claim in enumerate(claims) if claim.play.seat == seat]
            metrics[f"reward/baseline/{seat}"] = float(compared_P[places].mean())
    values_P = [np.full(claim.play.tokens, score) for claim, score in zip(claims, scores_P, strict=True)]
    return values_P, after, metrics


def _gae(claim: Claim, values: Values, gamma: float, lam: float) -> tuple[F64, F64]:
    """A turn's reward is placed on its last token, the penalty on the last token of all. The last token of a stream is
    followed by the first of the stream that the seat acts in next; the last of all by the end or, in a truncated
    episode, by the end state of the seat's last stream."""
    play, rewards = claim.play, -claim.costs_N
    for k, reward in enumerate(claim.turn_rewards_K(less_costs=False)):
        places = np.flatnonzero(play.turn_N == k)
        if len(places):
            rewards[places[-1]] += reward
    values_N = np.asarray(play.join(values.before_S), dtype=np.float64)
    end = float(values.end_S[play.last]) if play.truncated else 0.0
    return advantages.gae(rewards, values_N, gamma=gamma, lam=lam, end_value=end)


def _seat_by_seat(
    claims: list[Claim], values_P: list[F64], normalise: Callable[[Sequence[F64]], list[F64]]
) -> list[F64]:
    found = list(values_P)
    for seat in {claim.play.seat for claim in claims}:
        own = [i for i, claim in enumerate(claims) if claim.play.seat == seat]
        for i, values in zip(own, normalise([values_P[i] for i in own]), strict=True):
            found[i] = values
    return found


def _by_trajectory(plays: list[SeatPlay], values_P: list[F64]) -> list[F64]:
    found = {
        place: values
        for play, values_N in zip(plays, values_P, strict=True)
        for place, values in zip(play.places, play.part(values_N), strict=True)
    }
    return [found[place] for place in range(len(found))]


def _teacher_advantages(trajectories: list[Trajectory]) -> tuple[list[F64], dict[str, float]]:
    """Return distillation advantages of each sampled token, and the metrics teacher/kl and teacher/k3 (estimates of
    KL(mu || teacher), k1 and k3), teacher/logprob."""
    behaviour_S = [_sampled(t, t.logprobs) for t in trajectories]
    teacher_S = [_sampled(t, t.teacher_logprobs, "teacher logprobs", "distill_coef > 0") for t in trajectories]
    behaviour, teachers = np.concatenate(behaviour_S), np.concatenate(teacher_S)
    metrics = {
        "teacher/kl": float(advantages.kl_estimate(behaviour, teachers, "k1").mean()),
        "teacher/k3": float(advantages.kl_estimate(behaviour, teachers, "k3").mean()),
        "teacher/logprob": float(teachers.mean()),
    }
    return [advantages.distillation(b, t) for b, t in zip(behaviour_S, teacher_S, strict=True)], metrics


def explained_variance(prefix: str, values: F64, returns: F64) -> dict[str, float]:
    """Return the metric PREFIX/explained_variance = 1 - Var(R - V) / Var(R): 1 for perfect values, 0 for ones that know
    nothing; absent if all returns are equal."""
    spread = float(returns.var())
    return {f"{prefix}/explained_variance": 1.0 - float((returns - values).var()) / spread} if spread > 0 else {}


def _kl(trajectory: Trajectory, estimator: str) -> F64:
    reference = _sampled(trajectory, trajectory.ref_logprobs, "reference logprobs", "kl_coef > 0")
    return advantages.kl_estimate(_sampled(trajectory, trajectory.logprobs), reference, estimator)


def _sampled(trajectory: Trajectory, values: F32 | None, what: str = "", setting: str = "") -> F64:
    """Return [T] of the sampled tokens alone. Raises JobFailed if there are no such values, which `setting` needs."""
    if values is None:
        raise JobFailed(f"{setting} but trajectory {trajectory.attempt} came without {what}")
    return np.asarray(values[trajectory.mask.astype(bool)], dtype=np.float64)


def credit_candidates(
    peers: Sequence[Sequence[SeatPlay]], algorithm: AlgorithmSpec
) -> tuple[list[F64], dict[str, float]]:
    """Compare the candidates of a turn of a tree, which were sampled from one state, with each other and with nothing
    else; those that cannot be trained are left out. Return advantages per play, [N] in order of play, and the metric
    reward/equal_turns: the share of turns whose candidates all had the same reward, so that nothing is learned from
    them.

    `peers`: per seat of a group, the plays whose turns of the same number are candidates of one turn. Raise
    ValueError if a group is no tree.
    """
    found: list[F64] = []
    turns = equal = 0
    for plays in peers:
        values_PK = [np.zeros(play.turns) for play in plays]
        candidates: dict[int, list[tuple[int, int]]] = {}
        for p, play in enumerate(plays):
            for k, turn in enumerate(play.turns_K):
                if not turn.untrainable:
                    candidates.setdefault(turn.number, []).append((p, k))
        for places in candidates.values():
            paid_K = [plays[p].turns_K[k].paid for p, k in places]
            if any(plays[p].seat not in paid for (p, _), paid in zip(places, paid_K, strict=True)):
                raise ValueError("a group is no tree: its turns do not say what each candidate was paid")
            rewards_K = turn_rewards(plays[0].seat, paid_K, algorithm)
            (values_K,) = advantages.agent_turn([rewards_K], **algorithm.options("advantage"))
            for (p, k), value in zip(places, values_K, strict=True):
                values_PK[p][k] = value
            turns += 1
            equal += alike(rewards_K)
        found += [play.spread(values_K) for play, values_K in zip(plays, values_PK, strict=True)]
    return found, {"reward/equal_turns": equal / max(1, turns)}
