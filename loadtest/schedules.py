"""Measures how fast two policies of different speed learn under each schedule, and how old their matches get.

    python -m loadtest.schedules [--slow 3] [--fast 1] [--gen 0.5] [--seconds 40] [--schedule NAME ...]

Starts all services and both servers as processes and runs one job per schedule, with a simulated engine and learners of
given durations. Prints for each policy: steps per second, the formula's, groups per step, and the largest lags. Exit
status 1 if a rate differs by more than 5 % from the formula, or a lag is above its bound.

    wait        1 / max(slow, fast, gen) for both
    drop, grow  1 / max(own, gen) each; grow: slow / fast batches per step of the slow one
    lockstep    1 / (gen + slow) for both: without staleness nothing is generated while anybody trains
    alternate   N / (N slow + N fast + 2 gen) for both: the first batch of a turn is waited for
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest.support.machine import Others, verdict
from opentinker.cli.planning.schedules import Pace, step_seconds
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.spec.matches.schedules import ScheduleName, max_opponent_lag
from opentinker.shared.types.core import part_id
from tests.support.cluster import toy_cluster

SCHEDULES: tuple[ScheduleName, ...] = ("wait", "drop", "grow", "lockstep", "alternate")
TOLERANCE = 0.05
BATCH = 2
STALENESS = 2
OPPONENT_LAG = 6
TURN = 3
Line = dict[str, Any]


def rates(schedule: ScheduleName, slow_s: float, fast_s: float, gen_s: float) -> dict[str, float]:
    """Return the steps per second that the formula of `opentinker plan` gives each policy."""
    paces = {"slow": Pace(slow_s, gen_s), "fast": Pace(fast_s, gen_s)}
    return {name: 1 / seconds for name, seconds in step_seconds(schedule, paces, TURN).items()}


def job_of(model: Path, schedule: str, options: argparse.Namespace, steps: dict[str, int]) -> JobSpec:
    match: dict[str, Any] = {"schedule": schedule}
    if schedule == "alternate":
        match["alternate_steps"] = TURN
    if schedule != "lockstep":
        match["max_opponent_lag"] = OPPONENT_LAG
    seconds = {"slow": options.slow, "fast": options.fast}
    return parse_spec(
        {
            "name": schedule,
            "model": {"base": str(model), "chat_template": "plain"},
            "environment": {"name": "signalling", "config": {"rules": False}},
            "algorithm": {
                "group_size": 2,
                "groups_per_batch": BATCH,
                "max_staleness": 0 if schedule == "lockstep" else STALENESS,
            },
            "rollout": {
                "engine": "toy",
                "toy": {"seconds_per_token": options.gen / 2},  # a token of the speaker, then one of the listener
                "max_tokens": 1,
                "max_concurrent_groups": 8 * BATCH,
            },
            "train": {"learner": "simulated", "steps": steps["fast"], "checkpoint_every": 1000},
            "policies": {
                name: {"train": {"steps": steps[name], "simulated_step_s": seconds[name]}} for name in ("slow", "fast")
            },
            "seats": {"speaker": "slow", "listener": "fast"},
            "match": match,
        }
    )


def counted(schedule: str, lines: list[Line]) -> list[Line]:
    """Leave out the first steps, in which the pipeline fills and a fast policy runs as far ahead as the staleness of a
    slow one allows; of turns, begin and end with the same step of one."""
    first = TURN if schedule == "alternate" else STALENESS + 2
    last = len(lines) - (len(lines) - first) % TURN if schedule == "alternate" else len(lines)
    return lines[first - 1 : last]


def judge(spec: JobSpec, name: str, lines: list[Line], formula: float) -> bool:
    assert spec.match is not None
    kept = counted(spec.match.schedule, lines)
    rate = (len(kept) - 1) / (kept[-1]["time"] - kept[0]["time"])
    staleness = max(line["staleness/max"] for line in lines)
    lag = max(line["opponent_lag/max"] for line in lines)
    bound = max_opponent_lag(spec)
    good = abs(rate / formula - 1) <= TOLERANCE and staleness <= spec.algorithm.max_staleness
    good = good and bound is not None and lag <= bound
    print(
        f"{spec.match.schedule:>9}  {name:>6} | {rate:7.3f}  {formula:7.3f}  {100 * (rate / formula - 1):+6.1f} %"
        f"  {statistics.mean(len(line['seqs']) for line in kept[1:]):6.2f}  {staleness:9.0f}  {lag:12.0f}"
        f"  {'' if good else 'MISSED'}",
        flush=True,
    )
    return good


async def run(options: argparse.Namespace) -> bool:
    print(" schedule  policy |  steps/s  formula  differ  groups  staleness  opponent lag")
    good, others = True, Others()
    with tempfile.TemporaryDirectory() as directory:
        async with toy_cluster(Path(directory) / "cluster") as (cluster, model):
            for schedule in options.schedule or SCHEDULES:
                formula = rates(schedule, options.slow, options.fast, options.gen)
                steps = {name: max(6, round(options.seconds * rate)) for name, rate in formula.items()}
                spec = job_of(model, schedule, options, steps)
                job = await cluster.run(spec, 10 * options.seconds + 600)
                for name in spec.policies:
                    good &= judge(spec, name, cluster.lines(part_id(job, name)), formula[name])
    return verdict(f"rates within {TOLERANCE:.0%}, lags within their bounds", good, others.stop())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=3.0, help="seconds per step of the slow policy")
    parser.add_argument("--fast", type=float, default=1.0, help="seconds per step of the fast policy")
    parser.add_argument("--gen", type=float, default=0.5, help="seconds to play a match")
    parser.add_argument("--seconds", type=float, default=40.0, help="training per schedule")
    parser.add_argument("--schedule", choices=SCHEDULES, action="append", help="may be repeated; default: all")
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
