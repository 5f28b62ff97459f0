"""How fast Harbor tasks start and act in their sandboxes, and what they cost.

    python -m loadtest.harbor [--tasks 50] [--at-once 16] [--commands 20]

Writes tasks of its own, adds them, and measures one after the other: cold starts, warm starts with their first command,
commands (`true`) beside the bare shell, then `--at-once` sandboxes that work side by side, then every task's solution
and an agent that does nothing. Besides times it prints processor seconds, which other processes on the machine disturb
less. Exit status 1 if a reward is wrong, or an aim is missed on a machine that nobody else used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from loadtest._machine import QUIET_CORES, Others, own_s
from opentinker.envs.harbor.boxes import Boxes
from opentinker.envs.harbor.image import LAYERS, Image
from opentinker.envs.harbor.library import add, load_task
from opentinker.envs.harbor.task import Task
from opentinker.envs.harbor.verifier import solve, verify
from opentinker.envs.harbor.workspace import Workspace
from opentinker.shared.config import Settings
from opentinker.shared.settings_sources import load_settings
from tests.conftest import until
from tests.support.harbor_tasks import write_tasks

Loaded = tuple[Task, Image]
AIMS = {"cold start": 300.0, "warm start": 50.0, "command over the bare one": 15.0}
"""Milliseconds, medians."""
AIM_KB = 5 * 1024
"""Disk of a further task."""


@dataclass
class Measured:
    """Times of one thing, and the processor time of all processes meanwhile."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def add(self, call: Callable[[], Awaitable[object]]) -> None:
        began = time.perf_counter()
        await call()
        self.seconds.append(time.perf_counter() - began)

    @property
    def median_ms(self) -> float:
        return 1000 * float(np.median(self.seconds))

    def line(self, title: str) -> str:
        p99, each = 1000 * float(np.quantile(self.seconds, 0.99)), 1000 * self.cpu_s / len(self.seconds)
        cpu = f", {each:.1f} ms of processor time each" if self.cpu_s else ""
        return f"{title:<26} p50 {self.median_ms:8.1f} ms, p99 {p99:8.1f} ms{cpu}"


async def starts(boxes: Boxes, loaded: list[Loaded]) -> Measured:
    """Start and end a sandbox of every task."""
    measured, before = Measured(), own_s()
    for task, image in loaded:
        made: list[Workspace] = []

        async def start(task: Task = task, image: Image = image, made: list[Workspace] = made) -> None:
            made.append(await boxes.start(image, task.config.environment))

        await measured.add(start)
        await made[0].close()
    measured.cpu_s = own_s() - before
    return measured


async def warm_starts(boxes: Boxes, loaded: list[Loaded]) -> Measured:
    """Take sandboxes that wait, with their first command."""
    measured = Measured()
    for task, image in loaded:
        machine = task.config.environment
        await (await boxes.take(image, machine)).close()
        await until(partial(boxes.has_warm, image, machine))
        made: list[Workspace] = []

        async def take(task: Task = task, image: Image = image, made: list[Workspace] = made) -> None:
            made.append(await boxes.take(image, task.config.environment))
            await made[0].run("true", 60.0)

        await measured.add(take)
        await made[0].close()
    return measured


async def run_bare() -> None:
    process = await asyncio.create_subprocess_exec("bash", "-c", "true")
    assert await process.wait() == 0


async def commands(boxes: Boxes, loaded: list[Loaded], count: int) -> tuple[Measured, Measured]:
    """Run `true` in one sandbox, and in the shell of this machine, in turn."""
    (task, image), inside, bare = loaded[0], Measured(), Measured()
    workspace = await boxes.start(image, task.config.environment)
    for _ in range(count):
        await inside.add(lambda: workspace.run("true", 60.0))
        await bare.add(run_bare)
    await workspace.close()
    return inside, bare


async def together(boxes: Boxes, loaded: list[Loaded], at_once: int, count: int) -> Measured:
    """Sandboxes that are open at the same time and each run commands."""
    measured = Measured()
    chosen = [loaded[number % len(loaded)] for number in range(at_once)]
    held = await asyncio.gather(*(boxes.start(image, task.config.environment) for task, image in chosen))

    async def work(workspace: Workspace) -> None:
        for number in range(count):
            await measured.add(partial(workspace.run, f"echo {number} >> log; wc -l < log", 600.0))

    await asyncio.gather(*(work(workspace) for workspace in held))
    for workspace in held:
        assert (await workspace.run("cat log | wc -l", 600.0)).output.strip() == str(count)
        await workspace.close()
    return measured


async def rewards(boxes: Boxes, loaded: list[Loaded]) -> tuple[list[float], list[float]]:
    """After every task's solution, and after nothing."""
    solved, silent = [], []
    for task, image in loaded:
        workspace = await boxes.start(image, task.config.environment)
        silent.append((await verify(workspace, task)).reward)
        await solve(workspace, task)
        solved.append((await verify(workspace, task)).reward)
        await workspace.close()
    return solved, silent


def layer_kb(boxes: Boxes) -> float:
    """Mean disk of an image's layer."""
    layers = [path for path in (boxes.home / LAYERS).iterdir() if path.is_dir()]
    blocks = sum(path.lstat().st_blocks for layer in layers for path in layer.rglob("*"))
    return blocks / 2 / len(layers)


async def measure(options: argparse.Namespace, place: Path) -> int:
    os.environ["OPENTINKER_DATA_DIR"] = str(place / "data")
    settings: Settings = load_settings()
    others, boxes = Others(), await Boxes.open(settings)
    before, began = own_s(), time.perf_counter()
    added = await add(boxes, settings, write_tasks(place / "tasks", options.tasks), "own")
    print(f"added {options.tasks} tasks in {time.perf_counter() - began:.1f} s, {own_s() - before:.1f} processor s")
    loaded = [load_task(boxes.home, settings, entry) for entry in added.set.tasks]
    cold, warm = await starts(boxes, loaded), await warm_starts(boxes, loaded[:10])
    inside, bare = await commands(boxes, loaded, options.commands)
    side_by_side = await together(boxes, loaded, options.at_once, options.commands)
    solved, silent = await rewards(boxes, loaded)
    await boxes.close()
    foreign, disk = others.stop(), layer_kb(boxes)
    over = inside.median_ms - bare.median_ms
    print(cold.line("cold start"), warm.line("warm start, one command"), sep="\n")
    print(inside.line("command"), bare.line("the bare one"), sep="\n")
    print(side_by_side.line(f"command, {options.at_once} sandboxes"))
    print(f"a further task takes {disk:.0f} KB; others used {foreign:.2f} cores")
    print(f"solution 1.0 in {solved.count(1.0)} of {len(solved)}, nothing 0.0 in {silent.count(0.0)} of {len(silent)}")
    figures = dict(zip(AIMS, (cold.median_ms, warm.median_ms, over), strict=True))
    missed = [f"{name}: {figures[name]:.1f} ms, aim {aim:g}" for name, aim in AIMS.items() if figures[name] > aim]
    for line in missed:
        print(f"missed: {line}{'' if foreign <= QUIET_CORES else ' (others used the machine)'}")
    wrong = solved != [1.0] * len(solved) or silent != [0.0] * len(silent) or disk > AIM_KB
    return int(wrong or (bool(missed) and foreign <= QUIET_CORES))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.harbor", description=__doc__)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--commands", type=int, default=20)
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        sys.exit(uvloop.run(measure(parser.parse_args(), Path(place))))


if __name__ == "__main__":
    main()
