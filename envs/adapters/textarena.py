"""Plays any TextArena game by its id: players are seats, and the game's texts are the messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, Field

from opentinker.envs.adapters.library import LibraryConfig, Randomness, check_known, episode_seed
from opentinker.envs.base import Action, Environment, Opening, Step, user
from opentinker.shared.types.core import Message

if TYPE_CHECKING:
    from textarena import Env


class TextArena(Environment):
    """Seats `0`, `1`... by player, or a single unnamed one.

    Rewards come from the game at the end. A seat sees what is new since its last turn, without its own actions. Games
    whose id ends in `-train` show everything that a player should know each time. The game itself answers an unreadable
    action, and ends if that happens too often.

    A game that collects the players' choices one by one and reveals them after the last can be played in rounds
    (`simultaneous`): all players are asked together, and the game receives their texts in the order in which it asks. A
    player whose action is not accepted is asked again alone.
    """

    class Config(LibraryConfig):
        library: ClassVar[str] = "textarena"

        id: Annotated[str, Field(min_length=1)]
        """As in TextArena's registry, e.g. TicTacToe-v0."""
        players: Annotated[int, Field(ge=1, le=100)] = 1
        """Number of players; the game limits it."""
        simultaneous: bool = False
        """Ask all players together, in games that hide the choices of a round until all have been made, such as
        PublicGoodsGame-v0. In any other game the players would miss each other's latest messages."""
        kwargs: dict[str, Any] = {}
        """Passed to the game."""

        def check(self) -> None:
            from textarena.envs.registration import ENV_REGISTRY

            check_known("game as id", self.id, ENV_REGISTRY)
            if self.simultaneous and self.players == 1:
                raise ValueError("simultaneous = true needs players >= 2")

    config: Config
    blocking = True

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        players = self.config.players
        self.seats = tuple(map(str, range(players))) if players > 1 else ("",)
        self._texts: dict[int, str] = {}
        """Texts of a round, by player, that the game has not asked for yet."""

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        cls(config)._begin(0)

    def _begin(self, start: int) -> None:
        import textarena

        self._randomness = Randomness(start)
        with self._randomness:
            try:
                self._environment: Env = textarena.make(self.config.id, **self.config.kwargs)
                self._environment.reset(num_players=self.config.players, seed=start)
            except LookupError as error:
                if (missing := _MISSING.search(str(error))) is None:
                    raise
                raise WordsMissing(self.config.id, missing[1]) from None

    async def open(self, row: int, seed: int) -> Opening:
        self._begin(episode_seed(row, seed))
        with self._randomness:
            self._source = _unwrap(self._environment)
            if self.config.simultaneous:
                return Opening(acting=self._ask(range(self.config.players)))
            player, message = self._observe()
        return Opening(messages=[message], seat=self.seats[player])

    async def step(self, action: Action) -> Step:
        with self._randomness:
            done, _ = self._environment.step(action.text)
            if not done:
                player, message = self._observe()
                return Step(messages=[message], seat=self.seats[player])
            last = self._finish()
        own = last.rewards.pop(action.seat, {"game": 0.0})
        return msgspec.structs.replace(last, reward=own["game"], components=own)

    async def step_all(self, actions: list[Action]) -> Step:
        self._texts |= {self.seats.index(action.seat): action.text for action in actions}
        state, acted = self._environment.state, None
        with self._randomness:
            while state.current_player_id in self._texts:
                acted = state.current_player_id
                done, _ = self._environment.step(self._texts.pop(acted))
                if done:
                    return self._finish()
            waiting = [player for player in self._texts if self._is_playing(player)]
            if waiting or state.current_player_id == acted:  # its action was not accepted
                return Step(acting=self._ask([state.current_player_id]))
            self._texts = {}
            return Step(acting=self._ask(filter(self._is_playing, range(self.config.players))))

    def _ask(self, players: Iterable[int]) -> dict[str, list[Message]]:
        """Return what these players see now, by seat, by making each the game's current player in turn."""
        state, seen = self._environment.state, {}
        current = state.current_player_id
        for player in players:
            state.current_player_id = player
            seen[self.seats[player]] = [self._observe()[1]]
        state.current_player_id = current
        return seen

    def _is_playing(self, player: int) -> bool:
        """Return whether the game has not eliminated a player."""
        return player not in getattr(self._environment.state, "elimination_order", ())

    def _finish(self) -> Step:
        """Return the game's result, with the rewards of all seats."""
        rewards, info = self._environment.close()
        turns = [float(about.get("turn_count", 0)) for about in info.values()]
        invalid = [float(about.get("invalid_move", False)) for about in info.values()]
        return Step(
            rewards={self.seats[player]: {"game": float(reward)} for player, reward in (rewards or {}).items()},
            done=True,
            metrics={"turns": sum(turns), "invalid": max(invalid, default=0.0)},
        )

    def _observe(self) -> tuple[int, Message]:
        player, seen = self._source.get_observation()
        if not isinstance(seen, str):
            seen = self._format_events(player, seen)
        return player, user(seen.strip() or "Your turn.")

    def _format_events(self, player: int, events: list[tuple[Any, ...]]) -> str:
        """Format events as TextArena's wrapper for language models does, without the player's own messages."""
        names = self._environment.state.role_mapping
        said = [
            f"[{'GAME' if sender == GAME else names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, *_ in events
            if sender != player
        ]
        return "\n".join(said)


class WordsMissing(Exception):
    """A game reads data of nltk that are not installed."""

    def __init__(self, game: str, data: str) -> None:
        every = " ".join(dict.fromkeys([*NLTK_DATA, data]))
        super().__init__(
            f"{game} reads nltk's {data!r}, which is not installed here: "
            f"python -m nltk.downloader -d /usr/share/nltk_data {every}"
        )


_MISSING = re.compile(r"Resource (?:\x1b\[\d+m)?'?([\w-]+)'?(?:\x1b\[\d+m)? not found")
"""nltk's error."""
NLTK_DATA = ("words", "averaged_perceptron_tagger_eng")
"""Data that the word games read."""
GAME = -1
"""TextArena's id for the game itself."""


def _unwrap(environment: Any) -> Any:
    """Return the environment to observe: below the wrapper that repeats all observations, if present."""
    from textarena.wrappers import LLMObservationWrapper

    wrapped = environment
    while hasattr(wrapped, "env"):
        if type(wrapped) is LLMObservationWrapper:
            return wrapped.env
        wrapped = wrapped.env
    return environment
