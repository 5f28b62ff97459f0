"""Matching pennies: two seats show a coin at the same time. The only equilibrium is to play either side equally
often."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import ClassVar

from opentinker.envs.base import Action, Bot, Environment, EnvironmentConfig, Opening, Step, user

EVEN, ODD = "even", "odd"
_WORD = re.compile(r"(?<![\w'])[a-z]+(?![\w'])")
SIDES = {"heads": "h", "tails": "t", "h": "h", "t": "t"}
"""Words of an answer, and the side that each means."""
_GOALS = {EVEN: "the same", ODD: "different"}


class MatchingPennies(Environment):
    """`even` wins if both coins show the same side, `odd` if they differ. The game is a single round of both seats.

    An answer is h, t, heads or tails; the last one in it counts. Reward `outcome`: 1 won, -1 lost. An answer without a
    side loses to one with a side; two of them are a draw, so that the rewards of both always sum to 0.
    """

    class Config(EnvironmentConfig):
        rules: bool = True
        """Name the game and its goal; false: the name of the seat, like `odd=`, for models that learn from random
        weights."""

    config: Config
    can_fork = True
    seats = (EVEN, ODD)
    bots: ClassVar[Mapping[str, Bot]] = {
        "random": lambda game: game.draw.choice("ht"),
        "heads": lambda _: "h",
    }

    async def open(self, row: int, seed: int) -> Opening:
        self.draw = random.Random(f"matching_pennies/{seed}/{row}")
        return Opening(acting={seat: [user(text)] for seat, text in prompts(rules=self.config.rules).items()})

    async def step_all(self, actions: list[Action]) -> Step:
        even, odd = coins = [_side(action.text) for action in actions]
        outcome = 1.0 if even == odd else -1.0
        if not (even and odd):
            outcome = float(bool(even)) - float(bool(odd))
        heads = {f"heads/{seat}": float(coin == "h") for seat, coin in zip(self.seats, coins, strict=True) if coin}
        return Step(
            done=True,
            rewards={EVEN: {"outcome": outcome}, ODD: {"outcome": 0.0 - outcome}},
            metrics={"illegal": float(coins.count("")), **heads},
        )


def prompts(*, rules: bool) -> dict[str, str]:
    """Return the prompt of each seat."""
    if not rules:
        return {seat: f"{seat}=" for seat in (EVEN, ODD)}
    return {seat: f"matching pennies. you win if the coins are {goal}. say h or t:" for seat, goal in _GOALS.items()}


def _side(text: str) -> str:
    """Return the last side that the answer names, `h` or `t`; empty if it names neither."""
    named = [SIDES[word] for word in _WORD.findall(text.lower()) if word in SIDES]
    return named[-1] if named else ""
