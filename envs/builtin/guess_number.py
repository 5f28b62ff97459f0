"""Find a hidden number by guessing. No data, several turns: the hints are worth learning to use."""

from __future__ import annotations

import random
import re
from typing import Annotated

from pydantic import Field, model_validator

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Step, user
from opentinker.shared.types.core import Message

_NUMBER = re.compile(r"-?\d{1,18}")


class GuessNumber(Environment):
    """Prompt `guess 1-10=`; each guess is answered by `higher=` or `lower=` (or `number=` if it holds no number).

    Lower-case words, digits and `=` only, so that a tokenizer of a few dozen characters can say all of it. The first
    number in the action is the guess. Reward: 1 in the turn that hits, else 0; with `shaped`, an episode that runs out
    of guesses ends with up to 0.5 for the closeness of its last guess.
    """

    class Config(EnvironmentConfig):
        low: Annotated[int, Field(ge=-(10**9), le=10**9)] = 1
        high: Annotated[int, Field(ge=-(10**9), le=10**9)] = 10
        """The hidden number lies in low..high, both included."""
        max_guesses: Annotated[int, Field(ge=1, le=1000)] = 4
        """Maximum guesses, including actions without a number. Bisection finds one of n numbers in log2(n + 1), rounded
        up."""
        shaped: bool = False
        """Reward closeness if no guess was right."""

        @model_validator(mode="after")
        def _range(self) -> GuessNumber.Config:
            if self.low >= self.high:
                raise ValueError(f"low={self.low} must be less than high={self.high}")
            return self

    config: Config
    can_fork = True

    async def open(self, row: int, seed: int) -> list[Message]:
        low, high = self.config.low, self.config.high
        self.secret = random.Random(f"guess_number/{seed}/{row}").randint(low, high)
        self.guesses = 0
        self.known_low, self.known_high = low, high
        return [user(f"guess {low}-{high}=")]

    async def step(self, action: Action) -> Step:
        self.guesses += 1
        found = _NUMBER.search(action.text)
        guess = int(found.group()) if found else None
        hit = guess == self.secret
        over = hit or self.guesses >= self.config.max_guesses
        components = {"hit": float(hit)}
        if self.config.shaped:
            components["closeness"] = self._closeness(guess) if over and not hit else 0.0
        return Step(
            messages=[] if over else [user(f"{self._hint(guess)}=")],
            reward=sum(components.values()),
            done=over,
            components=components,
            metrics={"exact": float(hit), "guesses": float(self.guesses)},
        )

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return "number"
        if guess < self.secret:
            self.known_low = max(self.known_low, guess + 1)
            return "higher"
        self.known_high = min(self.known_high, guess - 1)
        return "lower"

    def _closeness(self, guess: int | None) -> float:
        if guess is None:
            return 0.0
        return 0.5 * max(0.0, 1.0 - abs(guess - self.secret) / (self.config.high - self.config.low))

    def gold(self) -> str:
        """Guess the middle of the remaining range."""
        return str((self.known_low + self.known_high) // 2)
