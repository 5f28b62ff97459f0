"""`AbstractGame`, the synchronous interface of an environment: a game with plain, blocking calls that exchange text.

Names and signatures are those of the published interface, so a game written for it runs here unchanged. The instance
that plays an episode also writes its prompt: there is no second copy that could differ.
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
    """A game's response to an action."""

    observation: str
    """Text that the model sees next."""
    reward: float
    """Reward of this step."""
    done: bool
    info: dict[str, Any] = field(default_factory=dict)
    """Further information; its numbers become metrics. `truncated`, true with `done`, says that a limit ended the
    episode."""


class AbstractGame(ABC):
    """An environment as a game. Subclasses implement the four abstract methods; the others have defaults."""

    agent_loop_name: str = "generic_agent"
    """Part of the published interface; here one loop plays every game."""
    concurrent: ClassVar[bool] = False
    """Calls of several games may overlap, because they touch no state shared within the process, including the global
    random numbers (except in `generate_initial_state`). It counts only on the class that defines `step`; subclasses
    that override `step` must set it again."""

    @abstractmethod
    def reset(self, **kwargs: Any) -> str:
        """Start an episode and return the first observation. `kwargs` come from `generate_initial_state`."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Play the model's text."""

    @abstractmethod
    def get_system_prompt(self) -> str | None:
        """Return the system message, or None."""

    @abstractmethod
    def get_initial_user_message(self) -> str:
        """Return the text that precedes the first observation."""

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw the start state of an episode from the global `random`, which is seeded before the call."""
        return {}

    def render_state_for_prompt(self, **state: Any) -> str:
        """Return the state as text."""
        return self.reset(**state)

    def get_user_message_with_state(self, **state: Any) -> str:
        """Return the first user message."""
        return f"{self.get_initial_user_message()}\n\n{self.render_state_for_prompt(**state)}"

    def get_state(self) -> dict[str, Any]:
        """Return the state, for debugging."""
        return {}

    def get_interaction_name(self) -> str:
        return type(self).__name__.lower().replace("game", "")

    def parse_action(self, raw_action: str) -> Any:
        """Parse the model's text; for the game's own `step` to call."""
        return raw_action

    def close(self) -> None:  # noqa: B027  nothing to free is the common case
        """Release the episode's resources."""


class GameConfig(BaseModel):
    """Arguments of a game's constructor. Refuses unknown and missing names."""

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
    """Raise ValueError with the arguments that the constructor does not accept, or that are missing."""
    parameters = [p for p in inspect.signature(game).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    if (odd := sorted(given.keys() - named.keys())) and len(named) == len(parameters):
        raise ValueError(f"{game.__name__} takes no {', '.join(odd)}; it takes: {', '.join(named) or 'nothing'}")
    if lacking := [name for name, p in named.items() if p.default is p.empty and name not in given]:
        raise ValueError(f"{game.__name__} needs {', '.join(lacking)}")


class PlayedGame(Environment):
    """Plays a game as an environment: in a child process, because its calls block, with separate random numbers."""

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
        """Draw the start state, which `begin` receives."""
        return game.generate_initial_state()

    def begin(self, game: AbstractGame, drawn: Any) -> list[Message]:
        """Reset the game and return the prompt."""
        system, first = opening_of(game, drawn)
        return [*([] if system is None else [Message(role="system", content=system)]), user(first)]

    def render_observation(self, observation: str) -> str:
        """Return an observation as the policy sees it."""
        return observation

    async def call(self, function: Callable[[], T]) -> T:
        """Make one blocking call of the game. Overrides must not let two such calls of a process overlap: during the
        call the global random numbers are this episode's."""
        return function()

    async def call_concurrently(self, function: Callable[[], T]) -> T:
        """Make one blocking call of a concurrent game. Overrides may let such calls overlap."""
        return function()

    async def open(self, row: int, seed: int) -> list[Message]:
        self._randomness = Randomness(episode_seed(row, seed))
        drawn = await self.call(partial(self._alone, partial(self._make, row)))
        return await self._turn(partial(self.begin, self._game, drawn))

    def _make(self, row: int) -> Any:
        self._game = self.make()
        return self.draw(self._game, row)

    async def _turn(self, function: Callable[[], T]) -> T:
        if is_concurrent(type(self._game)):
            return await self.call_concurrently(function)
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
            messages=[] if result.done and not truncated else [user(self.render_observation(result.observation))],
            reward=result.reward,
            done=bool(result.done),
            truncated=truncated,
            metrics=numbers_of(result.info),
        )

    async def close(self) -> None:
        if hasattr(self, "_game"):
            await self._turn(self._game.close)


