"""Harbor tasks added and checked on this machine, without any service: `opentinker env add` and
`opentinker env check harbor:NAME`.

A check plays what a job would play: starts, the task's solution, nothing at all, and the tests several times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from opentinker.envs.harbor.box import BoxError, BoxLost
from opentinker.envs.harbor.boxes import Boxes
from opentinker.envs.harbor.image import TaskImage
from opentinker.envs.harbor.library import Added, add, load_set, load_task, set_name
from opentinker.envs.harbor.task import Task
from opentinker.envs.harbor.verifier import VerifierFailed, solve, verify
from opentinker.envs.harbor.workspace import Workspace
from opentinker.shared.asyncio_tools import sleep
from opentinker.shared.runtime.launched_processes import ticks_of
from opentinker.shared.sandbox.sandbox import Unavailable
from opentinker.shared.settings_sources import load_settings
from opentinker.shared.types.errors import OpenTinkerError, SpecError

RESETS = 5
COMMANDS = 5
VERIFICATIONS = 3
"""Runs of the tests on the same files, after the solution."""
GONE_S = 2.0
WARM_WAIT_S = 30.0
POLL_S = 0.02
COMMAND_S = 60.0
KIB = 1024


class TaskReport(msgspec.Struct, kw_only=True):
    """Findings about one task; None: the check did not get that far."""

    task: str
    errors: list[str] = []
    advice: list[str] = []
    solution: float | None = None
    """Reward after the task's solution."""
    nothing: float | None = None
    """Reward of an agent that does nothing."""
    equal_resets: int | None = None
    """Starts with the same files as the first one; None too where the working directory is the whole file system."""
    verifier_rewards: list[float] = []
    left_running: int | None = None
    """Processes that the solution left in the sandbox; they end with it."""
    leaked: int = 0
    """Processes that outlived their sandbox."""
    start_ms: float | None = None
    """Median of cold starts."""
    warm_start_ms: float | None = None
    command_ms: float | None = None
    """Median of `true` in the terminal."""
    verify_ms: float | None = None
    written_kb: float | None = None
    """On disk, after the solution."""


class SetReport(msgspec.Struct, kw_only=True):
    name: str
    tasks: list[TaskReport]

    @property
    def errors(self) -> list[str]:
        return [f"{report.task}: {error}" for report in self.tasks for error in report.errors]

    def median(self, field: str) -> float | None:
        values = [getattr(report, field) for report in self.tasks if getattr(report, field) is not None]
        return round(statistics.median(values), 2) if values else None


def add_tasks(source: Path, name: str | None, told: Callable[[str], None]) -> Added:
    """Raises SpecError, OpenTinkerError."""
    return asyncio.run(_add(source, name or set_name(source), told))


async def _add(source: Path, name: str, told: Callable[[str], None]) -> Added:
    settings = load_settings()
    async with _opened() as boxes:
        try:
            return await add(boxes, settings, source, name, told)
        except OSError as error:
            raise OpenTinkerError(f"{error.filename or source}: {error.strerror or error}") from None


def check_tasks(name: str, only: str = "", told: Callable[[TaskReport], None] = lambda _: None) -> SetReport:
    """Check the tasks of a set, or one of them. Raises SpecError, OpenTinkerError."""
    return asyncio.run(_check(name, only, told))


async def _check(name: str, only: str, told: Callable[[TaskReport], None]) -> SetReport:
    settings = load_settings()
    async with _opened() as boxes:
        try:
            entries = load_set(boxes.home, name).tasks
        except ValueError as error:
            raise OpenTinkerError(str(error)) from None
        chosen = [entry for entry in entries if only in ("", entry.name)]
        if not chosen:
            raise OpenTinkerError(f"the set {name} has no task {only!r}")
        reports = []
        for entry in chosen:
            try:
                task, image = load_task(boxes.home, settings, entry)
                report = await check_task(boxes, task, image)
            except (SpecError, OSError) as error:
                report = TaskReport(task=entry.name, errors=[str(error)])
            told(report)
            reports.append(report)
    return SetReport(name=name, tasks=reports)


@asynccontextmanager
async def _opened() -> AsyncIterator[Boxes]:
    boxes = await Boxes.open(load_settings())
    try:
        yield boxes
    finally:
        await boxes.close()


