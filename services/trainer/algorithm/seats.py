"""Players, the units of reward: one seat of one sample of a group, across all streams that it acted in. Pure numpy.

A player's tokens are in its streams; its turns have an order of play across them. Rewards and returns belong to the
player, in that order; advantages are distributed back to the streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from opentinker.services.trainer.algorithm.advantages import F64
from opentinker.shared.types.trajectories import Group, Trajectory

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Player:
    """N: sampled tokens of all its streams; K: its turns, in order of play."""

    seat: str
    places: list[int]
    """Indices of its streams among the trajectories of the batch."""
    streams: list[Trajectory]

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
        """Per stream, the position of each turn among the player's turns."""
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
    def turn_rewards_K(self) -> F64:
        rewards = np.zeros(sum(len(stream.turns) for stream in self.streams))
        for stream, ranks in zip(self.streams, self._ranks, strict=True):
            rewards[ranks] = [turn.reward for turn in stream.turns]
        return rewards

    def join(self, values_S: Sequence[F64]) -> F64:
        """Select from [T] per trajectory of the batch this player's sampled tokens, in order of play."""
        found: F64 = np.concatenate([values_S[place] for place in self.places])[self._order]
        return found

    def part(self, values_N: F64) -> list[F64]:
        """Split values in order of play into one array per stream."""
        values = np.empty(len(values_N))
        values[self._order] = values_N
        return np.split(values, np.cumsum(self.counts)[:-1])


def credit_groups(groups: Sequence[Group]) -> list[list[Player]]:
    """Return the players of a batch, grouped for comparison: the same seat in all samples of a group."""
    found, first = [], 0
    for group in groups:
        for seat, samples in group.seats.items():
            found.append(
                [
                    Player(seat, [first + p for p in places], [group.trajectories[p] for p in places])
                    for places in samples
                ]
            )
        first += len(group.trajectories)
    return found


def players_of(groups: Sequence[Group]) -> list[Player]:
    return [player for peers in credit_groups(groups) for player in peers]
