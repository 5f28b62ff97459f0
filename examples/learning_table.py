"""Does every preset learn? Three tasks, all presets, several seeds, on policy and two versions behind: a table.

    python -m examples.learning_table [--presets grpo ppo] [--tasks bandit] [--seeds 3] [--lags 0 2] [--steps N]
                                     [--results FILE]

The real learner, the real episodes (renderer, environment, masks, version spans) and the real algorithms in one process
per run; instead of the messages between services and of vLLM there is a sampler that draws all episodes of a batch at
once from the learner's own weights. With lag L a batch is trained when the weights are L versions newer than those
that sampled it: the most that `max_staleness = L` allows. Every run makes all its steps, unless dapo finds nothing but
groups of equal rewards any more: the task is learnt then, and its table row says so with a `*`. "To 0.5" is where the
mean share of exact answers of ten steps reaches it, for each seed, and in CPU seconds of the run's one thread for the
median one. Exit status 1 if a preset does not learn a task (0.5, every seed), or if its mean share of exact answers
over all steps is lower behind than on policy by more than 0.05 and twice the larger deviation of the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from examples.local_rollouts import CONTEXT, Rollouts, Sampled
from examples.models.make_tiny import make_tiny
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.spec import JobSpec, parse_spec
from opentinker.shared.types.core import WeightVersion

PRESETS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "dapo", "cispo", "gspo")
"""Those that learn from rewards alone, and are not for several seats."""
MODEL: dict[str, Any] = {"hidden_size": 128, "layers": 2}
WINDOW = 10
GROUPS, GROUP_SIZE = 8, 16
NOISE = 0.05
"""Share of exact answers, as a mean over all steps, that no difference is made of."""

TASKS: dict[str, dict[str, Any]] = {
    "copy_digits": {
        "environment": {"name": "copy_digits", "config": {"digits": 1}},
        "rollout": {"max_tokens": 4},
        "train": {"steps": 320, "lr": 5e-4},
    },
    "two_turns": {
        "environment": {"name": "guess_number", "config": {"low": 1, "high": 3, "max_guesses": 2}},
        "rollout": {"max_turns": 2, "max_tokens": 8, "max_tokens_per_turn": 2},
        "train": {"steps": 160, "lr": 1e-3},
    },
    "bandit": {
        "environment": {"name": "bandit", "config": {"contexts": 8, "arms": 4}},
        "rollout": {"max_tokens": 1},
        "train": {"steps": 90, "lr": 1e-3},
    },
}
TRAIN = {"warmup_steps": 10, "tokens_per_micro_batch": 1 << 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"critic_lr": 1e-3},
}
"""Where a preset's own values are for another size: the default critic_lr goes with the default lr."""
RATES = {("cispo", "copy_digits"): 3e-4}
"""Learning rates other than the task's. Nothing in cispo holds back a token that moved far already: with 5e-4 and two
versions of lag some seeds fall back from what they had learnt."""


class Run(NamedTuple):
    preset: str
    task: str
    lag: int
    seed: int
    steps: int = 0
    """0: as many as the task has."""


class Curve(msgspec.Struct):
    """One run, step by step."""

    exact: list[float]
    cpu_s: list[float]
    """Since the run's first sample."""

    def first(self, level: float) -> tuple[int, float] | None:
        """(step, CPU seconds) at which the mean of the last WINDOW steps reaches `level`."""
        for step in range(WINDOW, len(self.exact) + 1):
            if statistics.fmean(self.exact[step - WINDOW : step]) >= level:
                return step, self.cpu_s[step - 1]
        return None

    @property
    def final(self) -> float:
        return statistics.fmean(self.exact[-WINDOW:])


def settings_of(run: Run) -> str:
    """Digest of all that a run depends on but the code."""
    plain = spec_of(run, Path("model")).model_dump_json()
    return hashlib.sha256(f"{plain} {MODEL} {CONTEXT}".encode()).hexdigest()[:16]


def spec_of(run: Run, model: Path) -> JobSpec:
    task = TASKS[run.task]
    train = {**TRAIN, **task["train"], "lr": RATES.get((run.preset, run.task), task["train"]["lr"]), "seed": run.seed}
    return parse_spec(
        {
            "name": "learning",
            "model": {"base": str(model), "chat_template": "plain"},
            "environment": task["environment"],
            "algorithm": {
                "name": run.preset,
                "group_size": GROUP_SIZE,
                "groups_per_batch": GROUPS,
                "max_staleness": run.lag,
                **SETTINGS.get(run.preset, {}),
            },
            "rollout": task["rollout"],
            "train": {**train, **({"steps": run.steps} if run.steps else {})},
        }
    )


async def learn(run: Run, model: Path) -> Curve:
    """Sample, train, sample, ...; with a lag, batches wait in a queue."""
    spec = spec_of(run, model)
    learner = RlLearner(spec)
    learner.load(None)
    rollouts = Rollouts(spec, learner, run.seed)
    curve, waiting, began = Curve([], []), deque[Sampled](), time.process_time()
    for step in range(spec.train.steps):
        rollouts.engine.version = version = WeightVersion(1, step)
        while len(waiting) <= run.lag:
            sampled = await rollouts.batch()
            if sampled is None:
                if not curve.exact:
                    raise AssertionError(f"{run}: nothing but groups of equal rewards from the first step")
                return curve  # where a job with a target has long ended
            waiting.append(sampled)
        groups, exact = waiting.popleft()
        metrics = learner.step(groups, version)
        if run.lag == 0 and metrics["mismatch/max"] > 1e-4:
            raise AssertionError(f"sampler and learner disagree by {metrics['mismatch/max']} nats")
        curve.exact.append(exact)
        curve.cpu_s.append(time.process_time() - began)
    return curve


