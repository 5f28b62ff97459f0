"""Maps the seats of an episode to their players: policies of the job, frozen checkpoints, members of pools (see
`opponents.py`), and models behind URLs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from opentinker.services.rollout_worker.engines.base import Engine
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.url_player import UrlPlayer
from opentinker.shared.spec import JobSpec, SeatSpec
from opentinker.shared.spec.matches.opposition import Teams, opposed, opposing, teams_of
from opentinker.shared.spec.matches.pools import pool_player
from opentinker.shared.spec.matches.seat_lists import is_pattern
from opentinker.shared.spec.matches.seats import bots_of, player_at, rotated
from opentinker.shared.types.core import WeightVersion
from opentinker.shared.types.match_results import IdleSeat


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy with its tokenizer, in an engine that the caller has started."""

    name: str
    """Empty: the job has one policy. Of a frozen checkpoint: JOB@STEP. Of a member of a pool: POOL@EPOCH.STEP."""
    spec: JobSpec
    """With the policy's settings."""
    engine: Engine
    renderer: Renderer
    is_frozen: bool = False
    """Whether it plays without learning: no trainer sends its weights, and its trajectories are never trained on."""

    @property
    def context(self) -> int:
        """Tokens per stream."""
        own = self.spec.rollout.context_length
        return self.engine.context_length if own is None else min(own, self.engine.context_length)


Player = LoadedPolicy | UrlPlayer
"""Players of a seat other than bots. Only a policy of the job learns; all others are left out by name."""


def learner_of(player: Player) -> LoadedPolicy | None:
    """Return the player as the policy that learns; None of frozen checkpoints, members of pools and models behind
    URLs."""
    return player if isinstance(player, LoadedPolicy) and not player.is_frozen else None


class SeatMap:
    """`[seats]` of a job, with its policies loaded."""

    def __init__(self, spec: JobSpec, policies: Sequence[LoadedPolicy], urls: Sequence[UrlPlayer] = ()) -> None:
        """`policies`: those of the job before frozen checkpoints and pools."""
        self._seats: Mapping[str, SeatSpec] = spec.seats
        players: list[Player] = [*policies, *urls]
        self._players = {player.name: player for player in players}
        self._rotates = spec.match is not None and spec.match.rotate
        self._opponent: SeatSpec | None = None
        """In an evaluation, whom the policy is evaluated against."""
        self.first = policies[0]

    @classmethod
    def single(cls, spec: JobSpec, engine: Engine, renderer: Renderer) -> SeatMap:
        """Return the seats of a job whose one policy plays all that no bot plays."""
        return cls(spec, [LoadedPolicy("", spec, engine, renderer)])

    def turned(self, group: int, sample: int) -> SeatMap:
        """Return the seats of one sample of a group: itself, unless players rotate (`match.rotate`)."""
        if not self._rotates:
            return self
        return self._with(rotated(list(self._seats), list(self._seats.values()), group + sample))

    def opposed(self, policy: str, opponent: SeatSpec, place: int) -> SeatMap:
        """Return the seats of an evaluation of a policy, see `shared.spec.matches.opposition.opposed`."""
        changed = self._with(opposed(self._seats, policy, opponent, place, self._teams(policy)))
        changed._opponent = opponent
        return changed

    def against(self, members: Mapping[str, LoadedPolicy]) -> SeatMap:
        """Return the seats of a group that meets these members, by pool."""
        if not members:
            return self
        changed = self._with(self._seats)
        changed._rotates = self._rotates
        by_name = {name: member for pool, member in members.items() for name in (pool_player(pool), member.name)}
        changed._players = {**self._players, **by_name}
        return changed

    def _with(self, seats: Mapping[str, SeatSpec]) -> SeatMap:
        changed = SeatMap.__new__(SeatMap)
        changed.__dict__ |= self.__dict__
        changed._seats, changed._rotates = seats, False
        return changed

    def named(self, name: str) -> Player:
        """Return the player of this name, see `Trajectory.policy`."""
        return self._players[name]

    def at(self, seat: str) -> Player | None:
        """Return the player of a seat; None: a bot, or no player."""
        player = player_at(self._seats, seat)
        if player is None:
            return self._players.get("")
        return None if player.player is None else self._players[player.player]

    def split_seats(self, policy: str, seats: Collection[str]) -> tuple[list[str], set[str]]:
        """Return which of these seats the policy plays, and all those of its opponents: in an evaluation against one
        opponent those that it has taken."""
        own = [seat for seat in seats if (player := self.at(seat)) is not None and player.name == policy]
        if self._opponent is None:
            named = self.first.spec.evaluation.opponents
            return own, set(opposing(self._seats, seats, policy, self._teams(policy), named))
        return own, {seat for seat in (*seats, *self._seats) if player_at(self._seats, seat) is self._opponent}

    def _teams(self, policy: str) -> Teams:
        player = learner_of(self._players[policy])
        return teams_of(player.spec) if player else {}

    @property
    def players(self) -> tuple[str, ...]:
        """Return who plays each entry of [seats], in their order."""
        return tuple(player.player or player.bot or "" for player in self._seats.values())

    @property
    def bots(self) -> dict[str, str]:
        """See `OpenSession.bots`."""
        return bots_of(self._seats)

    def bot_rewards(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """Return the mean reward of the seats of each bot; 0 of one whose seats were paid nothing."""
        found: dict[str, list[float]] = {player.bot: [] for player in self._seats.values() if player.bot}
        for seat, reward in rewards.items() if found else ():
            player = player_at(self._seats, seat)
            if player is not None and player.bot:
                found[player.bot].append(reward)
        return {name: math.fsum(paid) / max(1, len(paid)) for name, paid in found.items()}

    def idle_seats(self, acted: Collection[str], paid: Mapping[str, float]) -> dict[str, IdleSeat]:
        """Return the seats of models without a turn that were paid. If only one player acted or was paid, those that
        [seats] names are among them, with 0: the game was over before the others had a turn. `acted`: seats with a
        turn."""
        rewards = {seat: reward for seat, reward in paid.items() if seat not in acted}
        there = {player.name for seat in (*acted, *rewards) if (player := self.at(seat)) is not None}
        if len(there) == 1:
            names = [seat for seat in self._seats if not is_pattern(seat)]
            rewards |= {seat: 0.0 for seat in names if seat not in acted and seat not in rewards}
        found = {}
        for seat, reward in rewards.items():
            if (player := self.at(seat)) is not None:
                version = player.engine.version if isinstance(player, LoadedPolicy) else None
                found[seat] = IdleSeat(policy=player.name, reward=reward, version=version or WeightVersion(0, 0))
        return found

    @property
    def context(self) -> int:
        """Tokens per stream that every player of a seat takes."""
        seated = {"", *(player.player for player in self._seats.values())}
        return min(player.context for name, player in self._players.items() if name in seated)
