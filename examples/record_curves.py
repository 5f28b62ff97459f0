"""Runs examples and keeps their curves in examples/curves.json, which the dashboard shows beside its templates.

    python -m examples.record_curves bandit copy_digits ...

Their models must be there: the first lines of each example say how to make them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

HERE = Path(__file__).resolve().parent
CURVES = HERE / "curves.json"
POINTS = 40
METRICS = {"rl": "reward/mean", "sft": "loss", "dpo": "loss"}
"""By kind of job: what its curve shows."""


def recorded(name: str) -> dict[str, Any]:
    """Run an example and return its curve. Raises CalledProcessError, ValueError."""
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        argv = [
            sys.executable,
            "-m",
            "opentinker.cli",
            "run",
            str(HERE / f"{name}.toml"),
            "--data-dir",
            place,
            "--json",
        ]
        ran = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    job = orjson.loads(ran.stdout.splitlines()[-1])["job"]
    if not job["curve"]:
        raise ValueError(f"{name} ended without a curve")
    values = job["curve"]
    kept = [values[round(place * (len(values) - 1) / (POINTS - 1))] for place in range(POINTS)]
    return {
        "metric": METRICS[job["kind"]],
        "values": [float(f"{value:.4g}") for value in (kept if len(values) > POINTS else values)],
        "steps": job["step"],
        "seconds": round(job["finished"] - job["since"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.record_curves", description=__doc__)
    parser.add_argument("names", nargs="+", help="names of examples, without .toml")
    known = orjson.loads(CURVES.read_bytes())
    for name in parser.parse_args().names:
        known[name] = recorded(name)
        CURVES.write_bytes(orjson.dumps(known, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
        print(f"{name}: {known[name]['metric']} to {known[name]['values'][-1]} in {known[name]['seconds']} s")


if __name__ == "__main__":
    main()
