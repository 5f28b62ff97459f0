"""Environments with rows, loaded by the tests as `tests.samples.listed_rows:Name`."""

from __future__ import annotations

from pydantic import BaseModel

from opentinker.envs.base import Action, DataRows, Environment, EnvironmentConfig, Step, user
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
    def data_rows(cls, config: BaseModel) -> DataRows:
        return Few()

    async def open(self, row: int, seed: int) -> list[Message]:
        return Few().prompt(row % 3)

    async def step(self, action: Action) -> Step:
        return Step(reward=1.0, done=True)


class Raises(Listed):
    @classmethod
    def data_rows(cls, config: BaseModel) -> DataRows:
        raise OSError("the shelf is empty")


class Digits(DataRows):
    """Single digits, in another order in every pass."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def number(self, row: int) -> int:
        epoch, place = divmod(row, self._count)
        return (place + epoch) % self._count

    def prompt(self, number: int) -> list[Message]:
        return [user(f"say {number}")]

    def place(self, number: int) -> str:
        return f"digit {number}"


class Said(Environment):
    """Reward 1 for the digit of the row."""

    class Config(EnvironmentConfig):
        count: int = 6

    config: Config

    @classmethod
    def data_rows(cls, config: BaseModel) -> Digits:
        assert isinstance(config, cls.Config)
        return Digits(config.count)

    async def open(self, row: int, seed: int) -> list[Message]:
        digits = Digits(self.config.count)
        self._number = digits.number(row)
        return digits.prompt(self._number)

    async def step(self, action: Action) -> Step:
        return Step(reward=float(action.text == str(self._number)), done=True)
