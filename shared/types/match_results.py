"""Results of the matches of a job's training, one line per step: the truth for ratings.

{data_dir}/jobs/{job}/matches.jsonl     jobs/{job}~{policy}/ of a policy; also of steps rolled back later

    {"epoch": 1, "step": 7, "time": 1764380000.0, "matches": [{"group": 12, "sample": 0, "version": "1.6",
     "rewards": {"even": 1.0, "odd": -1.0}, "opponents": {"b": {"outcome": 1.0, "version": "1.5"}}}, ...]}
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from opentinker.shared.types.pools import NO_GAMES, Outcomes

FILE = "matches.jsonl"
BOT = "bot:"
"""Begins the name of a scripted player, which may be called as a policy is."""
DRAWN = 0.5


class Opponent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A player whom a policy has met in a match."""

    outcome: float
    """1 if the policy won, 0.5 if it drew, 0 if it lost."""
    version: str = ""
    """Its oldest weights. Empty: a scripted player."""


class MatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A match as a policy played it that trained on it, or discarded it because all rewards of its group were equal."""

    group: int
    sample: int
    """With `group`, the number of the match in its job."""
    version: str
    """The oldest weights of the policy."""
    rewards: dict[str, float]
    """By seat, of all seats that models play."""
    opponents: dict[str, Opponent]
    """By name, see `Trajectory.policy`; scripted players as BOT and their name."""


def count_outcomes(matches: Iterable[MatchResult]) -> dict[str, Outcomes]:
    """Return the games won, drawn and lost against each opponent."""
    found: dict[str, Outcomes] = {}
    for name, met in (pair for match in matches for pair in match.opponents.items()):
        won, drawn, lost = found.get(name, NO_GAMES)
        found[name] = won + (met.outcome > DRAWN), drawn + (met.outcome == DRAWN), lost + (met.outcome < DRAWN)
    return found
