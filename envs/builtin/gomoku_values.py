"""Rates the moves of m,n,k games on small boards: wins that the other side cannot prevent, found by search, and for all
other moves the shape of the position."""

from __future__ import annotations

import math
from functools import cache, lru_cache

from opentinker.envs.builtin.gomoku_board import Board, lines

DISCOUNT = 0.9
"""Per move, so that a quick win is worth more than a late one."""
FORCING_MOVES = 2
"""Threats in sequence, each with one answer, that the search looks ahead of the double threat that wins."""
SHAPE_WORTH = 0.3
"""Bound on the rating of a position that neither side is known to win."""
SHAPE_SCALE = 12.0
CACHED = 1 << 14
"""Positions whose ratings a process keeps, about 1 KB each; of the search, four times as many numbers."""


def move_values(board: Board) -> dict[int, float]:
    """Return the rating of each free field for the side that moves next, from -1 (lost) to 1 (wins at once).

    A game that the search finds won is worth 1, discounted by the moves until then, and a full board 0. Otherwise the
    rating is `SHAPE_WORTH * tanh(difference / SHAPE_SCALE)`, with the difference between both sides in the runs that
    hold stones of one side alone, weighted by `n ** 2 + n - 1` for n stones.
    """
    own = sum(1 << field for field, stone in enumerate(board.fields) if stone == board.next)
    taken = sum(1 << field for field, stone in enumerate(board.fields) if stone)
    return _move_values(board.size, board.win, own, taken ^ own)


@cache
def _runs(size: int, win: int) -> tuple[int, ...]:
    """Return the runs of `win` fields as bit masks."""
    return tuple(sum(1 << field for field in run) for run in lines(size, win).runs)


@lru_cache(CACHED)
def _move_values(size: int, win: int, own: int, rival: int) -> dict[int, float]:
    runs, full = _runs(size, win), (1 << size * size) - 1
    values = {}
    for field in range(size * size):
        if (own | rival) >> field & 1:
            continue
        moved = own | 1 << field
        if any(moved & run == run for run in runs if run >> field & 1):
            values[field] = 1.0
        elif moved | rival == full:
            values[field] = 0.0
        else:
            forced = -DISCOUNT * _forced(size, win, rival, moved, FORCING_MOVES)
            values[field] = forced or SHAPE_WORTH * math.tanh(_shape(runs, moved, rival) / SHAPE_SCALE)
    return values


@lru_cache(4 * CACHED)
def _forced(size: int, win: int, own: int, rival: int, depth: int) -> float:
    """Return the value of the position for `own`, which moves, if threats decide it, otherwise 0."""
    blocks, pairs = 0, []
    for run in _runs(size, win):
        mine, theirs = run & own, run & rival
        if not theirs:
            if (stones := mine.bit_count()) == win - 1:
                return 1.0
            if stones == win - 2:
                pairs.append(run ^ mine)
        elif not mine and theirs.bit_count() == win - 1:
            blocks |= run ^ theirs
    full = (1 << size * size) - 1
    if blocks:
        if blocks & (blocks - 1):
            return -DISCOUNT
        return -DISCOUNT * _forced(size, win, rival, own | blocks, depth) if own | rival | blocks != full else 0.0
    answers: dict[int, int] = {}
    for pair in pairs:
        first = pair & -pair
        for move in (first, pair ^ first):
            answers[move] = answers.get(move, 0) | (pair ^ move)
    if any(answer & (answer - 1) for answer in answers.values()):
        return DISCOUNT**2
    if not depth:
        return 0.0
    after = (_forced(size, win, own | move, rival | answer, depth - 1) for move, answer in answers.items())
    return max(0.0, *(DISCOUNT**2 * value for value in after), 0.0)


def _shape(runs: tuple[int, ...], own: int, rival: int) -> int:
    total = 0
    for run in runs:
        mine, theirs = (run & own).bit_count(), (run & rival).bit_count()
        if mine and not theirs:
            total += mine * mine + mine - 1
        elif theirs and not mine:
            total -= theirs * theirs + theirs - 1
    return total
