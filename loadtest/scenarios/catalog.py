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

from loadtest.scenarios.dashboards import dashboards
from loadtest.scenarios.jobs import END_S, SLEEPER, Options, job_of, life, reader, steps_of, until_step
from loadtest.scenarios.scaling import slow_env, steady
from loadtest.scenarios.service import measure
from loadtest.support.open_loop import arrivals, open_loop
from loadtest.support.report import Report
from loadtest.support.target import target

TENANTS = 4


Scenario = Callable[[Options, Report], Awaitable[None]]


async def smoke(options: Options, report: Report) -> None:
    """One short job from submission to its end while somebody looks on: is everything there?"""
    async with target(options.url) as at:
        job = (await at.client.submit(job_of(at.model, steps=5, gen_s=0.05, train_s=0.05)))["id"]
        await open_loop(arrivals(5.0, 3.0, options.seed), reader(at.client, job), report.latency("reads"))
        ended = await at.client.wait(job, END_S)
        report.check("the job succeeds", ended["state"] == "succeeded", ended["state"])
        report.check("no read fails", not report.latency("reads").errors, report.latency("reads").errors)
        await life(at.client, report, job)


async def burst(options: Options, report: Report) -> None:
    """`jobs` short jobs within a second, for two trainers and two rollout workers."""
    async with target(options.url, trainers=2, rollout_workers=2) as at:
        jobs: list[str] = []

        async def submit(_: int) -> None:
            jobs.append((await at.client.submit(job_of(at.model, steps=1, gen_s=0.01, train_s=0.01)))["id"])

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


async def dead_worker(options: Options, report: Report) -> None:
    """An env worker, then a rollout worker, is killed in the middle of a job."""
    steps = max(20, int(options.seconds / 0.3))
    async with target(None, rollout_workers=2, env_workers=2) as at:
        spec = job_of(at.model, steps=steps, environment={"name": SLEEPER, "config": {"sleep_s": 0.1, "turns": 1}})
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
                spec = job_of(at.model, steps=1, gen_s=0.01, train_s=0.01)
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


async def service(options: Options, report: Report) -> None:
    """All that is promised of the service, in one table: submissions, cancels in every state, a killed scheduler."""
    await measure(report, options.seconds, options.seed)


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
KILLS = "it kills processes of the service, and those of a server that others started are not ours to kill"
OWN = {"dead-worker": KILLS, "service": f"{KILLS}; it also looks into their files"}
"""These never work on somebody else's server, and why."""
