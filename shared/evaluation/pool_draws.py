"""Draws the opponent of a match, and decides which checkpoints a pool of opponents keeps. Pure functions.

Prioritised fictitious self-play (PFSP) draws opponent B with probability proportional to f(P[A beats B]) (AlphaStar:
Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning", Nature 575). The
job's seed and the number of the match alone decide a draw, so a match that is played again meets the same opponent.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from opentinker.shared.spec.matches.pools import PoolRule

Rule = PoolRule
UNKNOWN = 0.5
"""Win rate against an opponent without games."""


def win_rate(wins: float, draws: float, losses: float) -> float:
    """Return the share of wins, draws counted half, after one more game that was drawn.

    The added draw keeps it strictly between 0 and 1: no opponent is avoided for good because the first games were won.
    """
    if min(wins, draws, losses) < 0:
        raise ValueError(f"numbers of games must not be negative: {wins}, {draws}, {losses}")
    return (wins + 0.5 * draws + 0.5) / (wins + draws + losses + 1)


def opponent_weights(rule: Rule, win_rates: Sequence[float], power: float = 2.0) -> list[float]:
    """Return the probability of each opponent, from the learner's win rate against it.

    `uniform`: all alike. `pfsp_hard`: proportional to (1 - x)^power, those that it loses to. `pfsp_even`: proportional
    to x (1 - x), those that are as strong as it is. If all weights are 0, all alike. Raise ValueError for a win rate
    outside 0..1, a power that is not positive, and an unknown rule.
    """
    if odd := [x for x in win_rates if not 0.0 <= x <= 1.0]:
        raise ValueError(f"a win rate must be between 0 and 1, not {odd[0]}")
    if not (math.isfinite(power) and power > 0.0):
        raise ValueError(f"power must be above 0, not {power}")
    match rule:
        case "uniform":
            weights = [1.0 for _ in win_rates]
        case "pfsp_hard":
            weights = [(1.0 - x) ** power for x in win_rates]
        case "pfsp_even":
            weights = [x * (1.0 - x) for x in win_rates]
        case _:
            raise ValueError(f"no such rule: {rule!r}; there are: {', '.join(get_args(Rule))}")
    total = math.fsum(weights)
    return [weight / total for weight in weights] if total > 0.0 else [1.0 / len(weights) for _ in weights]


def choose_opponent(
    members: Sequence[str],
    win_rates: Mapping[str, float],
    *,
    rule: Rule,
    latest: float,
    seed: int,
    match: int,
    pool: str = "",
    power: float = 2.0,
) -> str:
    """Return the member of a pool that match number `match` is played against.

    `members`: oldest first, the last one being the latest. With probability `latest` it is that one, otherwise one of
    all members by `opponent_weights` of `win_rates` (UNKNOWN where missing). `pool`: its name; pools of one match draw
    independently. Raise ValueError for an empty pool and a share outside 0..1.
    """
    if not members:
        raise ValueError(f"pool {pool!r} has no members")
    if not 0.0 <= latest <= 1.0:
        raise ValueError(f"latest must be between 0 and 1, not {latest}")
    if draw_uniform(seed, match, f"{pool}/latest") < latest:
        return members[-1]
    weights = opponent_weights(rule, [win_rates.get(member, UNKNOWN) for member in members], power)
    bounds = list(accumulate(weights))
    place = bisect(bounds, draw_uniform(seed, match, f"{pool}/member") * bounds[-1], hi=len(members) - 1)
    return members[place]


def draw_uniform(seed: int, match: int, purpose: str) -> float:
    """Return a number of 53 bits in [0, 1), which seed, match and purpose decide (BLAKE2b)."""
    digest = hashlib.blake2b(f"{seed}/{match}/{purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


@dataclass(frozen=True)
class GrowthRule:
    """The rule by which a pool takes in checkpoints, and how many it keeps."""

    every: int
    """Steps between two candidates."""
    keep: int
    """Most members; the oldest leave first."""
    add_if: float | None = None
    """Least win rate of a candidate against the pool. None: every candidate is added."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"every and keep must be at least 1, not {self.every} and {self.keep}")
        if self.add_if is not None and not 0.0 <= self.add_if <= 1.0:
            raise ValueError(f"add_if must be between 0 and 1, not {self.add_if}")


@dataclass(frozen=True)
class Growth:
    """Outcome of `grow_pool`."""

    members: tuple[str, ...]
    """Oldest first."""
    removed: tuple[str, ...] = ()


def grow_pool(members: Sequence[str], rule: GrowthRule, *, candidate: str, step: int, rate: float | None) -> Growth:
    """Return the pool after `step` optimizer steps, whose checkpoint is `candidate`.

    It is added if `step` is a multiple of `every` and its win rate against the members, `rate`, is at least `add_if`;
    without games (None) it is not. An empty pool takes any candidate that is due. A member is not added twice, so a
    step that is repeated after a restart changes nothing.
    """
    due = step % rule.every == 0 and candidate not in members
    good = not members or rule.add_if is None or (rate is not None and rate >= rule.add_if)
    if not (due and good):
        return Growth(tuple(members))
    grown = (*members, candidate)
    return Growth(grown[-rule.keep :], grown[: -rule.keep])
