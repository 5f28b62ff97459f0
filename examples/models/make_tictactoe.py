"""Make a tiny model that knows the legal moves of tic-tac-toe and makes each of them equally often.

    python -m examples.models.make_tictactoe DIR [--seed 0]

`make_tiny` with 2 layers of 128 and random weights (0.4M parameters), then half a minute of supervised learning of the
prompts of `tictactoe` with `rules = false` and `board = "cells"`: it learns which fields are free, and nothing about
which are good. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

from pathlib import Path

from examples.models.legal_moves import LegalMoves, command
from examples.models.make_tiny import make_tiny
from opentinker.envs.builtin.tictactoe import cells, positions


def make_tictactoe(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    lesson = LegalMoves(game="tictactoe", moves=_moves, steps=200, lr=3e-3, batch=256)
    return make_tiny(directory, hidden_size=128, layers=2, seed=seed, lesson=lesson)


def _moves() -> dict[str, list[str]]:
    return {
        f"{cells(fields, mover)}:": [str(place + 1) for place, stone in enumerate(fields) if not stone]
        for fields, mover in positions()
    }


if __name__ == "__main__":
    command(make_tictactoe, __doc__)
