"""Make a tiny model that shows heads and tails equally often in matching pennies.

    python -m examples.models.make_pennies DIR [--seed 0]

`make_tiny` with random weights, then some seconds of supervised learning of the two prompts of `matching_pennies` with
`rules = false`. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

from pathlib import Path

from examples.models.legal_moves import LegalMoves, command
from examples.models.make_tiny import make_tiny
from opentinker.envs.builtin.matching_pennies import prompts


def make_pennies(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    return make_tiny(directory, seed=seed, lesson=LegalMoves(game="matching_pennies", moves=_moves, steps=300, lr=3e-3))


def _moves() -> dict[str, list[str]]:
    return {text: ["h", "t"] for text in prompts(rules=False).values()}


if __name__ == "__main__":
    command(make_pennies, __doc__)
