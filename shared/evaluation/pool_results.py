"""Results of a policy against the members of an opponent pool: what the API, the page and the command line show."""

from __future__ import annotations

from opentinker.shared.api_types import PoolMember
from opentinker.shared.evaluation.pool_draws import win_rate
from opentinker.shared.evaluation.ratings import fit_ratings
from opentinker.shared.types.pools import NO_GAMES, PoolRecord

POLICY = "the policy"
"""Name in the fit; a member is named by its version."""
FEWEST_GAMES = 1.0
"""Recent games of a member that has a win rate and a rating: halved again and again, their number never reaches 0."""


def member_results(record: PoolRecord) -> list[PoolMember]:
    """Return the members, oldest first.

    Win rate and rating are of recent games, whose numbers are halved at each candidate: the policy of earlier steps was
    another one. Ratings are relative to the policy, which has 0. Members with less than one recent game have neither.
    """
    recent = {member: record.recent[member] for member in record.members if member in record.recent}
    played = {member: counts for member, counts in recent.items() if sum(counts) >= FEWEST_GAMES}
    rated = fit_ratings({(POLICY, member): counts for member, counts in played.items()}, {POLICY: 0.0}).players
    found = []
    for member in record.members:
        won, drawn, lost = record.outcomes.get(member, NO_GAMES)
        rating = rated.get(member)
        found.append(
            PoolMember(
                version=member,
                won=won,
                drawn=drawn,
                lost=lost,
                win_rate=win_rate(*played[member]) if member in played else None,
                rating=None if rating is None else rating.elo,
                rating_error=None if rating is None else rating.error,
            )
        )
    return found
