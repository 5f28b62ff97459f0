"""Tic-tac-toe: two seats, each with a view of the same board, and two bots."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from string import ascii_lowercase
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from opentinker.envs.base import Action, Bot, Environment, EnvironmentConfig, Opening, Step, user
from opentinker.envs.builtin.gomoku_board import BLACK, STONES, WHITE, Board, lines, other

SIDE = 3
FIRST, SECOND = "first", "second"
RIVAL = {FIRST: SECOND, SECOND: FIRST}
MOST_RANDOM_STONES = 4
"""At the start: they end no game."""
_NUMBER = re.compile(r"(?<!\d)[1-9](?!\d)")


class TicTacToe(Environment):
    """Every turn begins a new context with the board, whose free fields show their numbers; an answer names one, like
    `5`; the last number in it counts.

    Reward `outcome`: 1 won, 0 drawn, -1 lost; or `progress`, see Config. An answer that names no free field loses the
    game, and the other seat wins it, so that the rewards of both always sum to 0.
    """

    class Config(EnvironmentConfig):
        random_stones: Literal[0, 2, 4] = 0
        """Stones on the board at the start, placed by row and seed, so that games differ."""
        rules: bool = True
        """Begin every turn with the rules in a sentence; false for models that learn from random weights."""
        board: Literal["rows", "cells"] = "rows"
        """`cells`: a line with a character per field, which says both the field and its owner, seen by the seat that
        acts: own stones are a to i, those of the other seat j to r, free fields show their numbers. For models that
        learn from random weights: the characters alone, without their places, are the position."""
        progress: bool = False
        """Reward every move immediately, instead of the outcome: the value of perfect play after the move, less its
        value before. That is 0 for the best moves and below 0 for mistakes; the other seat gets the opposite. An answer
        that names no free field costs one more than the loss of the game. For tree sampling, which compares the
        candidates of a turn by their immediate rewards."""
        random_moves: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
        """Probability that the next move, of either seat, is made at random by the environment. Policies then meet
        many more positions than their own play leads to. `progress` gives no reward for such a move."""

    config: Config
    can_fork = True
    seats = (FIRST, SECOND)
    bots: ClassVar[Mapping[str, Bot]] = {
        "random": lambda game: _name(game.draw.choice(game.board.free())),
        "perfect": lambda game: _name(game.draw.choice(game.best())),
    }

    async def open(self, row: int, seed: int) -> Opening:
        self.draw = random.Random(f"tictactoe/{seed}/{row}")
        self.board = Board(SIDE, SIDE)
        for field in self.draw.sample(self.board.free(), self.config.random_stones):
            self.board.place(field)
        while self.board.played < MOST_RANDOM_STONES and self.draw.random() < self.config.random_moves:
            self.board.place(self.draw.choice(self.board.free()))
        return Opening(messages=[user(self._prompt())], seat=self._seat, stream=self._stream)

    async def step(self, action: Action) -> Step:
        mover, before = self._seat, self._value()
        named = _NUMBER.findall(action.text)
        field = int(named[-1]) - 1 if named else None
        if field is None or self.board.fields[field]:
            return self._end(mover, -1, -2 - before, forfeit=True)
        self.board.place(field)
        progress = -self._value() - before
        while not self.board.over and self.draw.random() < self.config.random_moves:
            self.board.place(self.draw.choice(self.board.free()))
        if self.board.over:
            return self._end(mover, self._outcome(mover), progress)
        asked = Step(messages=[user(self._prompt())], seat=self._seat, stream=self._stream, metrics=self._metrics())
        return self._pay(asked, mover, 0, progress)

    def gold(self) -> str:
        return _name(self.best()[0])

    def best(self) -> tuple[int, ...]:
        """Return the moves with the best outcome against perfect play."""
        return _solve(tuple(self.board.fields), self.board.next)[1]

    def _value(self) -> int:
        """Return the outcome for the seat that acts next, if both play perfectly from here."""
        return _solve(tuple(self.board.fields), self.board.next)[0]

    def _outcome(self, seat: str) -> int:
        """Return the outcome of a game that is over: 1, 0 or -1."""
        stone = BLACK if seat == FIRST else WHITE
        return 0 if not self.board.winner else 1 if self.board.winner == stone else -1

    @property
    def _seat(self) -> str:
        return FIRST if self.board.next == BLACK else SECOND

    @property
    def _stream(self) -> str:
        return str(self.board.played)

    def _prompt(self) -> str:
        stone = STONES[self.board.next]
        if self.config.board == "cells":
            rules = "tic-tac-toe, 3 in a row win. you have a to i, the other j to r. say the number of a free field.\n"
            return f"{rules if self.config.rules else ''}{cells(self.board.fields, self.board.next)}:"
        signs = [STONES[stone] if stone else _name(field) for field, stone in enumerate(self.board.fields)]
        rows = "\n".join("".join(signs[start : start + SIDE]) for start in range(0, SIDE * SIDE, SIDE))
        rules = f"tic-tac-toe, 3 in a row win. you are {stone}. say the number of a free field.\n"
        return f"{rules if self.config.rules else ''}{rows}\n{stone}:"

    def _end(self, mover: str, outcome: int, progress: int, *, forfeit: bool = False) -> Step:
        won = mover if outcome > 0 else RIVAL[mover] if outcome < 0 else ""
        last = {"forfeit": float(forfeit), "draw": float(not won), "first_won": float(won == FIRST)}
        return self._pay(Step(done=True, metrics=self._metrics() | last), mover, outcome, progress)

    def _pay(self, step: Step, mover: str, outcome: int, progress: int) -> Step:
        """Return the step with what the mover earns, and the opposite for the other seat."""
        part, earned = ("progress", progress) if self.config.progress else ("outcome", outcome)
        step.reward, step.components = float(earned), {part: float(earned)}
        step.rewards = {RIVAL[mover]: {part: float(-earned)}}
        return step

    def _metrics(self) -> dict[str, float]:
        return {"moves": float(self.board.played), "forfeit": 0.0, "draw": 0.0, "first_won": 0.0}


def cells(fields: Sequence[str], mover: str) -> str:
    """Return the board as the mover sees it with `board = "cells"`: stones by field, a to i own, j to r the other's."""
    return "".join(
        _name(field) if not stone else ascii_lowercase[field + (0 if stone == mover else SIDE * SIDE)]
        for field, stone in enumerate(fields)
    )


