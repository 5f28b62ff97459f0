"""Environments with rows of their own, loaded by the tests as `tests.samples.listed_rows:Name`."""

from __future__ import annotations

from pydantic import BaseModel

from opentinker.envs.base import Action, DataRows, Environment, Step, user
from opentinker.shared.types.core import Message


class Few(DataRows):
    def __len__(self) -> int:
        return 3

    def number(self, row: int) -> int:
        return row % 3

    def prompt(self, number: int) -> list[Message]:
        return [user(f"row {number}")]


class Listed(Environment):
    """Blocks, so that its rows are listed by a child process."""

    blocking = True

    @classmethod
    def rows(cls, config: BaseModel) -> DataRows:
        return Few()

    async def open(self, row: int, seed: int) -> list[Message]:
        return Few().prompt(row % 3)

    async def step(self, action: Action) -> Step:
        return Step(reward=1.0, done=True)


class Raises(Listed):
    @classmethod
    def rows(cls, config: BaseModel) -> DataRows:
        raise OSError("the shelf is empty")
