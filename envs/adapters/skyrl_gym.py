"""Plays environments of skyrl-gym by id on your rows: a prompt, and the other columns that the environment needs."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from opentinker.envs.adapters.library import LibraryConfig, Randomness, check_known, episode_seed
from opentinker.envs.base import Action, Environment, Step
from opentinker.envs.data import (
    DataConfig,
    Row,
    TableRows,
    category_of,
    check_categories,
    in_event_loop,
    read,
    table,
)
from opentinker.shared.data.jsonl import RowError
from opentinker.shared.types.core import Message

if TYPE_CHECKING:
    from skyrl_gym.envs.base_text_env import BaseTextEnv

UNGUARDED = {"lcb", "searchcode"}
"""Environments that execute the policy's code in this process or a child without isolation."""


class SkyRLGym(Environment):
    """One seat. The environment gets the row as its `extras`, as in SkyRL, and its reward is used. It handles its own
    tools: it finds calls in the text, and results come back as messages."""

    class Config(LibraryConfig, DataConfig):
        library: ClassVar[str] = "skyrl_gym"

        id: Annotated[str, Field(min_length=1)]
        """As in skyrl-gym's registry, e.g. gsm8k or text2sql."""
        prompt: str = "prompt"
        """The column that holds the prompt: a text, or messages with `role` and `content`."""
        category: str | None = None
        """The column that holds the row's category, e.g. its subject or level, 50 different ones at most: evaluations
        report by it."""
        env_config: dict[str, Any] = {}
        """The environment's own settings."""

        def check(self) -> None:
            from skyrl_gym.envs.registration import registry

            if self.id in UNGUARDED:
                raise ValueError(f"id = {self.id!r} runs what the policy writes, unprotected: it is not played")
            check_known("environment as id", self.id, registry.keys() - UNGUARDED)
            if not in_event_loop():
                rows = read(self).rows
                _prompt_of(rows[0], self.prompt)
                check_categories(rows, self.category)

    config: Config
    blocking = True

    @classmethod
    def rehearse(cls, config: BaseModel) -> None:
        assert isinstance(config, cls.Config)
        _made(config, read(config).rows[0])

    @classmethod
    def data_rows(cls, config: BaseModel) -> TableRows:
        assert isinstance(config, cls.Config)
        column = config.prompt
        return TableRows(read(config), config, lambda row: _messages(_prompt_of(row, column)))

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        self._row = found = (await table(config)).at(row, shuffle=config.shuffle)
        self._randomness = Randomness(episode_seed(row, seed))
        with self._randomness:
            self._environment = _made(config, found)
            messages, _ = self._environment.init(_prompt_of(found, config.prompt))
        return _messages(messages)

    async def step(self, action: Action) -> Step:
        with self._randomness:
            out = self._environment.step(action.text)
            found = self._environment.get_metrics() if out["done"] else {}
        return Step(
            messages=_messages(out["observations"]),
            reward=float(out["reward"]),
            components={"reward": float(out["reward"])},
            done=bool(out["done"]),
            metrics={
                **{str(name): float(value) for name, value in found.items() if isinstance(value, numbers.Real)},
                **category_of(self._row, self.config.category),
            },
        )

    async def close(self) -> None:
        if hasattr(self, "_environment"):
            self._environment.close()


def _made(config: SkyRLGym.Config, row: Row) -> BaseTextEnv:
    """Raise RowError for a row that lacks a column that the environment needs in addition to the prompt."""
    import skyrl_gym
    from omegaconf import OmegaConf

    where, values = row
    try:
        made: BaseTextEnv = skyrl_gym.make(
            config.id, env_config=OmegaConf.create(config.env_config), extras=dict(values)
        )
    except (KeyError, AssertionError, TypeError) as error:
        wants = f"there is no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        told = f"{where}: skyrl-gym's {config.id} needs more of a row: {wants}"
        raise RowError(f"{told}; its columns are {', '.join(values)}") from None
    return made


def _prompt_of(row: Row, column: str) -> list[dict[str, str]]:
    """Return the prompt as messages. Raise RowError."""
    where, values = row
    prompt = values.get(column)
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(_is_message(item) for item in prompt):
        raise RowError(f"{where}: {column} must be a text, or a list of messages with role and content")
    return [{"role": item["role"], "content": item["content"]} for item in prompt]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("role", "content"))


def _messages(items: list[dict[str, str]]) -> list[Message]:
    return [Message(role=item["role"], content=item["content"]) for item in items]