def work(run: Run, model: str) -> tuple[Run, Curve]:
    torch.set_num_threads(1)
    return run, asyncio.run(learn(run, Path(model)))


# --- the table ------------------------------------------------------------------------------------------------------

WIDTHS = (11, 12, 3, 13, 13, 8, 8, 14)
HEAD = ("task", "preset", "lag", "steps to 0.5", "steps to 0.9", "s to 0.5", "s to 0.9", "final exact")


def cells(task: str, preset: str, lag: int, curves: list[Curve], length: int) -> tuple[str, ...]:
    """`length`: steps of a whole run. Steps of each seed, seconds of the median seed, mean and deviation of the end."""
    steps, seconds = [], []
    for level in (0.5, 0.9):
        reached = [curve.first(level) for curve in curves]
        steps.append(" ".join(str(r[0]) if r else "-" for r in reached))
        times = sorted(r[1] if r else float("inf") for r in reached)
        median = times[len(times) // 2]
        seconds.append(f"{median:.1f}" if median < float("inf") else "-")
    finals = [curve.final for curve in curves]
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    early = "*" if any(len(curve.exact) < length for curve in curves) else ""
    return task, preset, str(lag), *steps, *seconds, f"{statistics.fmean(finals):.2f} +- {spread:.2f}{early}"


def row(columns: tuple[str, ...]) -> str:
    return "| " + " | ".join(f"{text:<{width}}" for text, width in zip(columns, WIDTHS, strict=True)) + " |"


def verdict(found: dict[Run, Curve]) -> bool:
    """Says who does not learn, and who learns less when behind than the seeds' spread explains."""
    good = True
    by_seed: dict[tuple[str, str, int], list[Curve]] = {}
    for run, curve in sorted(found.items()):
        by_seed.setdefault((run.preset, run.task, run.lag), []).append(curve)
    for (preset, task, lag), curves in by_seed.items():
        if any(curve.first(0.5) is None for curve in curves):
            print(f"NOT LEARNT: {task} by {preset} at lag {lag}")
            good = False
        on_policy = by_seed.get((preset, task, 0))
        if lag and on_policy:
            common = min(len(curve.exact) for curve in (*on_policy, *curves))
            means = [[statistics.fmean(curve.exact[:common]) for curve in part] for part in (on_policy, curves)]
            spread = max(statistics.stdev(part) if len(part) > 1 else 0.0 for part in means)
            loss = statistics.fmean(means[0]) - statistics.fmean(means[1])
            if loss > 2 * spread + NOISE:
                print(f"WORSE BEHIND: {task} by {preset}: {loss:.2f} less exact per step at lag {lag}")
                good = False
    print(f"target: every preset learns, and no worse behind than on policy: {'met' if good else 'MISSED'}")
    return good


def kept(path: Path | None) -> dict[Run, Curve]:
    """Runs that an earlier call has made with the settings of today."""
    if path is None or not path.exists():
        return {}
    lines = [msgspec.json.decode(line, type=tuple[str, Run, Curve]) for line in path.read_bytes().splitlines()]
    return {run: curve for settings, run, curve in lines if settings == settings_of(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=0, help="of every run, instead of the task's own")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, help="file of finished runs: those in it are not made again")
    options = parser.parse_args()
    wanted = [
        Run(preset, task, lag, seed, options.steps)
        for seed in range(options.seeds)
        for lag in options.lags
        for task in options.tasks
        for preset in options.presets
    ]
    found = {run: curve for run, curve in kept(options.results).items() if run in wanted}
    print(f"{len(wanted)} runs, {len(found)} of them from {options.results}", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool,
    ):
        model = make_tiny(Path(directory) / "model", **MODEL, context_length=CONTEXT)
        for future in as_completed([pool.submit(work, run, str(model)) for run in wanted if run not in found]):
            run, curve = future.result()
            found[run] = curve
            print(f"{run.task} {run.preset} lag {run.lag} seed {run.seed}: {curve.final:.2f}", file=sys.stderr)
            if options.results:
                options.results.parent.mkdir(parents=True, exist_ok=True)
                with options.results.open("ab") as file:
                    file.write(msgspec.json.encode((settings_of(run), run, curve)) + b"\n")
    print(row(HEAD))
    print("|" + "|".join("-" * (width + 2) for width in WIDTHS) + "|")
    for task in options.tasks:
        for preset in options.presets:
            for lag in options.lags:
                curves = [found[Run(preset, task, lag, seed, options.steps)] for seed in range(options.seeds)]
                print(row(cells(task, preset, lag, curves, options.steps or TASKS[task]["train"]["steps"])))
    sys.exit(0 if verdict({run: found[run] for run in wanted}) else 1)


if __name__ == "__main__":
    main()
