"""The jobs that scenarios submit, and what is read of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loadtest.support.report import Report
from loadtest.support.target import Target
from opentinker.client import ApiConflict, AsyncClient
from opentinker.shared.api_types import MetricPoint

T = TypeVar("T")
SLEEPER = "loadtest.support.environments:Sleeper"
LOOK_S = 0.02
END_S = 180.0
"""A job ends within this time after the loaded phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float = 20.0
    rate: float = 50.0
    """Requests a second."""
    jobs: int = 24
    pages: int = 200
    """Open pages that watch a job."""
    seed: int = 0
    url: str | None = None
    """Of a server that runs already; None: one is started."""


def job_of(
    model: Path, *, steps: int = 100_000, gen_s: float = 0.2, train_s: float = 0.2, swap_s: float = 0.02,
    staleness: int = 2, **parts: Any,
) -> dict[str, Any]:  # fmt: skip
    """8 groups of 4 a batch, of 5 tokens a turn; `gen_s` is how long a turn takes."""
    return {
        "name": "load",
        "model": {"base": str(model)},
        "environment": {"name": "copy_digits", "config": {"digits": 4}},
        "algorithm": {"group_size": 4, "groups_per_batch": 8, "max_staleness": staleness},
        "train": {
            "learner": "simulated", "simulated_step_s": train_s, "steps": steps, "checkpoint_every": 1000
        },
        **parts,
        "rollout": {
            "engine": "toy",
            "toy": {"seconds_per_token": gen_s / 5, "swap_seconds": swap_s, "skill": 1.0},
            "max_tokens": 5,
            "max_concurrent_groups": 8,
            **parts.get("rollout", {}),
        },
    }  # fmt: skip


@contextlib.asynccontextmanager
async def training(at: Target, spec: dict[str, Any], steps: int) -> AsyncIterator[str]:
    """A job that has done so many steps. It is cancelled in the end, whatever happens: the server may be another's."""
    job = (await at.client.submit(spec))["id"]
    try:
        await until_step(at.client, job, steps)
        yield job
    finally:
        with contextlib.suppress(ApiConflict):  # it has failed
            await at.client.cancel(job)


async def steps_of(client: AsyncClient, job: str) -> list[MetricPoint]:
    """The trainer's points so far, in order."""
    return [point for point in await client.metrics(job) if "train_seconds" in point["values"]]


async def until(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object], what: str, within_s: float = END_S
) -> T:
    """Call `read` until `holds` accepts its result, and return it. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + within_s
    while not holds(found := await read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(LOOK_S)
    return found


async def until_step(client: AsyncClient, job: str, step: int) -> None:
    async def done() -> int:
        seen = await client.job(job)
        assert seen["state"] not in ("failed", "cancelled"), seen["reason"]
        return seen["step"]

    await until(done, lambda now: now >= step, f"step {step} of {job}")


async def life(client: AsyncClient, report: Report, job: str) -> None:
    """Stages of a job that is over, by its events."""
    began: dict[str, float] = {}
    for line in await client.event_log(job):
        began.setdefault(str(line.get("state", line["event"])), float(line["time"]))
    first = next(iter(await steps_of(client, job)), None)
    if first is not None:
        began["first step"] = float(first["time"])
    path = ["queued", "starting", "running", "first step", "succeeded"]
    for before, after in itertools.pairwise(path):
        if before in began and after in began:
            report.stage(f"job: {before} to {after}", max(0.0, began[after] - began[before]))


def reader(client: AsyncClient, job: str) -> Callable[[int], Awaitable[object]]:
    """Return a function that makes the next request of a person who looks at a job."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.job(job),
        lambda: client.metrics(job),
        lambda: client.jobs(20),
        lambda: client.event_log(job),
        client.workers,
    ]
    return lambda number: calls[number % len(calls)]()
