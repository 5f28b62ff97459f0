"""Kuhn poker: two seats with hidden cards, small enough to compute how far a policy is from an equilibrium."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import ClassVar

from opentinker.envs.base import Action, Bot, Environment, EnvironmentConfig, Opening, Step, user
from opentinker.envs.builtin.kuhn_rules import (
    CARDS,
    FIRST,
    INFORMATION_SETS,
    SECOND,
    InformationSet,
    actions_of,
    equilibrium,
    mover_of,
    payoff,
)

FORFEIT = 2
"""Chips that an illegal answer pays to the other seat: the most that a hand can cost."""
_RULES = "kuhn poker: j, q, k, one card each, 1 chip each in the pot.\n"
_SITUATIONS = {
    "": "c to check, b to bet:",
    "c": "first checked. c to check, b to bet:",
    "b": "first bet. c to call, f to fold:",
    "cb": "you checked, second bet. c to call, f to fold:",
}
_WORD = re.compile(r"(?<![\w'])[a-z]+(?![\w'])")
WORDS = {"check": "c", "call": "c", "bet": "b", "fold": "f", "c": "c", "b": "b", "f": "f"}
_EQUILIBRIUM = equilibrium(1 / 3)


def prompt_of(card: str, history: str, *, rules: bool = True) -> str:
    """Return the prompt of an information set, the whole of what its seat is shown."""
    return f"{_RULES}you have {card}. {_SITUATIONS[history]}" if rules else f"{card}{history}="


def prompts(*, rules: bool = True) -> dict[InformationSet, str]:
    """Return the 12 prompts, to read a policy's probabilities for `kuhn_rules.exploitability`."""
    return {(card, history): prompt_of(card, history, rules=rules) for card, history in INFORMATION_SETS}


class KuhnPoker(Environment):
    """One hand. Every turn begins a new context, whose prompt is the information set and nothing else.

    An answer is a letter or a word: c, b, f, check, bet, call, fold; the last legal one in it counts. The reward is the
    seat's chips (component `chips`): 1 or 2, won or lost. An answer without a legal move ends the hand and pays FORFEIT
    chips to the other seat, so that the rewards of both always sum to 0.
    """

    class Config(EnvironmentConfig):
        rules: bool = True
        """Name the game, the card and the moves; false: card and moves so far, like `kcb=`, for models that learn from
        random weights."""

    config: Config
    can_fork = True
    seats = (FIRST, SECOND)
    bots: ClassVar[Mapping[str, Bot]] = {
        "random": lambda game: game.draw_move(0.5),
        "equilibrium": lambda game: game.draw_move(_EQUILIBRIUM[game.information_set]),
    }

    async def open(self, row: int, seed: int) -> Opening:
        self.draw = random.Random(f"kuhn_poker/{seed}/{row}")
        first, second = self.draw.sample(CARDS, 2)
        self.cards, self.history = (first, second), ""
        return Opening(messages=[user(self._prompt())], seat=FIRST, stream="0")

    async def step(self, action: Action) -> Step:
        mover, legal = mover_of(self.history), actions_of(self.history)
        said = [WORDS[word] for word in _WORD.findall(action.text.lower()) if word in WORDS]
        moves = [move for move in said if move in legal]
        if not moves:
            return self._end(mover, -FORFEIT, illegal=True)
        self.history += moves[-1]
        chips = payoff(self.cards, self.history)
        if chips is not None:
            return self._end(mover, chips if mover == FIRST else -chips)
        return Step(
            messages=[user(self._prompt())],
            components={"chips": 0.0},
            seat=mover_of(self.history),
            stream=str(len(self.history)),
            metrics=self._metrics(),
        )

    @property
    def information_set(self) -> InformationSet:
        """The card of the seat that acts, and the moves so far."""
        return self.cards[len(self.history) % 2], self.history

    def draw_move(self, active: float) -> str:
        """Return the active move (bet or call) with this probability, else the passive one."""
        return actions_of(self.history)[self.draw.random() < active]

    def _prompt(self) -> str:
        return prompt_of(*self.information_set, rules=self.config.rules)

    def _end(self, mover: str, chips: int, *, illegal: bool = False) -> Step:
        rival = SECOND if mover == FIRST else FIRST
        return Step(
            done=True,
            reward=float(chips),
            components={"chips": float(chips)},
            rewards={rival: {"chips": float(-chips)}},
            metrics=self._metrics() | {"illegal": float(illegal)},
        )

    def _metrics(self) -> dict[str, float]:
        return {"illegal": 0.0, "bet": float("b" in self.history)}
