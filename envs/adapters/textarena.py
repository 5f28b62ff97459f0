"""Any TextArena game by its id: players are seats, and the game's own words are the messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from opentinker.envs.adapters.library import LibraryConfig, Randomness, episode_seed, unknown
from opentinker.envs.base import Action, Environment, Opening, Step, user
from opentinker.shared.types.core import Message

if TYPE_CHECKING:
    from textarena import Env


class TextArena(Environment):
    """Seats `0`, `1`... by player, a single unnamed one if there is one player. Rewards come at the end, from the game.

    A seat hears what is new to it since its last turn, its own actions left out. Games whose id ends in `-train` show
    the whole of what a player should know each time. The game itself answers an action that it cannot read, and ends if
    that happens too often.
    """

    class Config(LibraryConfig):
        library: ClassVar[str] = "textarena"
        extra: ClassVar[str] = "textarena"

        id: Annotated[str, Field(min_length=1)]
        """As in TextArena's registry, e.g. TicTacToe-v0."""
        players: Annotated[int, Field(ge=1, le=100)] = 1
        """How many play; the game says how many there can be."""
        kwargs: dict[str, Any] = {}
        """Passed to the game."""

        def check(self) -> None:
            from textarena.envs.registration import ENV_REGISTRY

            if self.id not in ENV_REGISTRY:
                raise unknown(f"game as id = {self.id!r}", self.id, ENV_REGISTRY)

    config: Config
    blocking = True

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        players = self.config.players
        self.seats = tuple(map(str, range(players))) if players > 1 else ("",)

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        cls(config)._begin(0)

    def _begin(self, start: int) -> None:
        import textarena

        self._randomness = Randomness(start)
        with self._randomness:
            self._environment: Env = textarena.make(self.config.id, **self.config.kwargs)
            self._environment.reset(num_players=self.config.players, seed=start)

    async def open(self, row: int, seed: int) -> Opening:
        self._begin(episode_seed(row, seed))
        with self._randomness:
            self._source = _beneath(self._environment)
            player, message = self._observe()
        return Opening(messages=[message], seat=self.seats[player])

    async def step(self, action: Action) -> Step:
        with self._randomness:
            done, _ = self._environment.step(action.text)
            if not done:
                player, message = self._observe()
                return Step(messages=[message], seat=self.seats[player])
            rewards, info = self._environment.close()
        gains = {self.seats[player]: float(reward) for player, reward in (rewards or {}).items()}
        own = gains.pop(action.seat, 0.0)
        turns = [float(about.get("turn_count", 0)) for about in info.values()]
        invalid = [float(about.get("invalid_move", False)) for about in info.values()]
        return Step(
            reward=own,
            components={"game": own},
            rewards={seat: {"game": gain} for seat, gain in gains.items()},
            done=True,
            metrics={"turns": sum(turns), "invalid": max(invalid, default=0.0)},
        )

    def _observe(self) -> tuple[int, Message]:
        player, seen = self._source.get_observation()
        if not isinstance(seen, str):
            seen = self._told(player, seen)
        return player, user(seen.strip() or "Your turn.")

    def _told(self, player: int, events: list[tuple[Any, ...]]) -> str:
        """Format events as TextArena's wrapper for language models does, without the player's own messages."""
        names = self._environment.state.role_mapping
        said = [
            f"[{'GAME' if sender == GAME else names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, *_ in events
            if sender != player
        ]
        return "\n".join(said)


GAME = -1
"""TextArena's id for the game itself."""


def _beneath(environment: Any) -> Any:
    """Where observations are taken from: beneath the wrapper that repeats all of them each time, if it is there."""
    from textarena.wrappers import LLMObservationWrapper

    wrapped = environment
    while hasattr(wrapped, "env"):
        if type(wrapped) is LLMObservationWrapper:
            return wrapped.env
        wrapped = wrapped.env
    return environment
