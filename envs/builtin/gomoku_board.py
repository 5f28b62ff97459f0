"""Rules of m,n,k games on a square board, and two players: a bot to learn against, an expert to test with.

Free-style gomoku: black begins, the first to have `win` or more stones in an unbroken row, column or diagonal wins, a
full board is a draw.
"""

from __future__ import annotations

import random
import re
import string
from functools import cache
from typing import NamedTuple

BLACK, WHITE = "black", "white"
FIELD = re.compile(r"\b[a-z][1-9][0-9]?\b")
STONES = {BLACK: "x", WHITE: "o", "": "."}


class Lines(NamedTuple):
    """All runs of `win` fields on a board, and the runs of each field."""

    runs: tuple[tuple[int, ...], ...]
    through: tuple[tuple[int, ...], ...]

    def __deepcopy__(self, _: object) -> Lines:
        """Return itself: copies of a game share the table."""
        return self


@cache
def lines(size: int, win: int) -> Lines:
    runs = [
        tuple((row + i * down) * size + column + i * right for i in range(win))
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        for row in range(size)
        for column in range(size)
        if row + (win - 1) * down < size and 0 <= column + (win - 1) * right < size
    ]
    through: list[list[int]] = [[] for _ in range(size * size)]
    for number, run in enumerate(runs):
        for field in run:
            through[field].append(number)
    return Lines(tuple(runs), tuple(map(tuple, through)))


def other(colour: str) -> str:
    return WHITE if colour == BLACK else BLACK


class ParsedMove(NamedTuple):
    """The move in an answer."""

    field: int | None
    """The last free field that it names."""
    problem: str = ""
    wrong: float = 0.0
    """Distance from a move: 1 names no field, 3/4 one whose column and row are off the board, 1/2 one with either on
    it, 1/4 a taken one."""


class Board:
    """Fields are numbered row by row; as text, column and row: 0 is `a1`."""

    def __init__(self, size: int, win: int) -> None:
        self.size, self.win = size, win
        self.lines = lines(size, win)
        self.fields = [""] * (size * size)
        self.stones = {colour: [0] * len(self.lines.runs) for colour in (BLACK, WHITE)}
        """Stones of each colour in each run."""
        self.next = BLACK
        self.played = 0
        self.winner = ""

    @property
    def over(self) -> bool:
        return bool(self.winner) or self.played == len(self.fields)

    def free(self) -> list[int]:
        return [field for field, colour in enumerate(self.fields) if not colour]

    def place(self, field: int) -> None:
        """Play a move of the next colour. Raise ValueError if it is against the rules."""
        if self.over or self.fields[field]:
            raise ValueError(f"{self.name(field)} is taken, or the game is over")
        colour = self.next
        self.fields[field] = colour
        for run in self.lines.through[field]:
            self.stones[colour][run] += 1
            if self.stones[colour][run] == self.win:
                self.winner = colour
        self.played += 1
        self.next = other(colour)

    def name(self, field: int) -> str:
        return f"{string.ascii_lowercase[field % self.size]}{field // self.size + 1}"

    def field(self, name: str) -> int | None:
        """Return the number of a field; None if it is off the board."""
        column, row = string.ascii_lowercase.find(name[0]), int(name[1:]) - 1
        return row * self.size + column if 0 <= column < self.size and 0 <= row < self.size else None

    def read(self, text: str) -> ParsedMove:
        named = FIELD.findall(text.lower())
        if not named:
            return ParsedMove(None, "no field was named", 1.0)
        field = self.field(named[-1])
        if field is None:
            column, row = string.ascii_lowercase.index(named[-1][0]), int(named[-1][1:])
            wrong = 0.5 if column < self.size or row <= self.size else 0.75
            return ParsedMove(None, f"{named[-1]} is not on the board", wrong)
        return ParsedMove(None, f"{named[-1]} is taken", 0.25) if self.fields[field] else ParsedMove(field)

    def __str__(self) -> str:
        width = len(str(self.size))
        head = " " * width + " " + string.ascii_lowercase[: self.size]
        rows = [
            f"{row + 1:{width}} " + "".join(STONES[colour] for colour in self.fields[row * self.size :][: self.size])
            for row in range(self.size)
        ]
        return "\n".join([head, *rows])

    # --- what players look at -------------------------------------------------------------------------------------

    def completes(self, colour: str) -> list[int]:
        """Return free fields where a stone of that colour wins."""
        own, others = self.stones[colour], self.stones[other(colour)]
        last = self.win - 1
        found = {
            field
            for run, fields in enumerate(self.lines.runs)
            if own[run] == last and not others[run]
            for field in fields
            if not self.fields[field]
        }
        return sorted(found)

    def threats(self, colour: str) -> list[int]:
        """Return free fields where a stone of that color would threaten to win at two other fields."""
        own, others = self.stones[colour], self.stones[other(colour)]
        found = []
        for field in self.free():
            ends = {
                end
                for run in self.lines.through[field]
                if own[run] == self.win - 2 and not others[run]
                for end in self.lines.runs[run]
                if end != field and not self.fields[end]
            }
            if len(ends) > 1:
                found.append(field)
        return found

    def worth(self, field: int, colour: str) -> int:
        """Rate the runs through the field without stones of the other colour; fuller ones count more."""
        own, others = self.stones[colour], self.stones[other(colour)]
        return sum(4 ** own[run] for run in self.lines.through[field] if not others[run])


def bot(board: Board, draw: random.Random, random_moves: float) -> int:
    """Win if possible, block a win with the next stone, else extend the longest own run.

    It does not see earlier threats, which is how it can be beaten.
    """
    free = board.free()
    if draw.random() < random_moves:
        return draw.choice(free)
    mine, theirs = board.completes(board.next), board.completes(other(board.next))
    if mine or theirs:
        return draw.choice(mine or theirs)
    best = max(board.worth(field, board.next) for field in free)
    return draw.choice([field for field in free if board.worth(field, board.next) == best])


def expert(board: Board) -> int:
    """Search one threat deeper than the bot: make double threats and prevent those of the opponent."""
    own, rival = board.next, other(board.next)
    urgent = board.completes(own) or board.completes(rival) or board.threats(own)
    fields = urgent or board.threats(rival) or board.free()
    middle = (board.size - 1) / 2

    def value(field: int) -> tuple[float, float]:
        row, column = divmod(field, board.size)
        return board.worth(field, own) + 0.9 * board.worth(field, rival), -abs(row - middle) - abs(column - middle)

    return max(fields, key=value)