def is_concurrent(kind: type[AbstractGame]) -> bool:
    """Return whether the class that defines `step` declares itself concurrent."""
    writer = next(base for base in kind.__mro__ if "step" in vars(base))
    return bool(vars(writer).get("concurrent", False))


async def run_in_turn(
    kind: type[AbstractGame],
    function: Callable[[], T],
    turn: asyncio.Lock,
    randomness: AbstractContextManager[object] | None = None,
) -> T:
    """Make one blocking call of a game in a thread: immediately if its class is concurrent, else under `turn`."""
    return await (asyncio.to_thread(function) if is_concurrent(kind) else run_exclusively(function, turn, randomness))


async def run_exclusively(
    function: Callable[[], T], turn: asyncio.Lock, randomness: AbstractContextManager[object] | None = None
) -> T:
    """Run `function` in a thread while holding `turn`, with its own random numbers."""

    def drawn() -> T:
        with randomness or nullcontext():
            return function()

    async with turn:
        return await asyncio.to_thread(drawn)


def opening_of(game: AbstractGame, state: dict[str, Any]) -> tuple[str | None, str]:
    """Reset the game and return the system message and the first user message.

    A game that overrides the rendering of its state may reset itself to do so: it is reset again, from the same random
    numbers.
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
    """Return a function that restores the global random numbers to their current state; it does nothing for a
    concurrent game, which does not use them."""
    start, numpy_start = random.getstate(), np.random.get_state()

    def again() -> None:
        if not is_concurrent(kind):
            random.setstate(start)
            np.random.set_state(numpy_start)

    return again


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numbers_of(info: object) -> dict[str, float]:
    """Return the entries that are finite numbers with short ASCII names. NaN and infinity, such as a ratio of 0 to 0,
    are left out with a warning: extra information of a game never fails an episode."""
    if not isinstance(info, Mapping):
        return {}
    found = {}
    for name, value in list(info.items())[:64]:
        number = isinstance(value, numbers.Real | np.bool_)
        if not (number and isinstance(name, str) and name.isascii() and len(name) <= 100):
            continue
        if math.isfinite(as_float := _as_float(value)):
            found[name] = as_float
        else:
            warnings.warn(f"info[{name!r}] is not a finite number and is not recorded as a metric", stacklevel=2)
    return found


@cache
def environment_of(game: type[AbstractGame]) -> type[PlayedGame]:
    """Return the environment class that plays `game`."""
    config = type("Config", (GameConfig,), {"game": game, "__module__": game.__module__, "__doc__": GameConfig.__doc__})
    return type(game.__name__, (PlayedGame,), {"game": game, "Config": config, "__module__": game.__module__})


class GameDataGenerator:
    """Generates start states of a game as rows with a prompt. Sample i is drawn after seeding with seed + i."""

    def __init__(
        self, game_class: type[AbstractGame], game_kwargs: dict[str, Any] | None = None, seed: int | None = None
    ) -> None:
        self.game_class, self.game_kwargs, self.seed = game_class, dict(game_kwargs or {}), seed
        self._game = game_class(**self.game_kwargs)

    def generate_sample(self, index: int) -> dict[str, Any]:
        """Return a row: prompt (a chat), env_kwargs (for reset) and data_source (the interaction's name)."""
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
