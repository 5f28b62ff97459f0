"""Measures how soon a job on a running server has its first reward: the first one, and those that follow it.

    python -m loadtest.warm [--jobs 4] [--model DIR]

Starts both servers and all services as processes, one trainer and one rollout worker with vLLM, and runs jobs of three
steps one after another, on one base. Prints for each the seconds from its submission to its start (a lease for every
worker), to its running (engine and model loaded), and to its first step with rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import tomllib
from pathlib import Path

from examples.models.make_tiny import make_tiny
from loadtest.support.machine import Others, verdict
from loadtest.support.target import ROOT
from opentinker.shared.spec import JobSpec, parse_spec
from tests.support.cluster import Cluster

TARGET_S = 3.0
JOB_S = 300.0
EVENTS = ("starting", "running")


async def measure(cluster: Cluster, spec: JobSpec) -> list[float]:
    """Return the seconds from the submission to each of EVENTS and to the first step."""
    job = await cluster.run(spec, JOB_S)
    record = await cluster.store.job(job)
    at = {event["event"]: event["time"] - record.created for event in reversed(await cluster.client.event_log(job))}
    return [*(at[name] for name in EVENTS), cluster.lines(job)[0]["time"] - record.created]


async def run(jobs: int, model: str) -> bool:
    example = tomllib.loads((ROOT / "examples" / "copy_digits_1.toml").read_text())
    others = Others()
    with tempfile.TemporaryDirectory() as directory:
        base = model or str(make_tiny(Path(directory) / "tiny"))
        example["model"]["base"] = base
        del example["train"]["target"]
        example["train"] |= {"steps": 3, "warmup_steps": 0}
        print("job  starting s  running s  first reward s")
        found = []
        async with Cluster(Path(directory) / "cluster", heavy=True, forked=False) as cluster:
            for number in range(jobs):
                seconds = await measure(cluster, parse_spec(example))
                found.append(seconds[-1])
                print(f"{number + 1:3d}  {seconds[0]:10.2f}  {seconds[1]:9.2f}  {seconds[2]:14.2f}", flush=True)
    good = statistics.median(found[1:]) <= TARGET_S
    return verdict(f"the first reward of later jobs within {TARGET_S:g} s (median)", good, others.stop())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="jobs, one after another")
    parser.add_argument("--model", default="", help="directory of the base; default: a random model of 2.4M parameters")
    options = parser.parse_args()
    if options.jobs < 2:
        parser.error("--jobs must be 2 at least: the first one finds no engine")
    sys.exit(0 if asyncio.run(run(options.jobs, options.model)) else 1)


if __name__ == "__main__":
    main()
