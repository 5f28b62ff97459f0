"""Whom a policy plays against. Bots, frozen checkpoints and models behind URLs are opponents only where nobody else
can be: beside other policies or a pool, their seats may be neutral, such as a judge's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentinker.shared.spec.matches.seat_lists import are_team
from opentinker.shared.types.match_results import BOT, Opposes

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec, SeatSpec


def has_rivals(seats: Mapping[str, SeatSpec], policy: str) -> bool:
    """Return whether another policy or a pool plays a seat."""
    return any(not player.is_fixed and player.policy != policy for player in seats.values())


def opposition_of(spec: JobSpec, policy: str) -> Opposes:
    """Return who counts as an opponent of a policy in matches of training. `spec`: with the policy's settings.

    A policy that plays several seats, and not as a team, plays against itself: beside it no fixed player is one."""
    fixed = {player.player or f"{BOT}{player.bot}" for player in spec.seats.values() if player.is_fixed}
    rivals, team = has_rivals(spec.seats, policy), spec.algorithm.team or {}

    def opposes(player: str, own: set[str]) -> bool:
        return player not in fixed or not (rivals or (len(own) > 1 and not are_team(team, own)))

    return opposes
