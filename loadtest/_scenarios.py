"""Scenarios of the load test. Each is bounded in time and in count, and says what must hold.

Engines and learners are simulated and take the time they are told to: what is measured is the control plane and the
data plane. `Options.seconds` is how long the loaded phase lasts, not how long everything takes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loadtest._dashboards import audience, store_trajectories
from loadtest._open_loop import arrivals, open_loop
from loadtest._report import Report
from loadtest._service import measure
from loadtest._target import Target, target
from opentinker.capacity import Pools, Work, predict
from opentinker.client import AsyncClient
from opentinker.shared.answers import MetricPoint

SLEEPER = "loadtest._environments:Sleeper"
END_S = 180.0
"""A job ends within this time after the loaded phase."""
LINEAR = 0.9
"""Of the ideal throughput of four env workers."""
TENANTS = 4
WATCHING = 200
HEARD = 5.0
COST = 0.05
"""Of a step, that dashboards may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float = 20.0
    rate: float = 50.0
    """Requests a second."""
    jobs: int = 24
    seed: int = 0
    url: str | None = None


Scenario = Callable[[Options, Report], Awaitable[None]]


def job_of(
    at: Target, *, steps: int = 100_000, gen_s: float = 0.2, train_s: float = 0.2, staleness: int = 2, **parts: Any
) -> dict[str, Any]:
    """8 groups of 4 a batch, of 5 tokens a turn; `gen_s` is how long a turn takes."""
    return {
        "name": "load",
        "model": {"base": str(at.model)},
        "environment": {"name": "copy_digits", "config": {"digits": 4}},
        "algorithm": {"group_size": 4, "groups_per_batch": 8, "max_staleness": staleness},
        "train": {
            "learner": "simulated", "simulated_step_s": train_s, "steps": steps, "checkpoint_every": 1000
        },
        **parts,
        "rollout": {
            "engine": "toy",
            "toy": {"seconds_per_token": gen_s / 5, "swap_seconds": 0.02, "skill": 1.0},
            "max_tokens": 5,
            "max_concurrent_groups": 8,
            **parts.get("rollout", {}),
        },
    }  # fmt: skip


async def steps_of(client: AsyncClient, job: str) -> list[MetricPoint]:
    """The trainer's points so far, in order."""
    points, after = [], 0
    while page := await client.metrics(job, after):
        points += [point for point in page if "train_seconds" in point["values"]]
        after = page[-1]["cursor"]
    return points


async def until_step(client: AsyncClient, job: str, step: int, timeout_s: float = END_S) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            seen = await client.job(job)
            if seen["step"] >= step:
                return
            assert seen["state"] not in ("failed", "cancelled"), seen["reason"]
            await asyncio.sleep(0.05)


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


def pace(report: Report, points: list[MetricPoint], since: float, expected: Work | None = None) -> float:
    """Figures of the steps after unix time `since`; gives seconds per step."""
    seen = [point for point in points if point["time"] >= since]
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(seen)]
    step_s = float(statistics.mean(gaps))
    for point, gap in zip(seen[1:], gaps, strict=True):
        values = point["values"]
        report.stage("step: waiting for trajectories", values["trainer/wait_share"] * gap)
        report.stage("step: training", values["train_seconds"])
        report.stage("step: swap", values.get("swap/seconds", 0.0))
        report.stage("step: whole", gap)
    report.figure("steps per second", 1 / step_s, "1/s", "more")
    report.figure("staleness", statistics.mean(point["values"]["staleness/mean"] for point in seen), "versions")
    if expected is not None:
        foreseen = predict(expected, Pools(rollout_workers=1, env_workers=1, sessions=512)).step_s
        report.figure("seconds per step over the prediction", step_s / foreseen, "x", "less")
    return step_s


WORK = Work(
    group_size=4, groups_per_batch=8, max_staleness=2, concurrent_groups=8, turns=1, tokens=5, token_s=0.04,
    env_s=0.0, train_s=0.2, swap_s=0.02,
)  # fmt: skip
"""That of `job_of` as it stands."""


