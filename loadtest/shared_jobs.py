"""Four LoRA jobs that share a trainer, against the same jobs one after another with a trainer each.

    python -m loadtest.shared_jobs [--jobs 4] [--steps 30] [--turn 0.2] [--turns 1]

Starts all services as processes; the engine is simulated and takes `--turn` seconds for an answer, an episode has
`--turns` of them, and a learner trains an adapter of the tiny model on the CPU. Every job has one rollout worker. All
workers have had a short job before. Prints the seconds of all jobs, the processor time of all services for them, and
how many times as many jobs an hour train together.

Exit status 1 if that is below 2.5, or a job fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from loadtest.support.machine import Meter, Others, verdict
from opentinker.shared.spec import JobSpec, parse_spec
from tests.support.cluster import Cluster

TARGET = 2.5
TOKENS = 5


def spec_of(model: Path, options: argparse.Namespace, trainer: str, seed: int, steps: int) -> JobSpec:
    engine = {
        "engine": "toy",
        "max_turns": options.turns,
        "max_tokens": TOKENS * options.turns,
        "max_tokens_per_turn": TOKENS,
        "toy": {"seconds_per_token": options.turn / TOKENS},
    }
    # Nobody guesses the number: an episode has all its turns.
    guessing = {"name": "guess_number", "config": {"high": 10**9, "max_guesses": options.turns, "shaped": True}}
    return parse_spec({
        "name": f"{trainer} {seed}",
        "model": {"base": str(model), "lora": {"rank": 8, "alpha": 16.0}},
        "environment": {"name": "copy_digits"} if options.turns == 1 else guessing,
        "algorithm": {"group_size": 4, "groups_per_batch": 4},
        "rollout": engine,
        "train": {"steps": steps, "lr": 1e-4, "seed": seed},
        "resources": {"trainer": trainer},
    })  # fmt: skip


async def measure(cluster: Cluster, specs: list[JobSpec], *, together: bool) -> tuple[float, float, float]:
    """Return seconds, and seconds of processor time of all services and of the trainers."""
    meter = Meter({name: process.pid for name, process in cluster.processes.items()})
    if together:
        await asyncio.gather(*(cluster.run(spec, 900) for spec in specs))
    else:
        for spec in specs:
            await cluster.run(spec, 900)
    meter.stop()
    trainers = sum(used for name, used in meter.used.items() if name.startswith("trainer"))
    return meter.seconds, sum(meter.used.values()), trainers


async def run(options: argparse.Namespace) -> bool:
    from examples.models.make_tiny import make_tiny

    found, others = dict[str, tuple[float, float, float]](), Others()
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny(Path(directory, "tiny"))
        place = Path(directory, "cluster")
        async with Cluster(place, bank_jobs=options.jobs, rollout_workers=options.jobs) as cluster:
            cluster.env["OPENTINKER_BANK_JOBS"] = "0"
            cluster.add("trainer")
            await cluster.ready()
            for trainer, together in (("own", False), ("shared", True)):
                for steps in (1, options.steps):  # the first jobs import torch in all workers
                    specs = [spec_of(model, options, trainer, seed, steps) for seed in range(options.jobs)]
                    found[trainer] = await measure(cluster, specs, together=together)
    foreign = others.stop()
    for trainer, name in (("own", "one after another"), ("shared", "together")):
        took, used, training = found[trainer]
        rate = 3600 * options.jobs / took
        print(f"{name:20}{took:8.1f} s{rate:8.0f} jobs/h{used:8.1f} CPU s, {training:.1f} of them in the trainer")
    ratio = found["own"][0] / found["shared"][0]
    return verdict(f"together >= {TARGET} times as many jobs an hour ({ratio:.2f})", ratio >= TARGET, foreign)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds of an answer")
    parser.add_argument("--turns", type=int, default=1, help="answers in an episode")
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
