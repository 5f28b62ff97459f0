"""Credit in trees: the candidates of a turn, which were sampled from one state, are compared with each other and with
nothing else. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opentinker.services.trainer.algorithm import advantages
from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.services.trainer.algorithm.seats import SeatPlay
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.spec.tree_sampling import turn_rewards
from opentinker.shared.types.trajectories import alike


def credit_candidates(
    peers: Sequence[Sequence[SeatPlay]], algorithm: AlgorithmSpec
) -> tuple[list[F64], dict[str, float]]:
    """Return advantages per play, [N] in order of play, and the metric reward/equal_turns: the share of turns whose
    candidates all had the same reward, so that nothing is learned from them.

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
