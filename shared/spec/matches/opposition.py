"""Finds a policy's opponents, in training and in evaluations: other policies and pools outside its team. Bots, frozen
checkpoints and models behind URLs are opponents only if there is no such policy or pool; otherwise their seats are
neutral, like a judge's. In a job of kind `eval`, checkpoints that stand for policies are named as opponents."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from opentinker.shared.spec.matches.seat_lists import is_pattern, list_of, play_themselves
from opentinker.shared.spec.matches.seats import SeatSpec, player_at, rotated
from opentinker.shared.types.match_results import BOT

if TYPE_CHECKING:
    from opentinker.shared.spec import JobSpec

Teams = Mapping[str, list[str]]
"""`algorithm.team` of a policy."""


def teams_of(spec: JobSpec) -> Teams:
    """Return the teams of a policy. `spec`: with its settings."""
    return (spec.evaluation.team if spec.kind == "eval" else spec.algorithm.team) or {}


def opposing(
    entries: Mapping[str, SeatSpec],
    seats: Collection[str],
    policy: str,
    teams: Teams,
    named: Collection[str] = (),
) -> dict[str, SeatSpec]:
    """Return the seats of a policy's opponents. `entries`: [seats]; `seats`: known seats of a match.
    Seats named in [seats] are added, and a pattern counts as a seat if its player has no other. `named`: entries whose
    players count as policies, see `evaluation.opponents`.

    A policy that plays several seats without a team plays against itself, and no fixed player is its opponent."""
    players = {seat: player_at(entries, seat) for seat in seats}
    known = list(players.values())
    players |= {seat: one for seat, one in entries.items() if not is_pattern(seat) or one not in known}
    own = [seat for seat, player in players.items() if (player.policy if player else "") == policy]
    mine = {list_of(teams, seat) for seat in own} - {None}
    others = {
        seat: one for seat, one in players.items() if one and seat not in own and list_of(teams, seat) not in mine
    }
    learners = [entries[entry] for entry in named]
    rivals = {
        seat: player
        for seat, player in others.items()
        if not player.is_fixed or any(player is learner for learner in learners)
    }
    return rivals or ({} if play_themselves(teams, own) else others)


def opposed(
    seats: Mapping[str, SeatSpec], policy: str, opponent: SeatSpec, place: int = 0, teams: Teams | None = None
) -> dict[str, SeatSpec]:
    """Return the players of an evaluation of a policy: the opponent takes the seats of its opponents or, if it has
    none, those of other policies and of pools, and without these every seat that it does not play. A policy that plays
    all of them keeps one, by `place`."""
    mine = [seat for seat, player in seats.items() if policy and player.policy == policy]
    against = opposing(seats, (), policy, teams or {})
    if len(mine) == len(seats):
        mine = [mine[place % len(mine)]]
    others = [seat for seat in seats if seat not in mine]
    changing = [seat for seat in others if not seats[seat].is_fixed]
    return {seat: opponent if seat in (against or changing or others) else player for seat, player in seats.items()}


class Opposition:
    """The opponents of a policy in matches of training."""

    def __init__(self, spec: JobSpec, policy: str) -> None:
        """`spec`: with the policy's settings."""
        entries, teams = spec.seats, teams_of(spec)
        is_turned = spec.match is not None and spec.match.rotate
        names, players = list(entries), list(entries.values())
        self._turns = [rotated(names, players, by) for by in range(len(names))] if is_turned else [entries]
        self._policies = spec.policies.keys()
        self._of = lru_cache(64)(lambda turn, seats: _named(opposing(self._turns[turn], seats, policy, teams)))

    def seats(self, played: Mapping[str, str]) -> Mapping[str, str]:
        """Return the opponents' seats in a match, with the name of the player, see `_named`. `played`: player by
        seat of a model, including seats without a turn."""
        known = {seat: name for seat, name in played.items() if name in self._policies and len(self._turns) > 1}
        turns = (
            turn
            for turn, entries in enumerate(self._turns)
            if all(entries[seat].policy == name for seat, name in known.items())
        )
        return self._of(next(turns, 0), frozenset(played))

    def names(self, seats: Collection[str]) -> set[str]:
        """Return possible opponents in a match with these seats of models, in any rotation."""
        return {name for turn in range(len(self._turns)) for name in self._of(turn, frozenset(seats)).values()}


def _named(seats: Mapping[str, SeatSpec]) -> dict[str, str]:
    """Return the names of players in results, see `MatchResult.opponents`; of a pool `POOL@`."""
    return {seat: player.player or f"{BOT}{player.bot}" for seat, player in seats.items()}
