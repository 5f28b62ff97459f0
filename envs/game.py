"""The other face of an environment: a game with plain, blocking calls that read and write text.

The names and signatures are those of the published interface, so that a game written for it plays here unchanged. The
instance that plays an episode also says its prompt: there is no second copy that could differ.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from opentinker.envs.adapters.library import Randomness, episode_seed
from opentinker.envs.base import Action, Environment, Step, is_truncation, user
from opentinker.shared.types.core import Message

T = TypeVar("T")


@dataclass
class StepResult:
    """What a game answers to an action."""

    observation: str
    """What the model sees next."""
    reward: float
    """Of this step."""
    done: bool
    info: dict[str, Any] = field(default_factory=dict)
    """Whatever else there is to say; numbers in it become metrics. `truncated`, true with `done`: a limit ended it."""


class AbstractGame(ABC):
    """A whole environment: the four abstract methods; the others have defaults."""

    agent_loop_name: str = "generic_agent"
    """Of the published interface; there is one loop here, and it plays every game."""
    concurrent: ClassVar[bool] = False
    """True: its calls touch nothing that games of one process share, the global random numbers neither (all but
    `generate_initial_state`), so those of several games may be made at once. Said by the class that writes `step`, and
    for that class alone."""

    @abstractmethod
    def reset(self, **kwargs: Any) -> str:
        """Begin anew; `kwargs` are what `generate_initial_state` gave. Returns the first observation."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Play what the model said."""

    @abstractmethod
    def get_system_prompt(self) -> str | None:
        """The system message; None for none."""

    @abstractmethod
    def get_initial_user_message(self) -> str:
        """Stands before the first observation."""

    def generate_initial_state(self) -> dict[str, Any]:
        """Where an episode begins, drawn from the global `random`, which is seeded before the call."""
        return {}

    def render_state_for_prompt(self, **state: Any) -> str:
        """The state as text."""
        return self.reset(**state)

    def get_user_message_with_state(self, **state: Any) -> str:
        """The first user message."""
        return f"{self.get_initial_user_message()}\n\n{self.render_state_for_prompt(**state)}"

    def get_state(self) -> dict[str, Any]:
        """For debugging."""
        return {}

    def get_interaction_name(self) -> str:
        return type(self).__name__.lower().replace("game", "")

    def parse_action(self, raw_action: str) -> Any:
        """What a game makes of the model's words; for its own `step` to call."""
        return raw_action

    def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Free what the episode holds."""


class GameConfig(BaseModel):
    """The arguments of a game's constructor. Names that it does not take are refused, missing ones too."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    game: ClassVar[type[AbstractGame]]

    @model_validator(mode="before")
    @classmethod
    def _fits_the_constructor(cls, given: Any) -> Any:
        check_arguments(cls.game, cast(Mapping[str, Any], given))
        return given

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def check_arguments(game: type[AbstractGame], given: Mapping[str, Any]) -> None:
    """Raises ValueError that names what the constructor does not take, or lacks."""
    parameters = [p for p in inspect.signature(game).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    if (odd := sorted(given.keys() - named.keys())) and len(named) == len(parameters):
        raise ValueError(f"{game.__name__} takes no {', '.join(odd)}; it takes: {', '.join(named) or 'nothing'}")
    if lacking := [name for name, p in named.items() if p.default is p.empty and name not in given]:
        raise ValueError(f"{game.__name__} needs {', '.join(lacking)}")


class PlayedGame(Environment):
    """A game as an env worker plays it: in a child process, for its calls block, with random numbers of its own."""

    game: ClassVar[type[AbstractGame]]
    blocking = True
    config: GameConfig

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        made = cls(config)
        with Randomness(0):
            made.make().close()

    def make(self) -> AbstractGame:
        return self.game(**self.config.arguments)

    def draw(self, game: AbstractGame, row: int) -> Any:
        """Where the episode begins: for `begin`."""
        return game.generate_initial_state()

    def begin(self, game: AbstractGame, drawn: Any) -> list[Message]:
        """Resets the game, and gives what the policy sees first."""
        system, first = opening_of(game, drawn)
        return [*([] if system is None else [Message(role="system", content=system)]), user(first)]

    def worded(self, observation: str) -> str:
        """An observation as the policy sees it."""
        return observation

    async def call(self, function: Callable[[], T]) -> T:
        """One blocking call of the game. One that is overridden must not let two of them overlap in a process: the
        global random numbers are this episode's meanwhile."""
        return function()

    async def beside(self, function: Callable[[], T]) -> T:
        """One blocking call of a game that shares nothing: one that is overridden may let them overlap."""
        return function()

    async def open(self, row: int, seed: int) -> list[Message]:
        self._randomness = Randomness(episode_seed(row, seed))
        drawn = await self.call(partial(self._alone, partial(self._make, row)))
        return await self._turn(partial(self.begin, self._game, drawn))

    def _make(self, row: int) -> Any:
        self._game = self.make()
        return self.draw(self._game, row)

    async def _turn(self, function: Callable[[], T]) -> T:
        if concurrent(type(self._game)):
            return await self.beside(function)
        return await self.call(partial(self._alone, function))

    def _alone(self, function: Callable[[], T]) -> T:
        with self._randomness:
            return function()

    async def step(self, action: Action) -> Step:
        result = await self._turn(partial(self._game.step, action.text))
        if not isinstance(result, StepResult):
            raise TypeError(f"{type(self._game).__name__}.step must return a StepResult, not {type(result).__name__}")
        info = result.info if isinstance(result.info, Mapping) else {}
        truncated = bool(result.done) and is_truncation(info)
        return Step(
            messages=[] if result.done and not truncated else [user(self.worded(result.observation))],
            reward=result.reward,
            done=bool(result.done),
            truncated=truncated,
            metrics=numbers_of(result.info),
        )

    async def close(self) -> None:
        if hasattr(self, "_game"):
            await self._turn(self._game.close)


def concurrent(kind: type[AbstractGame]) -> bool:
    """Whether the class that writes `step` says that it shares nothing."""
    writer = next(base for base in kind.__mro__ if "step" in vars(base))
    return bool(vars(writer).get("concurrent", False))


async def in_turn(
    kind: type[AbstractGame],
    function: Callable[[], T],
    turn: asyncio.Lock,
    randomness: AbstractContextManager[object] | None = None,
) -> T:
    """One blocking call of a game of this kind, in a thread: at once if it shares nothing, else `alone`."""
    return await (asyncio.to_thread(function) if concurrent(kind) else alone(function, turn, randomness))


async def alone(
    function: Callable[[], T], turn: asyncio.Lock, randomness: AbstractContextManager[object] | None = None
) -> T:
    """In a thread, when it is its turn: with random numbers of its own."""

    def drawn() -> T:
        with randomness or nullcontext():
            return function()

    async with turn:
        return await asyncio.to_thread(drawn)


def opening_of(game: AbstractGame, state: dict[str, Any]) -> tuple[str | None, str]:
    """Resets the game, and gives the system message and the first user message.

    A game that words its state itself may reset to do so: it is reset again, from the same random numbers.
    """
    kind = type(game)
    again = _rewinder(kind)
    observation = game.reset(**state)
    if (
        kind.get_user_message_with_state is AbstractGame.get_user_message_with_state
        and kind.render_state_for_prompt is AbstractGame.render_state_for_prompt
    ):
        before = game.get_initial_user_message()
        return game.get_system_prompt(), f"{before}\n\n{observation}" if before else observation
    again()
    first = game.get_user_message_with_state(**state)
    again()
    game.reset(**state)
    return game.get_system_prompt(), first


def _rewinder(kind: type[AbstractGame]) -> Callable[[], None]:
    """Puts the global random numbers back to where they are now; others' are not touched for a game that has none."""
    start, numpy_start = random.getstate(), np.random.get_state()

    def again() -> None:
        if not concurrent(kind):
            random.setstate(start)
            np.random.set_state(numpy_start)

    return again


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numbers_of(info: object) -> dict[str, float]:
    """The entries that are finite numbers, and have short ASCII names. NaN and infinity, such as a ratio of 0 to 0, are
    left out with one warning: what a game tells beside its reward fails no episode."""
    if not isinstance(info, Mapping):
        return {}
    found = {}
    for name, value in list(info.items())[:64]:
        number = isinstance(value, numbers.Real | np.bool_)
        if not (number and isinstance(name, str) and name.isascii() and len(name) <= 100):
            continue
        if math.isfinite(told := _as_float(value)):
            found[name] = told
        else:
            warnings.warn(f"info[{name!r}] is no finite number: it becomes no metric", stacklevel=2)
    return found


@cache
def environment_of(game: type[AbstractGame]) -> type[PlayedGame]:
    """The environment class that plays `game`."""
    config = type("Config", (GameConfig,), {"game": game, "__module__": game.__module__, "__doc__": GameConfig.__doc__})
    return type(game.__name__, (PlayedGame,), {"game": game, "Config": config, "__module__": game.__module__})


class GameDataGenerator:
    """Start states of a game as rows with a prompt: sample i is drawn after seeding with seed + i."""

    def __init__(
        self, game_class: type[AbstractGame], game_kwargs: dict[str, Any] | None = None, seed: int | None = None
    ) -> None:
        self.game_class, self.game_kwargs, self.seed = game_class, dict(game_kwargs or {}), seed
        self._game = game_class(**self.game_kwargs)

    def generate_sample(self, index: int) -> dict[str, Any]:
        """prompt (a chat), env_kwargs (of reset) and data_source (the interaction's name)."""
        if self.seed is not None:
            random.seed(self.seed + index)
        state = self._game.generate_initial_state()
        system = self._game.get_system_prompt()
        first = self._game.get_user_message_with_state(**state)
        prompt = [] if system is None else [{"role": "system", "content": system}]
        return {
            "prompt": [*prompt, {"role": "user", "content": first}],
            "env_kwargs": state,
            "data_source": self._game.get_interaction_name(),
        }

    def get_interaction_name(self) -> str:
        return self._game.get_interaction_name()
