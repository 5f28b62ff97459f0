"""Make a tiny model that knows the legal moves of gomoku on 5 x 5 fields and makes each of them equally often.

    python -m examples.models.make_gomoku DIR [--seed 0]

`make_tiny` with 2 layers of 128, the characters of the board and random weights (0.4M parameters), then two minutes of
supervised learning of the prompts of `gomoku` with `rules = false` and `board = "cells"`, of random positions: it
learns which fields are free, and nothing about which are good. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from examples.models.legal_moves import teach
from examples.models.make_tiny import STAMP, make_tiny
from opentinker.envs.builtin.gomoku_cells import FREE, OWN, RIVAL, CellsBoard

SIZE, WIN = 5, 4
POSITIONS, STEPS, ALL_WEIGHTS, BATCH, LR = 20_000, 100, 250, 256, 3e-2


def make_gomoku(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    directory = Path(directory)
    stamp = directory / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == _stamp(seed):
        return directory
    make_tiny(directory, hidden_size=128, layers=2, seed=seed, characters=f"{FREE}{OWN}{RIVAL}:")
    teach(directory, _moves(random.Random(seed)), steps=STEPS, lr=LR, batch=BATCH, all_weights=ALL_WEIGHTS)
    stamp.write_text(json.dumps(_stamp(seed)))
    return directory


def _moves(draw: random.Random) -> dict[str, list[str]]:
    """Return the legal moves by prompt, of positions with any number of stones, placed at random."""
    moves: dict[str, list[str]] = {}
    while len(moves) < POSITIONS:
        board = CellsBoard(SIZE, WIN)
        for field in draw.sample(board.free(), draw.randrange(SIZE**2)):
            if not board.over:
                board.place(field)
        if not board.over:
            moves[f"{board}:"] = [board.name(field) for field in board.free()]
    return moves


def _stamp(seed: int) -> dict[str, int]:
    return {"gomoku_steps": STEPS + ALL_WEIGHTS, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"model in {make_gomoku(options.directory, seed=options.seed)}")


if __name__ == "__main__":
    main()
