"""Make a tiny model that knows the legal moves of tic-tac-toe and makes each of them equally often.

    python -m examples.models.make_tictactoe DIR [--seed 0]

`make_tiny` with 2 layers of 128 and random weights (0.4M parameters), then half a minute of supervised learning of the
prompts of `tictactoe` with `rules = false` and `board = "cells"`: it learns which fields are free, and nothing about
which are good. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.models.legal_moves import teach
from examples.models.make_tiny import STAMP, make_tiny
from opentinker.envs.builtin.tictactoe import cells, positions

STEPS, BATCH, LR = 200, 256, 3e-3


def make_tictactoe(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    directory = Path(directory)
    stamp = directory / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == _stamp(seed):
        return directory
    make_tiny(directory, hidden_size=128, layers=2, seed=seed)
    moves = {
        f"{cells(fields, mover)}:": [str(place + 1) for place, stone in enumerate(fields) if not stone]
        for fields, mover in positions()
    }
    teach(directory, moves, steps=STEPS, lr=LR, batch=BATCH)
    stamp.write_text(json.dumps(_stamp(seed)))
    return directory


def _stamp(seed: int) -> dict[str, int]:
    return {"tictactoe_steps": STEPS, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"model in {make_tictactoe(options.directory, seed=options.seed)}")


if __name__ == "__main__":
    main()
