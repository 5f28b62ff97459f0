"""Grade-school word problems with a number as the answer. Real data: openai/grade-school-math, MIT (`data/gsm8k`)."""

from __future__ import annotations

import asyncio
import lzma
import re
import threading
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, Field

from opentinker.envs.base import Action, DataRows, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message

DATA = Path(__file__).parent.parent / "data" / "gsm8k"
INSTRUCTION = "Think step by step. Give the final answer as a number after ####."

_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\N{MINUS SIGN}])?"  # "10-5" ends in 5, not in -5
    r"[$€£]?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_HASHES = re.compile(r"####([^\n]*)")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
LONGEST = 40
"""Maximum characters of a number; longer ones answer no question."""


class Row(msgspec.Struct, frozen=True):
    question: str
    answer: str
    """The worked solution, ending in `#### number`."""


class Gsm8k(Environment):
    """One question, one answer, compared by value: 1,000 equals 1000.0.

    The answer is the text after the last `####`, otherwise the last `\\boxed{}`, otherwise the last number.
    """

    class Config(EnvironmentConfig):
        split: Literal["train", "test"] = "train"
        """`train`: 7,473 rows; `test`: 1,319."""
        instruction: str = INSTRUCTION
        """Added below every question; may be empty."""
        format_reward: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
        """Reward of a wrong answer with a number after `####`, for models that are rarely right."""

    config: Config

    @classmethod
    def data_rows(cls, config: BaseModel) -> Questions:
        assert isinstance(config, cls.Config)
        return Questions(config, read(config.split))

    async def open(self, row: int, seed: int) -> list[Message]:
        rows = Questions(self.config, await asyncio.to_thread(read, self.config.split))
        number = rows.number(row)
        self.row = rows.rows[number]
        return rows.prompt(number)

    async def step(self, action: Action) -> Step:
        said, wanted = answer_of(action.text), answer_of(self.row.answer)
        right = said is not None and said == wanted
        formed = any(_first(marked) is not None for marked in _HASHES.findall(action.text))
        reward = 1.0 if right else self.config.format_reward * formed
        metrics = {"exact": float(right), "answered": float(said is not None), "format": float(formed)}
        return Step(reward=reward, done=True, metrics=metrics)

    def gold(self) -> str:
        return self.row.answer


class Questions(DataRows):
    def __init__(self, config: Gsm8k.Config, rows: list[Row]) -> None:
        self.config, self.rows = config, rows

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, row: int) -> int:
        return row % len(self.rows)

    def prompt(self, number: int) -> list[Message]:
        parts = [self.rows[number].question, self.config.instruction]
        return [user("\n\n".join(part for part in parts if part))]


def read(split: str) -> list[Row]:
    """Return the rows of a split, read once per process. Blocking."""
    with _one_reader:
        return _read(split)


_one_reader = threading.Lock()


@cache
def _read(split: str) -> list[Row]:
    decoder = msgspec.json.Decoder(Row)
    with lzma.open(DATA / f"{split}.jsonl.xz") as lines:
        return [decoder.decode(line) for line in lines]


def answer_of(text: str) -> Decimal | None:
    """Return the number that the text gives as its answer, or None."""
    for marked in (_HASHES.findall(text), _BOXED.findall(text)):
        if marked:
            return _first(marked[-1])
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _first(text: str) -> Decimal | None:
    found = _NUMBER.search(text)
    return _value(found.group()) if found else None


def _value(number: str) -> Decimal | None:
    if len(number) > LONGEST:
        return None
    plain = number.replace("\N{MINUS SIGN}", "-")
    for sign in ",$€£":
        plain = plain.replace(sign, "")
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None
