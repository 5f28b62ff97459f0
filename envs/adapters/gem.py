"""Plays any single-agent GEM environment by its id: its text is the message, the policy's text the action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from opentinker.envs.adapters.library import LibraryConfig, Randomness, check_known, episode_seed
from opentinker.envs.base import Action, Environment, Step, user
from opentinker.shared.types.core import Message

if TYPE_CHECKING:
    from gem.core import Env

PLAYED = ("game:", "math:")
"""Supported kinds of environment. Those of code, and answers of `rg`, would run the policy's code; others need
servers."""


class Gem(Environment):
    """One seat. Reward: the environment's own."""

    class Config(LibraryConfig):
        library: ClassVar[str] = "gem"

        id: Annotated[str, Field(min_length=1)]
        """As in GEM's registry, e.g. game:GuessTheNumber-v0-easy; kinds: `game`, `math`."""
        kwargs: dict[str, Any] = {}
        """Passed to the environment."""

        @classmethod
        def advice(cls) -> str:
            return (
                "it needs a separate virtual environment, because it pins other versions of our dependencies. Name the "
                "python of that one in OPENTINKER_ENV_INTERPRETERS=gem=... (docs/environments/adapters.md)"
            )

        def check(self) -> None:
            from gem.envs.registration import ENV_REGISTRY

            played = [id for id in ENV_REGISTRY if id.startswith(PLAYED)]
            check_known("environment as id", self.id, played)

    config: Config
    blocking = True

    async def open(self, row: int, seed: int) -> list[Message]:
        import gem

        start = episode_seed(row, seed)
        self._randomness = Randomness(start)
        with self._randomness:
            self._environment: Env = gem.make(self.config.id, **self.config.kwargs)
            observation, info = self._environment.reset(seed=start)
        return [user(_said(observation, info))]

    async def step(self, action: Action) -> Step:
        with self._randomness:
            observation, reward, terminated, truncated, info = self._environment.step(action.text)
        done = bool(terminated or truncated)
        return Step(
            messages=[] if terminated else [user(_said(observation, info))],
            reward=float(reward),
            components={"reward": float(reward)},
            done=done,
            truncated=bool(truncated and not terminated),
            metrics={"truncated": float(truncated)},
        )


def _said(observation: object, info: dict[str, Any]) -> str:
    """Add the text of GEM's own wrappers below it."""
    return "\n".join(filter(None, [str(observation), str(info.get("suffix", ""))]))
