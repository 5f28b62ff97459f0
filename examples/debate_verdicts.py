"""Write rows that teach a judge of `debate` its task: what it is shown, with speeches of bots, and the right verdict.

    python -m examples.debate_verdicts examples/data/verdicts.jsonl [--rows 96] [--largest 99]

The rows have seeds of their own, which no job plays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from opentinker.envs.base import Action
from opentinker.envs.builtin.debate import DEBATERS, JUDGE, Debate
from opentinker.shared.types.core import StopReason

SEED = 2**32
"""Above every seed of a job."""


def write_verdicts(path: Path, rows: int = 96, largest: int = 99) -> None:
    config = Debate.Config(largest=largest)
    shown = [asyncio.run(verdict_row(Debate(config), row)) for row in range(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in shown))


async def verdict_row(debate: Debate, row: int) -> dict[str, str]:
    await debate.open(row, SEED)
    speeches = [
        Action(text=debate.turn_of(seat, right=1.0), stop=StopReason.EOS, turn=0, seat=seat) for seat in DEBATERS
    ]
    await debate.step_all(speeches)
    return {"prompt": debate.case(), "completion": debate.turn_of(JUDGE, right=1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows that teach a judge of debates.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--largest", type=int, default=99, help="largest number in a sum, as in environment.config")
    options = parser.parse_args()
    write_verdicts(options.path, options.rows, options.largest)
    print(f"{options.rows} rows in {options.path}")


if __name__ == "__main__":
    main()
