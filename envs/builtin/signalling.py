"""A signalling game (Lewis 1969, "Convention"): a speaker sees a symbol, a listener hears one message and names it."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from opentinker.envs.base import Action, Environment, EnvironmentConfig, Opening, Step, user

SPEAKER, LISTENER = "speaker", "listener"
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
MESSAGE_CHARACTERS = 64
"""Characters of a message that the listener hears, however long its tokens are."""


class Signalling(Environment):
    """Both seats get 1 if the listener's answer is the symbol, else 0. What a message means is theirs to agree on, so
    two policies that were trained apart do not understand each other.

    The listener's prompt holds the speaker's text as it is, without the end of turn. An answer is right if it is the
    symbol and nothing else, apart from white space and case.
    """

    class Config(EnvironmentConfig):
        symbols: Annotated[int, Field(ge=2, le=len(ALPHABET))] = 8
        """Number of symbols: digits, then letters."""
        tokens: Annotated[int, Field(ge=1, le=64)] = 1
        """Most tokens of the message, and of the answer."""
        rules: bool = True
        """Begin both prompts with the rules in a sentence. False for models that learn from random weights: the prompts
        are then `3>` and `q<`, because in a longer one such a model hardly tells the symbols apart."""

    config: Config
    can_fork = True
    seats = (SPEAKER, LISTENER)

    async def open(self, row: int, seed: int) -> Opening:
        symbols = ALPHABET[: self.config.symbols]
        self.symbol = random.Random(f"signalling/{seed}/{row}").choice(symbols)
        self.heard: str | None = None
        rules = f"you are the speaker. tell the listener which of {symbols} you see.\nsee {self.symbol}, say:"
        text = rules if self.config.rules else f"{self.symbol}>"
        return Opening(messages=[user(text)], seat=SPEAKER, max_tokens=self.config.tokens)

    async def step(self, action: Action) -> Step:
        if self.heard is None:
            self.heard = action.text[:MESSAGE_CHARACTERS]
            symbols = ALPHABET[: self.config.symbols]
            rules = f"you are the listener. name the one of {symbols} that the speaker sees.\nhear {self.heard}, see:"
            text = rules if self.config.rules else f"{self.heard}<"
            return Step(messages=[user(text)], components={"exact": 0.0}, seat=LISTENER, max_tokens=self.config.tokens)
        exact = float(action.text.strip().lower() == self.symbol)
        return Step(
            done=True,
            reward=exact,
            components={"exact": exact},
            rewards={SPEAKER: {"exact": exact}},
            metrics={"exact": exact},
        )

    def gold(self) -> str:
        """Return the symbol: the convention of saying what one sees."""
        return self.symbol if self.heard is None else self.heard