def positions() -> list[tuple[tuple[str, ...], str]]:
    """Return all positions in which a move can be made: the fields, and whose move it is."""
    found = {(("",) * SIDE**2, BLACK): None}
    todo = list(found)
    while todo:
        fields, mover = todo.pop()
        for field in (field for field, stone in enumerate(fields) if not stone):
            after = ((*fields[:field], mover, *fields[field + 1 :]), other(mover))
            if after not in found and not _is_over(after[0]):
                found[after] = None
                todo.append(after)
    return list(found)


def _is_over(fields: tuple[str, ...]) -> bool:
    return all(fields) or any(
        fields[run[0]] and all(fields[field] == fields[run[0]] for field in run) for run in lines(SIDE, SIDE).runs
    )


def _name(field: int) -> str:
    return str(field + 1)


@cache
def _solve(fields: tuple[str, ...], mover: str) -> tuple[int, tuple[int, ...]]:
    """Return the outcome for the mover under perfect play of both (1, 0, -1), and the moves that reach it."""
    rival = other(mover)
    if any(all(fields[field] == rival for field in run) for run in lines(SIDE, SIDE).runs):
        return -1, ()
    outcomes = {
        field: -_solve((*fields[:field], mover, *fields[field + 1 :]), rival)[0]
        for field, stone in enumerate(fields)
        if not stone
    }
    best = max(outcomes.values(), default=0)
    return best, tuple(field for field, outcome in outcomes.items() if outcome == best)


_solve(("",) * SIDE**2, BLACK)  # during the import: no episode waits for it
