"""Scenarios that measure a job on so many workers, beside what the simulation of `opentinker plan` says of them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass, replace

from loadtest.scenarios.jobs import SLEEPER, Options, job_of, reader, steps_of, training, until
from loadtest.support.environments import Sleeper
from loadtest.support.open_loop import arrivals, open_loop
from loadtest.support.report import Report
from loadtest.support.target import START_S, Target, target
from opentinker.client import AsyncClient
from opentinker.serve.ws_server import listening
from opentinker.shared.api_types import MetricPoint, Worker
from opentinker.shared.data.pipeline_simulation import Pools, Work, predict

BAND = (0.75, 1.25)
"""Measured throughput over that of the prediction."""
NEAR_VERSIONS, NEAR_SHARE = 0.75, 0.2
"""So far may measured staleness, and the share of the time in which the trainer waits, be from the prediction. Where
generation and training take the same time, chance says whether groups begin before a swap: that is half a version."""
LINEAR = 0.9
"""Of the ideal throughput of four env workers."""
STEADY = {1: 0.2, 2: 0.6}
"""By number of rollout workers: seconds to generate a batch, which two of them do in half the time."""
WORK = Work(
    group_size=4, groups_per_batch=8, max_staleness=2, concurrent_groups=8, turns=1, tokens=5, token_s=0.04,
    env_s=0.0, train_s=0.2, swap_s=0.02,
)  # fmt: skip
"""That of `job_of` as it stands."""
SLEEP_S, TURNS, GROUPS, HELD = 0.1, 2, 4, 4
"""Of `slow_env`: how long a call takes, calls of an episode after the first, groups of a batch, sessions of one of our
env workers."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over the measured steps."""

    step_s: float
    staleness: float
    waits: float
    """Share of the time in which the trainer waits for trajectories."""


def pace(report: Report, points: list[MetricPoint], since: float, of: str) -> Pace:
    """Of the steps after unix time `since`; their stages are reported. `of`: on which workers."""
    seen = [point for point in points if point["time"] >= since]
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(seen)]
    waited = [point["values"]["trainer/wait_share"] * gap for point, gap in zip(seen[1:], gaps, strict=True)]
    for point, gap, wait in zip(seen[1:], gaps, waited, strict=True):
        report.stage(f"step: waiting for trajectories, {of}", wait)
        report.stage(f"step: training, {of}", point["values"]["train_seconds"])
        report.stage(f"step: swap, {of}", point["values"].get("swap/seconds", 0.0))
        report.stage(f"step: whole, {of}", gap)
    staleness = statistics.mean(point["values"]["staleness/mean"] for point in seen)
    return Pace(statistics.mean(gaps), staleness, sum(waited) / sum(gaps))


def compare(report: Report, seen: Pace, work: Work, pools: Pools, of: str) -> None:
    """Figures of both, and whether they agree."""
    foreseen = predict(work, pools)
    ratio = foreseen.step_s / seen.step_s
    low, high = BAND
    report.figure(f"throughput over the prediction, {of}", ratio, "x", "more")
    report.check(f"throughput is {low:g} to {high:g} times the prediction, {of}", low <= ratio <= high, f"{ratio:.3f}")
    for what, measured, predicted, near, unit in (
        ("staleness", seen.staleness, foreseen.staleness, NEAR_VERSIONS, "versions"),
        ("share of waiting", seen.waits, foreseen.trainer_waits, NEAR_SHARE, "of the time"),
    ):
        report.figure(f"{what}, {of}", measured, unit)
        both = f"{measured:.2f}, predicted {predicted:.2f}"
        report.check(f"{what} is within {near:g} of the prediction, {of}", abs(measured - predicted) <= near, both)


async def ready(client: AsyncClient, pool: str, many: int = 1) -> list[Worker]:
    """Workers of the pool, as soon as so many of them are there. Raises TimeoutError."""

    async def there() -> list[Worker]:
        return [worker for worker in await client.workers() if worker["pool"] == pool]

    def enough(found: list[Worker]) -> bool:
        return len(found) >= many and all(worker["status"] != "loading" or worker["job"] for worker in found)

    return await until(there, enough, f"{many} workers of the pool {pool}", START_S)


