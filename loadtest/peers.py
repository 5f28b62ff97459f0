"""Runs an example here and with TRL, one after the other on the same machine.

    python -m loadtest.peers                                              # one digit: seconds to `exact` 0.9
    python -m loadtest.peers --example gsm8k_smollm2_lora --steps 12      # seconds a step, with an adapter

Prints of each the steps, the seconds to the first step, to the target and per step (median), tokens sampled per second
and processor time per step, all its processes together, from the start of the command. TRL runs with one and with two
threads, and the better one counts. The models must be there: the first lines of the examples say how to make them.

Without --steps: `exact` 0.9 is reached no later than by TRL, with three quarters of its processor time per step.
With --steps: a step takes at most 1/1.6 of TRL's, and 30 s. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson

from loadtest.support.machine import Others, own_s, verdict

ROOT = Path(__file__).parents[1]
TARGET, NEVER = 0.9, 2.0
CPU_SHARE, FASTER, STEP_S = 0.75, 1.6, 30.0
WARM_UP = 2
"""Steps that the median leaves out."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    steps: int
    first_s: float
    total_s: float
    step_s: float
    tokens_per_s: float
    cpu_s: float
    """Per step."""
    foreign: float
    """Cores that others used meanwhile."""


def measured(name: str, argv: list[str], log: Path, **environ: str) -> Run:
    """Run a command that logs a line per step, with `time` and `tokens`. The folder of `log` may be `*`. Raises
    CalledProcessError."""
    others, used, began = Others(), own_s(), time.time()
    subprocess.run(argv, check=True, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)
    foreign, used = others.stop(), own_s() - used
    (file,) = log.parents[1].glob(f"{log.parent.name}/{log.name}")
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    times = [line["time"] for line in lines]
    spans = [after - before for before, after in pairwise(times)][WARM_UP - 1 :]
    tokens = sum(line["tokens"] for line in lines[WARM_UP:])
    return Run(
        name,
        len(lines),
        times[0] - began,
        times[-1] - began,
        median(spans),
        tokens / sum(spans),
        used / len(lines),
        foreign,
    )


def ours(example: Path, steps: int | None, place: Path) -> Run:
    """The whole product: servers, services, job, and its end."""
    changes = ["--set", f"train.target.exact={TARGET}"] if steps is None else ["--steps", str(steps)]
    argv = [sys.executable, "-m", "opentinker.cli", "run", str(example), "--data-dir", str(place), "--json"]
    return measured("OpenTinker", [*argv, *changes], place / "jobs" / "*" / "metrics.jsonl")


def trl(example: Path, steps: int | None, place: Path, threads: int, most: int) -> Run:
    log = place / f"trl-{threads}.jsonl"
    target = TARGET if steps is None else NEVER
    argv = [sys.executable, "-m", "loadtest.support.trl_job", str(example), str(steps or most), str(target), str(log)]
    return measured(f"TRL, threads {threads}", argv, log, OMP_NUM_THREADS=str(threads))


def show(run: Run) -> None:
    print(
        f"{run.name:16} {run.steps:5d} {run.first_s:8.1f} {run.total_s:8.1f} {run.step_s:8.2f} {run.tokens_per_s:9.0f}"
        f" {run.cpu_s:8.2f} {run.foreign:8.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", default="copy_digits_1", help="name of an example with one turn an episode")
    parser.add_argument("--steps", type=int, help="run so many steps instead of until exact 0.9")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help="of TRL, one run each")
    parser.add_argument("--most", type=int, default=250, help="steps after which TRL ends without the target")
    options = parser.parse_args()
    example = ROOT / "examples" / f"{options.example}.toml"
    print("                 steps  first s  total s   step s  tokens/s  CPU s/st  foreign")
    with tempfile.TemporaryDirectory(prefix="opentinker-") as directory:
        us = ours(example, options.steps, Path(directory, "ours"))
        show(us)
        peers = [trl(example, options.steps, Path(directory), count, options.most) for count in options.threads]
        for peer in peers:
            show(peer)
    sys.exit(0 if judged(us, peers, to_target=options.steps is None) else 1)


def judged(us: Run, peers: list[Run], *, to_target: bool) -> bool:
    foreign = max(run.foreign for run in (us, *peers))
    if to_target:
        best, cheapest = min(peer.total_s for peer in peers), min(peer.cpu_s for peer in peers)
        good = verdict(f"exact {TARGET} after {us.total_s:.1f} s <= TRL's {best:.1f}", us.total_s <= best, foreign)
        cheap = us.cpu_s <= CPU_SHARE * cheapest
        return verdict(f"{us.cpu_s:.2f} CPU s a step <= {CPU_SHARE} x TRL's {cheapest:.2f}", cheap, foreign) and good
    best = min(peer.step_s for peer in peers)
    good = verdict(f"a step in {us.step_s:.1f} s, TRL's {best:.1f} >= {FASTER} x", best >= FASTER * us.step_s, foreign)
    return verdict(f"a step <= {STEP_S:.0f} s", us.step_s <= STEP_S, foreign) and good


if __name__ == "__main__":
    main()
