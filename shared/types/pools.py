"""Opponent pools: past versions of a policy that play seats of its job. Written by the policy's trainer.

{data_dir}/jobs/{job}/members/1.20/manifest.json + weights    a member, jobs/{job}~{policy}/ of a policy
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from opentinker.shared.types.core import WeightVersion, part_id

MEMBERS = "members"
Outcomes = tuple[int, int, int]
"""Games won, drawn and lost by the policy."""
WeightedOutcomes = tuple[float, float, float]
NO_GAMES: Outcomes = (0, 0, 0)


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the policy, and how the policy has done against it in matches that it has trained on, or discarded
    because their rewards were equal."""

    version: WeightVersion
    outcomes: Outcomes = NO_GAMES
    """Since it entered."""
    recent: WeightedOutcomes = NO_GAMES
    """The same, halved at each candidate: what PFSP and `add_if` go by."""


Members = dict[str, list[PoolMember]]
"""By pool, oldest member first."""


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of a pool from which the scheduler draws members, and which it shows: trainer -> scheduler, through Redis,
    where it stays after the job."""

    members: list[str]
    """Versions, oldest first."""
    win_rates: dict[str, float]
    """The policy's, by member."""
    outcomes: dict[str, Outcomes] = {}
    """By member, see `PoolMember`."""
    recent: dict[str, WeightedOutcomes] = {}
    ratings: dict[str, tuple[float, float]] = {}
    """Rating and its standard error by member, see `JobRatings.rate_members`."""


PoolRecords = dict[str, PoolRecord]
"""By pool."""


def members_of(data_dir: Path, job: str, policy: str) -> Path:
    """Return the directory of the members of all pools of a policy."""
    return data_dir / "jobs" / part_id(job, policy) / MEMBERS
