"""Group -> how its row of the data set was played, for `shared/data/row_log.py`."""

from __future__ import annotations

import math

from opentinker.shared.data.row_log import RowPlays
from opentinker.shared.types.trajectories import Group


def plays_of(group: Group, solved_at: float) -> RowPlays | None:
    """Return the episodes of a group as one entry: the reward of each is the mean over the seats of the policy. None if
    the environment lists no rows, or the policy had no turn. Of a tree only the episode counts, not its candidates."""
    row = next((one.row for one in group.trajectories if one.row is not None), None)
    if row is None:
        return None
    rewards: dict[int, dict[str, float]] = {}
    for one in group.trajectories:
        if group.is_played(one.index):
            seats = rewards.setdefault(one.index, {})
            seats[one.seat] = seats.get(one.seat, 0.0) + one.reward
    means = [math.fsum(seats.values()) / len(seats) for seats in rewards.values()]
    solved = sum(mean >= solved_at for mean in means)
    return RowPlays(row=row, played=len(means), solved=solved, reward=math.fsum(means))