def reader(client: AsyncClient, job: str) -> Callable[[int], Awaitable[object]]:
    """What somebody does who looks at a job, one request a call."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.job(job),
        lambda: client.metrics(job),
        lambda: client.jobs(20),
        lambda: client.event_log(job),
        client.workers,
    ]
    return lambda number: calls[number % len(calls)]()


async def smoke(options: Options, report: Report) -> None:
    """One short job from submission to its end while somebody looks on: is everything there?"""
    async with target(options.url) as at:
        job = (await at.client.submit(job_of(at, steps=5, gen_s=0.05, train_s=0.05)))["id"]
        await open_loop(arrivals(5.0, 3.0, options.seed), reader(at.client, job), report.latency("reads"))
        ended = await at.client.wait(job, END_S)
        report.check("the job succeeds", ended["state"] == "succeeded", ended["state"])
        report.check("no read fails", not report.latency("reads").errors, report.latency("reads").errors)
        await life(at.client, report, job)


async def steady(options: Options, report: Report) -> None:
    """One job that trains all the time, and `rate` reads a second."""
    async with target(options.url) as at:
        job = (await at.client.submit(job_of(at)))["id"]
        await until_step(at.client, job, 5)
        since = time.time()
        reads = report.latency("reads")
        await open_loop(arrivals(options.rate, options.seconds, options.seed), reader(at.client, job), reads)
        points = await steps_of(at.client, job)
        await at.client.cancel(job)
        pace(report, points, since, WORK)
        report.figure("reads per second", len(reads.seconds) / options.seconds, "1/s")
        report.check("no read fails", not reads.errors, reads.errors)


async def burst(options: Options, report: Report) -> None:
    """`jobs` short jobs within a second, for two trainers and two rollout workers."""
    async with target(options.url, trainers=2, rollout_workers=2) as at:
        jobs: list[str] = []

        async def submit(_: int) -> None:
            jobs.append((await at.client.submit(job_of(at, steps=1, gen_s=0.01, train_s=0.01)))["id"])

        began = time.perf_counter()
        times = arrivals(2.0 * options.jobs, 1.0, options.seed)[: options.jobs]
        await open_loop(times, submit, report.latency("submissions"))
        ended = [await at.client.wait(job, END_S) for job in jobs]
        seconds = time.perf_counter() - began
        for job in jobs:
            await life(at.client, report, job)
        good = sum(job["state"] == "succeeded" for job in ended)
        report.figure("jobs per minute", 60 * good / seconds, "1/min", "more")
        report.check("every job succeeds", good == len(times), f"{good} of {len(times)}")


async def slow_env(options: Options, report: Report) -> None:
    """Episodes that mostly wait for their environment, with one env worker and with four."""
    sleep_s, held, turns, groups = 0.1, 4, 2, 4
    rates: dict[int, float] = {}
    for workers in (1, 4):
        async with target(None, env_workers=workers, ENV_SESSIONS=held) as at:
            spec = job_of(
                at, gen_s=0.005, train_s=0.0,
                algorithm={"group_size": 4, "groups_per_batch": groups, "max_staleness": 4},
                environment={"name": SLEEPER, "config": {"sleep_s": sleep_s, "turns": turns}},
                rollout={"max_turns": turns, "max_tokens": 10, "max_tokens_per_turn": 5, "max_concurrent_groups": 16},
            )  # fmt: skip
            job = (await at.client.submit(spec))["id"]
            await until_step(at.client, job, 3)
            since = time.time()
            await asyncio.sleep(options.seconds)
            points = [point for point in await steps_of(at.client, job) if point["time"] >= since]
            await at.client.cancel(job)
        step_s = (points[-1]["time"] - points[0]["time"]) / (len(points) - 1)
        rates[workers] = 4 * groups / step_s
        work = Work(
            group_size=4, groups_per_batch=groups, max_staleness=4, concurrent_groups=16, turns=turns, tokens=5,
            token_s=0.001, env_s=sleep_s, train_s=0.0, swap_s=0.02,
        )  # fmt: skip
        foreseen = predict(work, Pools(rollout_workers=1, env_workers=workers, sessions=held)).trajectories_per_s
        report.figure(f"trajectories per second, {workers} env workers", rates[workers], "1/s", "more")
        report.figure(f"throughput over the prediction, {workers} env workers", rates[workers] / foreseen, "x", "more")
    linear = rates[4] / rates[1] / 4
    report.figure("share of linear from 1 to 4 env workers", linear, "x", "more")
    report.check(f"throughput grows at least {LINEAR} times linearly", linear >= LINEAR, f"{linear:.3f}")


async def dead_worker(options: Options, report: Report) -> None:
    """An env worker, then a rollout worker, is killed in the middle of a job."""
    steps = max(20, int(options.seconds / 0.3))
    async with target(None, rollout_workers=2, env_workers=2) as at:
        spec = job_of(at, steps=steps, environment={"name": SLEEPER, "config": {"sleep_s": 0.1, "turns": 1}})
        job = (await at.client.submit(spec))["id"]
        killed: list[tuple[str, float]] = []
        for name, step in (("env-0", steps // 4), ("rollout-0", steps // 2)):
            await until_step(at.client, job, step)
            killed.append((name, time.time()))
            os.kill(at.pids[name], signal.SIGKILL)
        ended = await at.client.wait(job, END_S)
        points = await steps_of(at.client, job)
        failures = await at.client.failures(job)
        await life(at.client, report, job)
    times = [float(point["time"]) for point in points]
    for name, when in killed:
        longest = max(b - a for a, b in itertools.pairwise(times) if b > when and a < when + 30)
        report.figure(f"longest step after {name} was killed", longest, "s", "less")
    done = [point["step"] for point in points]
    lost = len(failures["failures"])
    report.check("the job succeeds", ended["state"] == "succeeded", f"{ended['state']} {ended['reason'] or ''}")
    report.check("every step is there once", done == list(range(1, steps + 1)), f"{len(set(done))} of {steps}")
    report.check("no group is lost", lost == 0, lost)


async def many_tenants(options: Options, report: Report) -> None:
    """Tenants that submit and read at the same time: is each served as well as the others, and alone in its house?"""
    async with target(options.url, trainers=2, rollout_workers=2) as at:
        keys = [await at.client.create_key("member", tenant=f"load-{number}", name="load") for number in range(TENANTS)]
        clients = [at.as_somebody(key["key"]) for key in keys]
        try:
            jobs: list[list[str]] = [[] for _ in clients]

            async def submit(number: int) -> None:
                whose = number % TENANTS
                spec = job_of(at, steps=1, gen_s=0.01, train_s=0.01)
                jobs[whose].append((await clients[whose].submit(spec))["id"])

            async def read(number: int) -> None:
                await clients[number % TENANTS].jobs(20)

            each = max(1, options.jobs // TENANTS)
            spread = arrivals(each * TENANTS / options.seconds * 4, options.seconds / 2, options.seed)
            times = spread[: each * TENANTS]
            reads = arrivals(options.rate, options.seconds, options.seed + 1)
            await asyncio.gather(
                open_loop(times, submit, report.latency("submissions")), open_loop(reads, read, report.latency("reads"))
            )
            waits: list[float] = []
            for client, own in zip(clients, jobs, strict=True):
                ended = [await client.wait(job, END_S) for job in own]
                report.check("every job succeeds", all(job["state"] == "succeeded" for job in ended), len(ended))
                waits.append(statistics.mean((job["finished"] or 0.0) - job["created"] for job in ended))
                seen = {job["id"] for job in await client.jobs(500)}
                report.check("a tenant sees its jobs and no other", seen == set(own), len(seen ^ set(own)))
                for job in own:
                    await life(client, report, job)
            report.figure("slowest tenant over the fastest", max(waits) / min(waits), "x", "less")
        finally:
            for client in clients:
                await client.close()
            for key in keys:
                await at.client.revoke_key(key["id"])


async def dashboards(options: Options, report: Report) -> None:
    """A job that trains, alone and then with 200 people who watch it live, and 50 x 64 KiB of trajectories a second."""
    async with target(None) as at:
        job = (await at.client.submit(job_of(at)))["id"]
        await until_step(at.client, job, 5)
        since = time.time()
        await asyncio.sleep(options.seconds)
        alone = statistics.median(_gaps(await steps_of(at.client, job), since, time.time()))
        async with audience(at.client, job, WATCHING) as watching:
            since, heard = time.time(), watching.heard
            await asyncio.sleep(options.seconds)
            watched = statistics.median(_gaps(await steps_of(at.client, job), since, time.time()))
            heard = watching.heard - heard
            await store_trajectories(at, report, options.seconds, options.seed)
            report.check("nobody is refused or cut off", watching.refused == 0, watching.refused)
        await at.client.cancel(job)
    each = heard / WATCHING / options.seconds
    report.figure("messages a second and subscriber", each, "1/s")
    report.check(f"each hears {HEARD:g} messages a second", each >= HEARD, f"{each:.1f}")
    report.figure("step with subscribers over the step alone", watched / alone, "x", "less")
    report.check(f"subscribers cost a step less than {COST:.0%}", watched / alone < 1 + COST, f"{watched / alone:.3f}")


async def service(options: Options, report: Report) -> None:
    """All that is promised of the service, in one table: submissions, cancels in every state, a killed scheduler."""
    await measure(report, options.seconds, options.seed)


def _gaps(points: list[MetricPoint], since: float, until: float) -> list[float]:
    times = [point["time"] for point in points if since <= point["time"] <= until]
    return [b - a for a, b in itertools.pairwise(times)]


SCENARIOS: dict[str, Scenario] = {
    "smoke": smoke,
    "steady": steady,
    "burst": burst,
    "slow-env": slow_env,
    "dead-worker": dead_worker,
    "many-tenants": many_tenants,
    "dashboards": dashboards,
    "service": service,
}
OWN = {"slow-env", "dead-worker", "dashboards", "service"}
"""They start and end processes, and so never work on somebody else's server."""
