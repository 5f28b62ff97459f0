"""`SeatPlay`, the unit of reward: one seat in one sample of a group, across all streams that it acted in. Pure numpy.

Its tokens are in its streams; its turns have an order of play across them. Rewards and returns belong to the whole, in
that order; advantages are distributed back to the streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.shared.spec import AlgorithmSpec
from opentinker.shared.spec.matches.seat_lists import list_of
from opentinker.shared.types.trajectories import Group, Trajectory, Turn

TeamRewards = dict[tuple[int, str], tuple[str, float]]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SeatPlay:
    """N: sampled tokens of all its streams; K: its turns, in order of play."""

    environment: str
    seat: str
    places: list[int]
    """Indices of its streams among the trajectories of the batch."""
    streams: list[Trajectory]
    team: tuple[str, float] | None = None
    """Name of its team in this sample, and the team's mean reward."""
    is_played: bool = True
    """False in a tree for the candidates that were not chosen."""

    @property
    def reward(self) -> float:
        return math.fsum(stream.reward for stream in self.streams)

    @property
    def truncated(self) -> bool:
        return any(stream.truncated for stream in self.streams)

    @property
    def last(self) -> int:
        """Index of the stream that it acted in last."""
        numbers = [stream.turns[-1].number if stream.turns else -1 for stream in self.streams]
        return self.places[int(np.argmax(numbers))]

    @cached_property
    def counts(self) -> list[int]:
        """Sampled tokens of each stream."""
        return [int(np.count_nonzero(stream.mask)) for stream in self.streams]

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @cached_property
    def _ranks(self) -> list[I64]:
        """Per stream, the position of each turn among the play's turns."""
        numbers = [turn.number for stream in self.streams for turn in stream.turns]
        ranks = np.empty(len(numbers), dtype=np.int64)
        ranks[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
        return np.split(ranks, np.cumsum([len(stream.turns) for stream in self.streams])[:-1])

    @cached_property
    def _turn_of(self) -> I64:
        """[N] the turn of each token, stream after stream."""
        found = []
        for stream, ranks in zip(self.streams, self._ranks, strict=True):
            own = np.searchsorted([turn.start for turn in stream.turns], np.flatnonzero(stream.mask), side="right") - 1
            found.append(ranks[own] if len(ranks) else own)
        return np.concatenate(found)

    @cached_property
    def _order(self) -> I64:
        return np.argsort(self._turn_of, kind="stable")

    @property
    def turn_N(self) -> I64:
        """The turn of each token, in order of play."""
        return self._turn_of[self._order]

    @property
    def turns(self) -> int:
        """K."""
        return sum(len(stream.turns) for stream in self.streams)

    @cached_property
    def turns_K(self) -> list[Turn]:
        """Return its turns, in order of play."""
        turns = [turn for stream in self.streams for turn in stream.turns]
        order = np.argsort([rank for ranks in self._ranks for rank in ranks])
        return [turns[place] for place in order]

    @property
    def turn_rewards_K(self) -> F64:
        return np.array([turn.reward for turn in self.turns_K], dtype=np.float64)

    def spread(self, values_K: F64) -> F64:
        """One value per turn -> one per token."""
        found: F64 = values_K[self.turn_N] if len(values_K) else np.zeros(0)
        return found

    def join(self, values_S: Sequence[F64]) -> F64:
        """Select from [T] per trajectory of the batch this play's sampled tokens, in order of play."""
        found: F64 = np.concatenate([values_S[place] for place in self.places])[self._order]
        return found

    def part(self, values_N: F64) -> list[F64]:
        """Split values in order of play into one array per stream."""
        values = np.empty(len(values_N))
        values[self._order] = values_N
        return np.split(values, np.cumsum(self.counts)[:-1])


def credit_groups(groups: Sequence[Group], algorithm: AlgorithmSpec | None = None) -> list[list[SeatPlay]]:
    """Return the plays of a batch, grouped for comparison: the same seat in all samples of a group; of seats that
    `episode_peers` lists together, these seats in one sample.

    Source of the latter: hierarchical GRPO of prime-rl (github.com/PrimeIntellect-ai/prime-rl): the attempts at one
    proposed problem are compared with each other, the proposals with each other; a play without peers gets 0.
    """
    found: list[list[SeatPlay]] = []
    first = 0
    teams = {} if algorithm is None else algorithm.team or {}
    peers = {} if algorithm is None else algorithm.episode_peers or {}
    for group in groups:
        paid = team_rewards(group.totals, teams) if teams else {}
        compared: dict[tuple[str, int | None], list[SeatPlay]] = {}
        for seat, samples in group.seats.items():
            together = list_of(peers, seat)
            for places in samples:
                play = _play(group, seat, places, first, paid)
                key = (seat, None) if together is None else (together, play.streams[0].index)
                compared.setdefault(key, []).append(play)
        found += compared.values()
        first += len(group.trajectories)
    return found


def team_rewards(totals: Mapping[int, Mapping[str, float]], teams: Mapping[str, list[str]]) -> TeamRewards:
    """Return, by sample and seat, the name of its team and the mean reward of the team's seats that acted. `totals`:
    by sample, the reward of each seat."""
    found: TeamRewards = {}
    for sample, rewards in totals.items():
        members: dict[str, list[str]] = {}
        for seat in rewards:
            if (team := list_of(teams, seat)) is not None:
                members.setdefault(team, []).append(seat)
        for team, seats in members.items():
            mean = math.fsum(rewards[seat] for seat in seats) / len(seats)
            found |= {(sample, seat): (team, mean) for seat in seats}
    return found


def _play(group: Group, seat: str, places: list[int], first: int, paid: TeamRewards) -> SeatPlay:
    streams = [group.trajectories[place] for place in places]
    team = paid.get((streams[0].index, seat))
    played = group.is_played(streams[0].index)
    return SeatPlay(group.environment, seat, [first + place for place in places], streams, team, played)


def seat_plays(groups: Sequence[Group]) -> list[SeatPlay]:
    return [play for peers in credit_groups(groups) for play in peers]
