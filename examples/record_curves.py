"""Runs examples and keeps their curves in examples/curves.json, which the dashboard shows beside its templates.

    python -m examples.record_curves bandit copy_digits ...

    python -m examples.record_curves --steps 20 gsm8k_smollm2_lora

Their models must be there: the first lines of each example say how to make them. A sweep's curve is its best value so
far, trial by trial. Policies that play each other earn the same on average whatever they learn: the curve of such a job
is of its evaluations, and Kuhn poker's of the distance from an equilibrium. An example without a curve has a `note`
there, which says why; beside a curve, a `note` says what to see in it. The environment.toml
beside an example is pushed before it is run. The `digest` of a curve is that of the settings that it was recorded with.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from examples.curve_digest import digest_of
from examples.kuhn_exploitability import read_policy
from examples.pennies_probabilities import read_heads
from opentinker import Client
from opentinker.cli.run import everything
from opentinker.envs.builtin.kuhn_rules import average_policy, exploitability
from opentinker.local.discovery import key_in, read_state
from opentinker.shared.data.uploads import DESCRIPTION
from opentinker.shared.types.core import parts_of

HERE = Path(__file__).resolve().parent
CURVES = HERE / "curves.json"
POINTS = 40
METRICS = {"rl": "reward/mean", "sft": "loss", "dpo": "loss"}
"""By kind of job: what its curve shows."""


EVALUATED = {
    "gomoku_self": "val/reward/mean",
    "gomoku_two": "val/winrate/random",
    "tictactoe_two": "val/winrate/random",
}
"""By example: the metric of its evaluations that its curve shows, of its first policy."""
WORKERS = {"env-workers": 1, "rollout-workers": 1, "reference": 0}


def recorded(name: str, steps: int | None) -> dict[str, Any]:
    """Run an example, or its first steps, and return its curve.

    Raises CalledProcessError, ValueError, OpenTinkerError.
    """
    file = HERE / f"{name}.toml"
    spec = tomllib.loads(file.read_text())
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        if "sweep" in spec:
            curve = _of_sweep(file, spec, Path(place))
        elif (file.parent / DESCRIPTION).exists():
            curve = _of_pushed(file, spec, Path(place))
        else:
            curve = _of_job(file, place, steps)
    return {**curve, "digest": digest_of(file.read_text())}


def _of_job(file: Path, place: str, steps: int | None) -> dict[str, Any]:
    argv = [sys.executable, "-m", "opentinker.cli", "run", str(file), "--data-dir", place, "--json"]
    limit = [] if steps is None else ["--steps", str(steps)]
    ran = subprocess.run(argv + limit, stdout=subprocess.PIPE, check=True)
    job = orjson.loads(ran.stdout.splitlines()[-1])["job"]
    metric, values = METRICS[job["kind"]], job["curve"]
    records = Path(place) / "jobs" / parts_of(job["id"], list(job.get("policies", {})))[0]
    if file.stem == "kuhn_poker":
        metric, values = "exploitability", _exploitability(file, records / "checkpoints")
    elif file.stem == "matching_pennies":
        metric, values = "distance from equilibrium", _distances(file, records / "checkpoints")
    elif metric_of_evaluations := EVALUATED.get(file.stem):
        evaluated = [orjson.loads(line) for line in (records / "validation.jsonl").read_bytes().splitlines()]
        metric, values = metric_of_evaluations, [one[metric_of_evaluations] for one in evaluated]
    if len(values) < 2:
        raise ValueError(f"{file.stem} ended without a curve")
    return {"metric": metric, "values": _kept(values), "steps": job["step"]}


def _of_pushed(file: Path, spec: dict[str, Any], place: Path) -> dict[str, Any]:
    with everything(place, 0, WORKERS, keep=False) as url, Client(url, api_key=key_in(read_state(place))) as client:
        client.push_environment(file.parent)
        job = client.wait(client.submit(spec, beside=file.parent)["id"])
    if job["state"] != "succeeded":
        raise ValueError(f"{file} {job['state']}: {job['reason']}")
    return {"metric": METRICS[job["kind"]], "values": _kept(job["curve"]), "steps": job["step"]}


def _exploitability(file: Path, checkpoints: Path) -> list[float]:
    """Return the exploitability of the average of the versions up to each checkpoint, the base first."""
    directories, template, rules = _versions(file, checkpoints)
    versions = [read_policy(directory, template, rules=rules).policy for directory in directories]
    return [exploitability(average_policy(versions[: n + 1])) for n in range(len(versions))]


def _distances(file: Path, checkpoints: Path) -> list[float]:
    """Return how far each checkpoint, the base first, is from showing heads with probability 0.5 on either seat."""
    directories, template, rules = _versions(file, checkpoints)
    return [read_heads(directory, template, rules=rules).distance for directory in directories]


def _versions(file: Path, checkpoints: Path) -> tuple[list[Path], str, bool]:
    """Return the base and the checkpoints of a game's job, and what its prompts are made of."""
    spec = tomllib.loads(file.read_text())
    directories = [Path(spec["model"]["base"]), *sorted(checkpoints.glob("step-*"))]
    return directories, spec["model"]["chat_template"], spec["environment"]["config"]["rules"]


def _of_sweep(file: Path, spec: dict[str, Any], place: Path) -> dict[str, Any]:
    with everything(place, 0, WORKERS, keep=False) as url, Client(url, api_key=key_in(read_state(place))) as client:
        sweep = client.wait_sweep(client.sweep(spec, beside=file.parent)["id"])
    values = [trial["value"] for trial in sweep["all_trials"] if trial["value"] is not None]
    if sweep["finished"] is None or not values:
        raise ValueError(f"{file.stem} ended without a value: {sweep['reason']}")
    best = list(accumulate(values, max if sweep["goal"] == "maximize" else min))
    return {"metric": sweep["metric"], "values": _kept(best), "trials": len(values)}


def _kept(values: Sequence[float]) -> list[float]:
    """Return POINTS of the values, evenly spaced, with four digits."""
    if len(values) > POINTS:
        values = [values[round(place * (len(values) - 1) / (POINTS - 1))] for place in range(POINTS)]
    return [float(f"{value:.4g}") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.record_curves", description=__doc__)
    parser.add_argument("names", nargs="+", help="names of examples, without .toml")
    parser.add_argument("--steps", type=int, help="steps of a job whose own number would take hours")
    options = parser.parse_args()
    known = orjson.loads(CURVES.read_bytes())
    for name in options.names:
        curve = recorded(name, options.steps)
        beside = known[name] if "values" in known.get(name, {}) else {}
        known[name] = {**curve, "note": beside["note"]} if "note" in beside else curve
        CURVES.write_bytes(orjson.dumps(known, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
        print(f"{name}: {known[name]['metric']} to {known[name]['values'][-1]}")


if __name__ == "__main__":
    main()
