"""Make a tiny model that knows the legal moves of Kuhn poker and plays each of them equally often.

    python -m examples.models.make_kuhn DIR [--seed 0]

`make_tiny` with random weights, then some seconds of supervised learning of the 12 prompts of `kuhn_poker` with
`rules = false`. Calling it again does nothing, except with another seed.
"""

from __future__ import annotations

from pathlib import Path

from examples.models.legal_moves import LegalMoves, command
from examples.models.make_tiny import make_tiny
from opentinker.envs.builtin.kuhn_poker import prompts
from opentinker.envs.builtin.kuhn_rules import actions_of


def make_kuhn(directory: Path | str, *, seed: int = 0) -> Path:
    """Write the model to `directory` (made if missing) and return it. Raises FileExistsError as `make_tiny`."""
    return make_tiny(directory, seed=seed, lesson=LegalMoves(game="kuhn_poker", moves=_moves, steps=300, lr=3e-3))


def _moves() -> dict[str, list[str]]:
    return {text: list(actions_of(history)) for (_, history), text in prompts(rules=False).items()}


if __name__ == "__main__":
    command(make_kuhn, __doc__)
