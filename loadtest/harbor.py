"""Measures how fast Harbor tasks start and act in their sandboxes, and their cost.

    python -m loadtest.harbor [--tasks 50] [--at-once 16] [--commands 20]

Writes tasks of its own, adds them, and checks each as `opentinker env check` does, one after the other: cold starts, a
warm start with its first command, commands (`true`), the solution, an agent that does nothing. Then the bare shell, and
`--at-once` sandboxes that work side by side. Processor seconds are printed too, which other processes on the machine
disturb less. Exit status 1 if a check finds something wrong, or an aim is missed on a machine that nobody else used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from loadtest.support.machine import QUIET_CORES, Others, own_s
from opentinker.envs.harbor.boxes import Boxes
from opentinker.envs.harbor.image import LAYERS, TaskImage
from opentinker.envs.harbor.library import add, load_task
from opentinker.envs.harbor.task import Task
from opentinker.envs.harbor.workspace import Workspace
from opentinker.local.harbor_check import SetReport, check_task
from opentinker.shared.settings_sources import load_settings
from tests.support.harbor_tasks import write_tasks

AIMS = {
    "cold start": 300.0,
    "warm start": 50.0,
    "command over the bare one": 15.0,
    "command after a pause over the bare one": 15.0,
}
"""Milliseconds, medians."""
FILES, PAUSES, PAUSE_S = 30_000, 7, 1.3
AIM_KB = 5 * 1024
"""Disk of a further task."""


async def timed_ms(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - began)


async def run_bare() -> None:
    process = await asyncio.create_subprocess_exec("bash", "-c", "true")
    assert await process.wait() == 0


async def after_pauses(boxes: Boxes, task: Task, image: TaskImage) -> list[float]:
    """Milliseconds of single commands with pauses between, as policies make them, in a sandbox with many written files
    (whose disk is looked at meanwhile)."""
    workspace = await boxes.start(image, task.config.environment)
    try:
        await workspace.run(f"mkdir many; cd many; seq {FILES} | xargs touch", 600.0)
        took_ms = []
        for _ in range(PAUSES):
            await asyncio.sleep(PAUSE_S)
            took_ms.append(await timed_ms(partial(workspace.run, "true", 600.0)))
        return took_ms
    finally:
        await workspace.close()


async def together(boxes: Boxes, loaded: list[tuple[Task, TaskImage]], at_once: int, count: int) -> list[float]:
    """Milliseconds of each command of sandboxes that are open at the same time."""
    chosen = [loaded[number % len(loaded)] for number in range(at_once)]
    held = await asyncio.gather(*(boxes.start(image, task.config.environment) for task, image in chosen))

    async def work(workspace: Workspace) -> list[float]:
        commands = [f"echo {number} >> log; wc -l < log" for number in range(count)]
        return [await timed_ms(partial(workspace.run, command, 600.0)) for command in commands]

    took_ms = [ms for each in await asyncio.gather(*(work(workspace) for workspace in held)) for ms in each]
    for workspace in held:
        assert (await workspace.run("cat log | wc -l", 600.0)).output.strip() == str(count)
        await workspace.close()
    return took_ms


def layer_kb(boxes: Boxes) -> float:
    """Mean disk of an image's layer."""
    layers = [path for path in (boxes.home / LAYERS).iterdir() if path.is_dir()]
    blocks = sum(path.lstat().st_blocks for layer in layers for path in layer.rglob("*"))
    return blocks / 2 / len(layers)


async def measure(options: argparse.Namespace, place: Path) -> int:
    os.environ["OPENTINKER_DATA_DIR"] = str(place / "data")
    settings = load_settings()
    others, boxes = Others(), await Boxes.open(settings)
    cpu_s, began = own_s(), time.perf_counter()
    added = await add(boxes, settings, write_tasks(place / "tasks", options.tasks), "own")
    print(f"added {options.tasks} tasks in {time.perf_counter() - began:.1f} s, {own_s() - cpu_s:.1f} processor s")
    loaded, cpu_s = [load_task(boxes.home, settings, entry) for entry in added.set.tasks], own_s()
    report = SetReport(name="own", tasks=[await check_task(boxes, task, image) for task, image in loaded])
    cpu_s = (own_s() - cpu_s) / options.tasks
    bare_ms = float(np.median([await timed_ms(run_bare) for _ in range(options.commands)]))
    paused_ms = float(np.median(await after_pauses(boxes, *loaded[0])))
    side_by_side = await together(boxes, loaded, options.at_once, options.commands)
    await boxes.close()
    foreign, disk = others.stop(), layer_kb(boxes)
    names = ("start_ms", "warm_start_ms", "command_ms", "verify_ms")
    cold, warm, command, tests = (report.median(name) or 0.0 for name in names)
    print(f"medians: cold start {cold:.1f} ms, warm start with a command {warm:.1f} ms, command {command:.1f} ms, "
          f"a bare shell {bare_ms:.1f} ms, tests {tests:.1f} ms; a check takes {cpu_s:.2f} processor s")  # fmt: skip
    print(f"command after a pause, with {FILES:,} written files: {paused_ms:.1f} ms")
    p50, p99 = np.percentile(side_by_side, [50, 99])
    print(f"command, {options.at_once} sandboxes: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"a further task takes {disk:.0f} KB; others used {foreign:.2f} cores")
    solved, silent = ([getattr(one, what) for one in report.tasks] for what in ("solution", "nothing"))
    print(f"solution 1.0 in {solved.count(1.0)} of {len(solved)}, nothing 0.0 in {silent.count(0.0)} of {len(silent)}")
    figures = dict(zip(AIMS, (cold, warm, command - bare_ms, paused_ms - bare_ms), strict=True))
    missed = [f"{name}: {figures[name]:.1f} ms, aim {aim:g}" for name, aim in AIMS.items() if figures[name] > aim]
    for line in missed:
        print(f"missed: {line}{'' if foreign <= QUIET_CORES else ' (others used the machine)'}")
    for line in report.errors:
        print(f"wrong: {line}")
    return int(bool(report.errors) or disk > AIM_KB or (bool(missed) and foreign <= QUIET_CORES))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.harbor", description=__doc__)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--commands", type=int, default=20)
    with tempfile.TemporaryDirectory(prefix="opentinker-") as place:
        sys.exit(uvloop.run(measure(parser.parse_args(), Path(place))))


if __name__ == "__main__":
    main()
