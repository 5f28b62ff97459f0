"""Results of a policy against the members of an opponent pool: what the API, the page and the command line show."""

from __future__ import annotations

from opentinker.shared.api_types import PoolMember
from opentinker.shared.evaluation.pool_draws import win_rate
from opentinker.shared.types.pools import NO_GAMES, PoolRecord

FEWEST_GAMES = 1.0
"""Recent games of a member that has a win rate: halved again and again, their number never reaches 0."""


def member_results(record: PoolRecord) -> list[PoolMember]:
    """Return the members, oldest first.

    Win rates are of recent games, whose numbers are halved at each candidate: the policy of earlier steps was another
    one. Members with less than one recent game have none. Ratings are on the job's scale, from all its games.
    """
    recent = {member: record.recent[member] for member in record.members if member in record.recent}
    played = {member: counts for member, counts in recent.items() if sum(counts) >= FEWEST_GAMES}
    found = []
    for member in record.members:
        won, drawn, lost = record.outcomes.get(member, NO_GAMES)
        rating, error = record.ratings.get(member, (None, None))
        found.append(
            PoolMember(
                version=member,
                won=won,
                drawn=drawn,
                lost=lost,
                win_rate=win_rate(*played[member]) if member in played else None,
                rating=rating,
                rating_error=error,
            )
        )
    return found
