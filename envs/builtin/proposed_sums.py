"""A proposer writes an addition, solvers answer it, and the proposer earns most where half of them are right."""

from __future__ import annotations

import random
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Opening, Prompt, Step, user

PROPOSER = "proposer"
_BEFORE = r"(?<![-\u2212\d.,])"
_WRITTEN = re.compile(_BEFORE + r"[-\u2212\d.,]*\d", re.ASCII)
"""Whatever is written like a number, with its sign."""
_NUMBER = re.compile(r"(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
"""A number that may be right: no sum is negative."""


class ProposedSums(Environment):
    """The proposer earns `frontier`, 4 p (1 - p) where a share p of the solvers was right: 1 at a half, 0 if none or
    all were. Without an addition in its answer it earns 0 and no solver is asked. A solver earns `exact`: 1 or 0.

    Row and seed decide which first digits the proposer is asked for, so that groups differ; a proposer may write other
    numbers. Solvers see the addition alone, not how it was worded.
    """

    class Config(EnvironmentConfig):
        solvers: Annotated[int, Field(ge=2, le=16)] = 4
        """Number of the seats `solver_1`, `solver_2` and so on, which all get the same addition."""
        digits: Annotated[int, Field(ge=1, le=9)] = 4
        """Most digits of a number of the addition; one with more is no addition."""
        proposal_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
        """Most tokens of the proposal."""
        answer_tokens: Annotated[int, Field(ge=1, le=4096)] = 16
        """Most tokens of an answer, of which the last number counts."""

    config: Config
    can_fork = True

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self.solvers = tuple(f"solver_{number}" for number in range(1, self.config.solvers + 1))
        self.seats = (PROPOSER, *self.solvers)

    async def open(self, row: int, seed: int) -> Opening:
        draw = random.Random(f"proposed_sums/{seed}/{row}")
        self.first = draw.randint(1, 9), draw.randint(1, 9)
        self.numbers: tuple[int, int] | None = None
        task = (
            f"Write an addition of two numbers with at most {self.config.digits} digits each, for example "
            f"{self.first[0]} + {self.first[1]}. It should be so hard that about half of the answers to it are right. "
            "Write the addition alone."
        )
        return Opening(messages=[user(task)], seat=PROPOSER, max_tokens=self.config.proposal_tokens)

    async def step(self, action: Action) -> Step:
        digits = rf"\d{{1,{self.config.digits}}}"
        found = re.search(rf"{_BEFORE}({digits})\s*\+\s*({digits})(?![.,]?\d)", action.text, re.ASCII)
        if found is None:
            return Step(done=True, components={"frontier": 0.0}, metrics={"valid": 0.0})
        self.numbers = int(found[1]), int(found[2])
        asked = Prompt(messages=[user(self.question)], max_tokens=self.config.answer_tokens)
        return Step(acting=dict.fromkeys(self.solvers, asked), components={"frontier": 0.0})

    async def step_all(self, actions: list[Action]) -> Step:
        assert self.numbers is not None
        exact = {action.seat: float(_last_number(action.text) == sum(self.numbers)) for action in actions}
        solved = sum(exact.values()) / len(exact)
        rewards = {seat: {"exact": right} for seat, right in exact.items()}
        length = sum(len(str(number)) for number in self.numbers) / 2
        return Step(
            done=True,
            rewards={**rewards, PROPOSER: {"frontier": 4 * solved * (1 - solved)}},
            metrics={"valid": 1.0, "solved": solved, "digits": length},
        )

    @property
    def question(self) -> str:
        assert self.numbers is not None
        return f"{self.numbers[0]} + {self.numbers[1]} ="


def _last_number(text: str) -> Decimal | None:
    """Return the last number of an answer, as in 1046, 1,046 and 1046.0; None if it is negative, or not written so."""
    written = _WRITTEN.findall(text)
    return Decimal(written[-1].replace(",", "")) if written and _NUMBER.fullmatch(written[-1]) else None
