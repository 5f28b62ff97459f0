"""Does generation overlap with training? Step time of jobs with a simulated engine and learner of given durations.

    python -m loadtest.overlap [--steps 30] [--swap 0.02] [--case GEN TRAIN STALENESS ...]

Starts all services and both servers (synced to disk at every write) as processes, runs one job per case, and prints for
each: seconds per step, the bound max(GEN, TRAIN), the swap that is exposed, the ratio (step - exposed) / bound, and the
trainer's wait share. The engine stands still for a swap: that is exposed as far as GEN + swap is more than TRAIN, for
else the trainer is busy meanwhile. Without overlap (staleness 0) a step takes the sum.
Generating a batch: `groups_per_batch` groups at once, 5 tokens each of GEN/5 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest.scenarios.jobs import job_of
from loadtest.support.machine import verdict
from opentinker.shared.spec import JobSpec, parse_spec
from tests.support.cluster import Cluster, toy_cluster

CASES = [
    (0.5, 0.5, 2),
    (0.5, 0.5, 1),
    (0.5, 0.2, 2),
    (0.5, 0.2, 1),
    (0.2, 0.5, 2),
    (0.2, 0.5, 1),
    (0.5, 0.5, 0),
    (0.5, 0.2, 0),
]
"""Seconds to generate a batch, seconds to train on it, max_staleness."""
WARM_UP = 5
"""Steps that are not counted: the pipeline fills."""
TARGET = 1.05


async def measure(cluster: Cluster, spec: JobSpec) -> dict[str, float]:
    lines: list[dict[str, Any]] = cluster.lines(await cluster.run(spec, 600))[WARM_UP - 1 :]
    kept = lines[1:]
    return {
        "step": (lines[-1]["time"] - lines[0]["time"]) / len(kept),
        "median": statistics.median(b["time"] - a["time"] for a, b in zip(lines, kept, strict=False)),
        "swap": statistics.mean(line["swap/pause_s"] + line["swap/load_s"] + line["swap/resume_s"] for line in kept),
        "wait": statistics.mean(line["trainer/wait_share"] for line in kept),
        "staleness": statistics.mean(line["staleness/mean"] for line in kept),
    }


async def run(cases: list[tuple[float, float, int]], steps: int, swap_s: float) -> bool:
    print("  gen s  train s  staleness |  step s  (median)   max s  exposed s   ratio  wait share  mean staleness")
    good = True
    with tempfile.TemporaryDirectory() as directory:
        async with toy_cluster(Path(directory) / "cluster") as (cluster, model):
            for gen_s, train_s, staleness in cases:
                job = job_of(
                    model, steps=steps + WARM_UP, gen_s=gen_s, train_s=train_s, swap_s=swap_s, staleness=staleness
                )
                seen = await measure(cluster, parse_spec(job))
                longest = max(gen_s, train_s)
                exposed = min(seen["swap"], max(0.0, gen_s + seen["swap"] - train_s))
                ratio = (seen["step"] - exposed) / longest
                good = good and (staleness == 0 or ratio <= TARGET)
                print(
                    f"{gen_s:7.2f}  {train_s:7.2f}  {staleness:9d} | {seen['step']:7.3f}  {seen['median']:8.3f}"
                    f"  {longest:6.2f}  {exposed:9.3f}  {ratio:6.3f}"
                    f"  {seen['wait']:10.2f}  {seen['staleness']:14.2f}",
                    flush=True,
                )
    return verdict(f"ratio = (step - exposed swap) / max <= {TARGET} wherever staleness is allowed", good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="counted steps per case")
    parser.add_argument("--swap", type=float, default=0.02, help="seconds that the engine stands still per swap")
    parser.add_argument(
        "--case", type=float, nargs=3, action="append", metavar=("GEN", "TRAIN", "STALENESS"), help="may be repeated"
    )
    options = parser.parse_args()
    cases = [(gen, train, int(staleness)) for gen, train, staleness in options.case or CASES]
    sys.exit(0 if asyncio.run(run(cases, options.steps, options.swap)) else 1)


if __name__ == "__main__":
    main()
