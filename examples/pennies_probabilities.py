"""Measures how often policies of `matching_pennies` show heads. Reads the probabilities of two prompts; plays no game.

    python -m examples.pennies_probabilities DIR [DIR ...] [--chat-template plain] [--no-rules]

DIR is a Hugging Face model directory, e.g. a checkpoint from `opentinker download`. A policy is read from its first
token: `h`, `t` or a whole word, in proportion to their probabilities. What it says otherwise is printed as `illegal`.
The only equilibrium is a probability of 0.5 on either seat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from examples.move_shares import MoveReader
from opentinker.envs.builtin.matching_pennies import SIDES, prompts
from opentinker.shared.types.errors import JobFailed


class Reading(NamedTuple):
    """Probabilities of a model on either seat."""

    heads: dict[str, float]
    """Of heads, among the legal answers."""
    illegal: dict[str, float]

    @property
    def distance(self) -> float:
        """The largest distance of a seat from the equilibrium."""
        return max(abs(share - 0.5) for share in self.heads.values())


def read_heads(directory: Path, chat_template: str, *, rules: bool) -> Reading:
    """Return the probabilities of the model's first token. Raise JobFailed as `MoveReader`."""
    reader = MoveReader(directory, chat_template, SIDES)
    heads, illegal = {}, {}
    for seat, text in prompts(rules=rules).items():
        share = reader.shares(text)
        heads[seat] = share["h"] / (share["h"] + share["t"])
        illegal[seat] = 1.0 - share["h"] - share["t"]
    return Reading(heads, illegal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--chat-template", choices=("model", "plain"), default="model", help="as model.chat_template")
    parser.add_argument("--no-rules", action="store_true", help="prompts of jobs with rules = false")
    options = parser.parse_args()
    try:
        for directory in options.directories:
            found = read_heads(directory, options.chat_template, rules=not options.no_rules)
            said = [f"{seat} {found.heads[seat]:.3f} (illegal {found.illegal[seat]:.3f})" for seat in found.heads]
            print(f"{directory}: heads as {', as '.join(said)}; distance {found.distance:.3f}")
    except JobFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
