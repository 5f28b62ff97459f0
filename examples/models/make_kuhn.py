"""Make a tiny model that knows the legal moves of Kuhn poker and plays each of them equally often.

    python -m examples.models.make_kuhn DIR [--seed 0]

`make_tiny` with random weights, then some seconds of supervised learning of the 12 prompts of `kuhn_poker` with
`rules = false`. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.models.legal_moves import teach
from examples.models.make_tiny import STAMP, make_tiny
from opentinker.envs.builtin.kuhn_poker import prompts
from opentinker.envs.builtin.kuhn_rules import actions_of

STEPS, LR = 300, 3e-3


def make_kuhn(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    directory = Path(directory)
    stamp = directory / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == _stamp(seed):
        return directory
    make_tiny(directory, seed=seed)
    moves = {text: actions_of(history) for (_, history), text in prompts(rules=False).items()}
    teach(directory, moves, steps=STEPS, lr=LR)
    stamp.write_text(json.dumps(_stamp(seed)))
    return directory


def _stamp(seed: int) -> dict[str, int]:
    return {"kuhn_poker_steps": STEPS, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"model in {make_kuhn(options.directory, seed=options.seed)}")


if __name__ == "__main__":
    main()
