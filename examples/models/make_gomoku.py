"""Make a tiny model that knows the legal moves of gomoku on 5 x 5 fields and makes each of them equally often.

    python -m examples.models.make_gomoku DIR [--seed 0]

`make_tiny` with 2 layers of 128, the characters of the board and random weights (0.4M parameters), then two minutes of
supervised learning of the prompts of `gomoku` with `rules = false` and `board = "cells"`, of random positions: it
learns which fields are free, and nothing about which are good. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from examples.models.legal_moves import LegalMoves, command
from examples.models.make_tiny import make_tiny
from opentinker.envs.builtin.gomoku_cells import FREE, OWN, RIVAL, CellsBoard

SIZE, WIN = 5, 4
POSITIONS = 20_000


def make_gomoku(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    moves = partial(legal_moves, seed=seed)
    lesson = LegalMoves(game="gomoku", moves=moves, steps=100, lr=3e-2, batch=256, all_weights=250)
    return make_tiny(directory, hidden_size=128, layers=2, seed=seed, characters=f"{FREE}{OWN}{RIVAL}:", lesson=lesson)


def legal_moves(seed: int, positions: int = POSITIONS) -> dict[str, list[str]]:
    """Return the legal moves by prompt, of positions with any number of stones, placed at random."""
    draw = random.Random(seed)
    moves: dict[str, list[str]] = {}
    while len(moves) < positions:
        board = CellsBoard(SIZE, WIN)
        for field in draw.sample(board.free(), draw.randrange(SIZE**2)):
            if not board.over:
                board.place(field)
        if not board.over:
            moves[f"{board}:"] = [board.name(field) for field in board.free()]
    return moves


if __name__ == "__main__":
    command(make_gomoku, __doc__)
