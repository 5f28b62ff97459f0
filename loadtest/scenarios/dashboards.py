"""The scenario `dashboards`: a job that trains while many people look at it, and large trajectories are stored.

What a page of a job does is that of dashboard/src: it hears all that the job says over a WebSocket of its own, reads
the history of metrics when it opens, and asks for the head and for lists again and again (POLLS).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import nats
import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg

from loadtest.scenarios.jobs import Options, job_of, steps_of, training
from loadtest.support.groups import make_group
from loadtest.support.open_loop import Latencies, arrivals, open_loop
from loadtest.support.report import Report
from loadtest.support.target import Target, target
from opentinker.client import AsyncClient
from opentinker.local.discovery import read_state
from opentinker.shared.api_types import MetricPoint
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import GROUP, ROLLOUT

PLANE = "load-plane"
"""Of stored trajectories: no job, so that nobody consumes them."""
TRAJECTORY_BYTES = 64 * 1024
TOKEN_BYTES = 9
TRAJECTORIES_PER_S = 50.0
ACK_S = 0.2
HEARD = 5.0
COST = 0.05
"""Of a step, that dashboards may have."""
HEARS = ("metrics", "logs", "events", "rollouts", "timeline")
"""What a page subscribes to: follow.ts, and BESIDE in hooks.ts."""
KEYS_S = 60.0
Ask = Callable[[AsyncClient, str], Awaitable[object]]
POLLS: tuple[tuple[float, Ask], ...] = (
    (5.0, lambda client, job: client.job(job)),
    (10.0, lambda client, _: client.jobs(200)),
    (KEYS_S, lambda client, _: client.keys()),
)
"""Seconds from poll to poll: the head (job.tsx), jobs to compare with (curves.tsx, the part that one sees first), names
of keys (hooks.ts)."""


@dataclass(slots=True)
class Audience:
    heard: int = 0
    """Points of metrics."""
    messages: int = 0
    """With all that is heard beside them."""
    refused: int = 0


@contextlib.asynccontextmanager
async def audience(client: AsyncClient, job: str, many: int) -> AsyncIterator[Audience]:
    """`many` pages of a job that have opened, each with a credential and a WebSocket of its own."""
    found, connections = Audience(), []

    async def hear(_: Msg) -> None:
        found.messages += 1

    async def hear_metrics(_: Msg) -> None:
        found.messages += 1
        found.heard += 1

    async def refused(_: Exception) -> None:
        found.refused += 1

    try:
        for _ in range(many):
            given = await client.stream_credentials(job)
            nc = Client()
            connections.append(nc)
            await nc.connect(given["servers"], token=given["token"], inbox_prefix=given["inbox"], error_cb=refused)
            for name in HEARS:
                await nc.subscribe(given["subjects"][name], cb=hear_metrics if name == "metrics" else hear)
            await client.metrics(job)
        await asyncio.gather(*(nc.flush() for nc in connections))
        yield found
    finally:
        with contextlib.suppress(nats.errors.Error):
            await asyncio.gather(*(nc.close() for nc in connections))


def polls(pages: int, seconds: float, seed: int, asks: Sequence[float]) -> list[tuple[float, int]]:
    """Return when each of `asks` (seconds between two requests) is due; every page begins at a random moment."""
    random = np.random.default_rng(seed)
    due: list[tuple[float, int]] = []
    for number, every_s in enumerate(asks):
        for first in random.uniform(0.0, every_s, pages):
            due += [(float(when), number) for when in np.arange(first, seconds, every_s)]
    return sorted(due)


async def look(client: AsyncClient, job: str, options: Options, seed: int, into: Latencies) -> None:
    """Send the requests of open pages."""
    may = "keys:read" in (await client.whoami())["scopes"]
    asks = [one for one in POLLS if may or one[0] != KEYS_S]
    due = polls(options.pages, options.seconds, seed, [every_s for every_s, _ in asks])

    async def poll(number: int) -> None:
        await asks[due[number][1]][1](client, job)

    rest = asyncio.sleep(options.seconds)
    await asyncio.gather(open_loop(np.array([when for when, _ in due]), poll, into), rest)


async def store_trajectories(at: Target, report: Report, seconds: float, seed: int) -> None:
    """Groups of one trajectory of 64 KiB, from publish to the ack of a stream that is synced at every write."""
    assert at.data_dir is not None
    group = make_group([TRAJECTORY_BYTES // TOKEN_BYTES], job=PLANE)
    stored = report.latency("64 KiB trajectory until its ack")
    password = (at.data_dir / "run" / "access" / f"nats-{ROLLOUT}").read_text().strip()
    async with Bus.connect(str(read_state(at.data_dir)["nats_url"]), "load", ROLLOUT, password) as bus:
        times: np.ndarray = arrivals(TRAJECTORIES_PER_S, seconds, seed)
        await open_loop(times, lambda n: bus.publish(GROUP, group, f"{PLANE}-{time.time_ns()}-{n}", job=PLANE), stored)
    summary = stored.summary()
    good = not stored.errors and summary.get("p99", ACK_S) < ACK_S
    report.check(f"trajectories are acknowledged within {ACK_S:g} s (p99)", good, f"{summary.get('p99', -1):.3f} s")


async def dashboards(options: Options, report: Report) -> None:
    """A job that trains, alone and then with 200 pages that watch it live, and 50 x 64 KiB of trajectories a second."""
    asked = report.latency("polls of pages")
    async with target(options.url) as at, training(at, job_of(at.model), 5) as job:
        since = time.time()
        await asyncio.sleep(options.seconds)
        alone = statistics.median(_gaps(await steps_of(at.client, job), since, time.time()))
        async with audience(at.client, job, options.pages) as watching:
            since, before, cpu_s = time.time(), replace(watching), time.process_time()
            await look(at.client, job, options, options.seed, asked)
            seconds = time.time() - since
            report.figure("cores that the pages themselves use here", (time.process_time() - cpu_s) / seconds, "")
            watched = statistics.median(_gaps(await steps_of(at.client, job), since, since + seconds))
            heard, messages = watching.heard - before.heard, watching.messages - before.messages
            if options.url is None:
                await asyncio.gather(
                    look(at.client, job, options, options.seed + 1, asked),
                    store_trajectories(at, report, options.seconds, options.seed),
                )
            else:
                report.note("trajectories until their ack: they are stored with a rollout worker's password")
            report.check("nobody is refused or cut off", watching.refused == 0, watching.refused)
    each = heard / options.pages / seconds
    report.figure("messages a second and subscriber", each, "1/s")
    report.figure("with all that a page hears", messages / options.pages / seconds, "1/s")
    report.figure("polls a second", len(asked.seconds) / seconds / (2 if options.url is None else 1), "1/s")
    report.check("no poll fails", not asked.errors, dict(asked.errors))
    report.check(f"each hears {HEARD:g} messages a second", each >= HEARD, f"{each:.1f}")
    report.figure("step with subscribers over the step alone", watched / alone, "x", "less")
    report.check(f"subscribers cost a step less than {COST:.0%}", watched / alone < 1 + COST, f"{watched / alone:.3f}")


def _gaps(points: list[MetricPoint], since: float, until: float) -> list[float]:
    times = [point["time"] for point in points if since <= point["time"] <= until]
    return [b - a for a, b in itertools.pairwise(times)]
