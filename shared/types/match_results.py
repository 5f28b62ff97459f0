"""Results of the matches of a job's training, one line per step: the truth for ratings.

{data_dir}/jobs/{job}/matches.jsonl     jobs/{job}~{policy}/ of a policy; also of steps rolled back later

    {"epoch": 1, "step": 7, "time": 1764380000.0, "matches": [{"group": 12, "sample": 0, "version": "1.6",
     "rewards": {"even": 1.0, "odd": -1.0}, "opponents": {"b": {"outcome": 1.0, "version": "1.5"}}}, ...]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.pools import NO_GAMES, Outcomes

FILE = "matches.jsonl"
BOT = "bot:"
"""Begins the name of a scripted player, which may be called as a policy is."""
DRAWN = 0.5
Opposing = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Returns the seats of a policy's opponents in a match, with their players (BOT and the name of a scripted one), by who
plays the seats of models."""
ROUNDING = 1e-12
"""Rewards that are nearer to each other, absolutely or relatively, are equal."""


class IdleSeat(msgspec.Struct, frozen=True, kw_only=True):
    """A model's seat that had no turn in an episode, because the game was over before."""

    policy: str
    """Its player, see `Trajectory.policy`."""
    reward: float
    version: WeightVersion
    """With which it would have played."""


class Opponent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A player whom a policy has met in a match."""

    outcome: float
    """1 if the policy won, 0.5 if it drew, 0 if it lost."""
    version: str = ""
    """Its oldest weights. Empty: a scripted player."""


class MatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A match as a policy played it that trained on it, or discarded its group: all rewards were equal, or the policy
    had no turn."""

    group: int
    sample: int
    """With `group`, the number of the match in its job."""
    version: str
    """The oldest weights of the policy; without a turn, those that it would have played with."""
    rewards: dict[str, float]
    """By seat, of all seats that models play, also of those without a turn that were paid."""
    opponents: dict[str, Opponent]
    """By name, see `Trajectory.policy`; scripted players as BOT and their name."""


def count_outcomes(matches: Iterable[MatchResult]) -> dict[str, Outcomes]:
    """Return the games won, drawn and lost against each opponent."""
    found: dict[str, Outcomes] = {}
    for name, met in (pair for match in matches for pair in match.opponents.items()):
        won, drawn, lost = found.get(name, NO_GAMES)
        found[name] = won + (met.outcome > DRAWN), drawn + (met.outcome == DRAWN), lost + (met.outcome < DRAWN)
    return found


def alike(rewards: Sequence[float]) -> bool:
    """Return whether the rewards differ by no more than the rounding of sums: 0.1 + 0.2 is 0.3."""
    return math.isclose(min(rewards), max(rewards), rel_tol=ROUNDING, abs_tol=ROUNDING)


def match_of(
    policy: str,
    group: int,
    sample: int,
    acted: Iterable[tuple[str, str, WeightVersion]],
    idle: Mapping[str, IdleSeat],
    *,
    rewards: Mapping[str, float],
    bots: Mapping[str, float],
    opposing: Opposing | None = None,
) -> MatchResult | None:
    """Return the result of a policy; None if it has no seat. `acted`: player, seat and weights of each view of the
    match; `rewards`: of their seats; `idle`, `bots`: see `Trajectory`; `opposing`: which seats of
    others count; None: all."""
    rewards = {**rewards, **{seat: one.reward for seat, one in idle.items()}}
    played = [*acted, *((one.policy, seat, one.version) for seat, one in idle.items())]
    against = None if opposing is None else opposing({seat: player for player, seat, _ in played})
    seats: dict[str, set[str]] = {}
    versions: dict[str, list[WeightVersion]] = {}
    for player, seat, version in played:
        if player == policy or against is None or seat in against:
            seats.setdefault(player, set()).add(seat)
            versions.setdefault(player, []).append(version)
    if policy not in seats:
        return None
    means = {player: math.fsum(rewards[seat] for seat in own) / len(own) for player, own in seats.items()}
    mine = means.pop(policy)
    met = {
        name: Opponent(outcome=_outcome(mine, mean), version=str(min(versions[name]))) for name, mean in means.items()
    }
    scripted = {f"{BOT}{name}": Opponent(outcome=_outcome(mine, mean)) for name, mean in bots.items()}
    met |= {name: one for name, one in scripted.items() if against is None or name in against.values()}
    own = str(min(versions[policy]))
    return MatchResult(group=group, sample=sample, version=own, rewards=rewards, opponents=met)


def _outcome(mine: float, theirs: float) -> float:
    return DRAWN if alike([mine, theirs]) else float(mine > theirs)