async def check_task(boxes: Boxes, task: Task, image: TaskImage) -> TaskReport:
    """Play a task in all these ways. What goes wrong is in the report."""
    report = TaskReport(task=task.name)
    for part in (_resets, _warm_start, _solution):
        try:
            await part(boxes, task, image, report)
        except (Unavailable, BoxLost, BoxError, VerifierFailed, OSError) as error:
            report.errors.append(f"environment error, never reward 0: {error}")
    _judge(task, report)
    return report


async def _resets(boxes: Boxes, task: Task, image: TaskImage, report: TaskReport) -> None:
    """Cold starts, one after the other; the last one does nothing and is graded."""
    starts, digests, commands = [], [], []
    for number in range(RESETS):
        began = time.perf_counter()
        workspace = await boxes.start(image, task.config.environment)
        try:
            starts.append(time.perf_counter() - began)
            cwd = workspace.shell.cwd
            if cwd != "/":
                digests.append((await workspace.ask("digest", path=cwd)).digest)
            for _ in range(COMMANDS):
                began = time.perf_counter()
                await workspace.run("true", COMMAND_S)
                commands.append(time.perf_counter() - began)
            report.start_ms, report.command_ms = _median_ms(starts), _median_ms(commands)
            report.equal_resets = digests.count(digests[0]) if digests else None
            if number == RESETS - 1:
                report.nothing, _ = await verify(workspace, task)
        finally:
            report.leaked += await _close(workspace)


async def _warm_start(boxes: Boxes, task: Task, image: TaskImage, report: TaskReport) -> None:
    """Start one, which has another one started in advance; take that."""
    machine = task.config.environment
    report.leaked += await _close(await boxes.take(image, machine))
    due = time.monotonic() + WARM_WAIT_S
    while not boxes.has_warm(image, machine):
        if time.monotonic() > due:  # harbor_warm is 0
            return
        await asyncio.sleep(POLL_S)
    began = time.perf_counter()
    workspace = await boxes.take(image, machine)
    await workspace.run("true", COMMAND_S)
    report.warm_start_ms = _median_ms([time.perf_counter() - began])
    report.leaked += await _close(workspace)


async def _solution(boxes: Boxes, task: Task, image: TaskImage, report: TaskReport) -> None:
    """Run the solution and grade what it leaves several times, each time on a copy of it."""
    if not task.has_solution:
        return
    workspace = await boxes.start(image, task.config.environment)
    seconds = []
    try:
        ran = await solve(workspace, task)
        if ran.status or ran.late:
            how = "took too long" if ran.late else f"ended with status {ran.status}"
            report.advice.append(f"the solution {how}: {ran.output.strip()[-300:]}")
        report.left_running = (await workspace.ask("processes")).count
        await workspace.stop()
        report.written_kb = round(await asyncio.to_thread(workspace.written) / KIB, 1)
        for _ in range(VERIFICATIONS):
            fork = await asyncio.to_thread(workspace.fork)
            began = time.perf_counter()
            try:
                reward, _ = await verify(fork, task)
                seconds.append(time.perf_counter() - began)
            finally:
                report.leaked += await _close(fork)
            report.verifier_rewards.append(reward)
        report.solution, report.verify_ms = report.verifier_rewards[0], _median_ms(seconds)
    finally:
        report.leaked += await _close(workspace)


def _judge(task: Task, report: TaskReport) -> None:
    if not task.has_solution:
        report.advice.append("it has no solution: that full marks can be had is not shown")
    elif report.solution is not None and report.solution != 1.0:
        report.errors.append(f"its solution gets {report.solution:g}, not 1")
    if report.nothing:
        report.errors.append(f"doing nothing gets {report.nothing:g}, not 0")
    if report.equal_resets is not None and report.equal_resets < RESETS:
        report.errors.append(f"only {report.equal_resets} of {RESETS} starts had the same files")
    if len(set(report.verifier_rewards)) > 1:
        report.errors.append(f"its verifier is flaky: the same files got {report.verifier_rewards}")
    if report.leaked:
        report.errors.append(f"{report.leaked} processes outlived their sandbox")


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 2)


async def _close(workspace: Workspace) -> int:
    """Close it and return how many of its processes are still there. The kernel takes a moment for those it kills."""
    pids = await asyncio.to_thread(workspace.pids)
    born = {pid: ticks_of(pid) for pid in pids}  # its number may be another process's later
    await workspace.close()
    due = time.monotonic() + GONE_S
    while (left := sum(at is not None and ticks_of(pid) == at for pid, at in born.items())) and time.monotonic() < due:
        await sleep(POLL_S)
    return left