def pools_of(rollout_workers: int, env_workers: list[Worker]) -> Pools:
    """By what they say themselves of how many sessions they hold."""
    sessions = statistics.mean(worker["detail"]["capacity"] for worker in env_workers)
    return Pools(rollout_workers=rollout_workers, env_workers=len(env_workers), sessions=int(sessions))


async def steady(options: Options, report: Report) -> None:
    """A job that trains all the time, on one rollout worker and then on two, and `rate` reads a second."""
    reads, cases = report.latency("reads"), 0
    async with target(options.url, rollout_workers=max(STEADY)) as at:
        env_workers = await ready(at.client, "env")
        there = len(await ready(at.client, "rollout", max(STEADY) if options.url is None else 1))
        for many, gen_s in STEADY.items():
            of = f"{many} rollout worker{'s' if many > 1 else ''}"
            if many > there:
                report.note(f"{of}: the server has {there}")
                continue
            both = {"rollout_workers": many, "min_rollout_workers": many}
            async with training(at, job_of(at.model, gen_s=gen_s, resources=both), 5) as job:
                since = time.time()
                await open_loop(arrivals(options.rate, options.seconds, options.seed), reader(at.client, job), reads)
                seen = pace(report, await steps_of(at.client, job), since, of)
            cases += 1
            report.figure(f"steps per second, {of}", 1 / seen.step_s, "1/s", "more")
            compare(report, seen, replace(WORK, token_s=gen_s / WORK.tokens), pools_of(many, env_workers), of)
    report.figure("reads per second", len(reads.seconds) / options.seconds / cases, "1/s")
    report.check("no read fails", not reads.errors, reads.errors)


async def slow_env(options: Options, report: Report) -> None:
    """Episodes that wait for their environment: with one env worker and with four, or with those at the URL."""
    told = {"sleep_s": SLEEP_S, "turns": TURNS}
    if options.url is not None:
        # The environment is here, behind a URL: their process need not import it. They hold more sessions than this
        # machine could play of them, so the job asks for as many as our four env workers hold.
        async with target(options.url) as at, listening(Sleeper, "127.0.0.1", 0, 16 * HELD) as place:
            await _slow(at, options, report, {"name": place, "config": {"config": told}}, 4 * HELD)
        report.note("growth with env workers: theirs are as many as they are")
        return
    rates = {}
    for workers in (1, 4):
        async with target(None, env_workers=workers, ENV_SESSIONS=HELD) as at:
            rates[workers] = await _slow(at, options, report, {"name": SLEEPER, "config": told}, 16 * HELD, workers)
    linear = rates[4] / rates[1] / 4
    report.figure("share of linear from 1 to 4 env workers", linear, "x", "more")
    report.check(f"throughput grows at least {LINEAR} times linearly", linear >= LINEAR, f"{linear:.3f}")


async def _slow(
    at: Target, options: Options, report: Report, environment: dict[str, object], episodes: int, at_least: int = 1
) -> float:
    """Trajectories a second of a job that plays at most `episodes` at once, on `at_least` so many env workers."""
    work = Work(
        group_size=4, groups_per_batch=GROUPS, max_staleness=4, concurrent_groups=episodes // 4, turns=TURNS, tokens=5,
        token_s=0.001, env_s=SLEEP_S, train_s=0.0, swap_s=0.02,
    )  # fmt: skip
    spec = job_of(
        at.model, gen_s=0.005, train_s=work.train_s, environment=environment,
        algorithm={"group_size": 4, "groups_per_batch": GROUPS, "max_staleness": work.max_staleness},
        rollout={
            "max_turns": TURNS, "max_tokens": 5 * TURNS, "max_tokens_per_turn": 5,
            "max_concurrent_groups": work.concurrent_groups,
        },
    )  # fmt: skip
    there = await ready(at.client, "env", at_least)
    of = f"{len(there)} env workers"
    async with training(at, spec, 3) as job:
        since = time.time()
        await asyncio.sleep(options.seconds)
        seen = pace(report, await steps_of(at.client, job), since, of)
    rate = work.group_size * GROUPS / seen.step_s
    report.figure(f"trajectories per second, {of}", rate, "1/s", "more")
    compare(report, seen, work, pools_of(1, there), of)
    return rate
