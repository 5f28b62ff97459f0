"""Plays any Gymnasium environment by its id: observations become text, the policy's text becomes an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from opentinker.envs.adapters import env_notes, minigrid
from opentinker.envs.adapters.library import ActionConfig, Illegal, Randomness, check_known, episode_seed
from opentinker.envs.base import Action, Environment, Step
from opentinker.shared.types.core import Image, Message, Text

if TYPE_CHECKING:
    from gymnasium import Env


class Gymnasium(Environment):
    """One seat. Reward: the environment's.

    An action that cannot be read, or that the environment's mask forbids, is answered with the reason and costs
    `penalty`; the environment does not see it. The action is the text after the last `Action:`, otherwise the whole
    text, in the form of the action space: a name or number, a JSON array or object, plain text.
    """

    class Config(ActionConfig):
        library: ClassVar[str] = "gymnasium"

        id: Annotated[str, Field(min_length=1)]
        """Id for `gymnasium.make`, e.g. FrozenLake-v1, or BabyAI-GoToRedBall-v0 if minigrid is installed."""
        kwargs: dict[str, Any] = {}
        """Passed to the environment."""
        view: Literal["auto", "ansi", "words", "observation"] = "auto"
        """Form of the observation. `ansi`: the environment drawn in letters; `words`: a MiniGrid described in text;
        `observation`: the observation itself, by its space. `auto`: the first of these that the environment has."""
        max_steps: Annotated[int, Field(ge=1)] | None = None
        """Step limit, instead of the environment's own."""

        def check(self) -> None:
            from gymnasium import registry

            if ":" in self.id:
                raise ValueError(f"id = {self.id!r}: no modules are imported by name")
            env_notes.register(self.id)
            check_known("environment as id", self.id, registry)
            if self.view == "ansi" and "ansi" not in _render_modes(self.id):
                raise ValueError(f"view = 'ansi': {self.id} cannot be drawn in letters")

    config: Config
    blocking = True

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        assert isinstance(config, cls.Config)
        _made(config, drawn=False).close()

    async def open(self, row: int, seed: int) -> list[Message]:
        from opentinker.envs.adapters import spaces

        self._spaces = spaces
        config = self.config
        start = episode_seed(row, seed)
        self._randomness = Randomness(start)
        drawn = config.view in ("auto", "ansi") and "ansi" in _render_modes(config.id)
        with self._randomness:
            self._environment = _made(config, drawn=drawn)
            observation, info = self._environment.reset(seed=start)
            return [self._first(observation, info, drawn)]

    def _first(self, observation: Any, info: dict[str, Any], drawn: bool) -> Message:
        config = self.config
        self._drawn = drawn
        self._in_words = not drawn and config.view in ("auto", "words") and minigrid.is_minigrid(self._environment)
        if config.view == "words" and not self._in_words:
            raise ValueError(f"view = 'words' is for MiniGrid; {config.id} is none")
        self._names = [name.lower() for name in config.actions] or env_notes.names_of(config.id, self._environment)
        count = getattr(self._environment.action_space, "n", None)
        if config.actions and count != len(config.actions):
            raise ValueError(f"{len(config.actions)} names of actions were given, and {config.id} has {count}")
        self._mask = self._spaces.mask_of(observation, info)
        self._illegal, self._return = 0, 0.0
        return self._message(observation, self._introduction())

    async def step(self, action: Action) -> Step:
        space = self._environment.action_space
        try:
            chosen = self._spaces.read(space, action.text, self._names, self._mask)
        except Illegal as error:
            return self._refuse(error)
        with self._randomness:
            observation, reward, terminated, truncated, info = self._environment.step(chosen)
            done = bool(terminated or truncated)
            self._mask = self._spaces.mask_of(observation, info)
            messages = [] if terminated else [self._message(observation)]
        self._return += float(reward)
        return Step(
            messages=messages,
            reward=float(reward),
            done=done,
            truncated=bool(truncated and not terminated),
            components={"reward": float(reward)},
            metrics=self._metrics(bool(truncated)),
        )

    async def close(self) -> None:
        if hasattr(self, "_environment"):
            self._environment.close()

    def _refuse(self, why: Exception) -> Step:
        self._illegal += 1
        return self.config.refuse(why, self._allowed_actions(), self._illegal, self._metrics(False))

    def _metrics(self, truncated: bool) -> dict[str, float]:
        return {"return": self._return, "illegal": float(self._illegal), "truncated": float(truncated)}

    def _introduction(self) -> str:
        about = env_notes.ABOUT.get(env_notes.base_name(self.config.id), f"You act in {self.config.id}.")
        return self.config.introduction(about, self._spaces.hint(self._environment.action_space, self._names))

    def _message(self, observation: Any, first: str = "") -> Message:
        image: Image | None = None
        if self._drawn:
            seen = env_notes.plain_colours(str(self._environment.render())).strip("\n")
            seen = "\n".join(filter(None, [seen, env_notes.remark(self.config.id, self._environment, observation)]))
        elif self._in_words:
            seen = minigrid.view(observation)
        else:
            space = self._environment.observation_space
            image = self._spaces.picture(space, observation)
            seen = "" if image is not None else self._spaces.show(space, observation)
        left = self._allowed_actions() if self.config.hint else ""
        text = "\n".join(part for part in (first, seen, f"Possible: {left}." if left else "") if part)
        return Message(role="user", content=text if image is None else [Text(text), image])

    def _allowed_actions(self) -> str:
        return self._spaces.allowed(self._environment.action_space, self._mask, self._names)


def _made(config: Gymnasium.Config, *, drawn: bool) -> Env[Any, Any]:
    import gymnasium

    return gymnasium.make(
        config.id,
        max_episode_steps=config.max_steps,
        disable_env_checker=True,
        **({"render_mode": "ansi"} if drawn else {}) | config.kwargs,
    )


def _render_modes(id: str) -> list[str]:
    from gymnasium.envs.registration import load_env_creator, registry

    entry = registry[id].entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return list(getattr(creator, "metadata", {}).get("render_modes") or [])
