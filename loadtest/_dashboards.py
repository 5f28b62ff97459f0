"""The scenario `dashboards`: a job that trains while many people look at it, and large trajectories are stored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import nats
import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg

from loadtest._open_loop import arrivals, open_loop
from loadtest._report import Report
from loadtest._target import Target
from loadtest.trajectory_plane import make_group
from opentinker.client import AsyncClient
from opentinker.nearby import read_state
from opentinker.shared.bus import Bus
from opentinker.shared.subjects import GROUP, ROLLOUT

PLANE = "load-plane"
"""Of stored trajectories: no job, so that nobody consumes them."""
TRAJECTORY_BYTES = 64 * 1024
TOKEN_BYTES = 9
TRAJECTORIES_PER_S = 50.0
ACK_S = 0.2


@dataclass(slots=True)
class Audience:
    heard: int = 0
    refused: int = 0


@contextlib.asynccontextmanager
async def audience(client: AsyncClient, job: str, many: int) -> AsyncIterator[Audience]:
    """`many` subscribers of a job's live metrics, each with a credential and a WebSocket of its own."""
    found, connections = Audience(), []

    async def hear(_: Msg) -> None:
        found.heard += 1

    async def refused(_: Exception) -> None:
        found.refused += 1

    try:
        for _ in range(many):
            given = await client.stream_credentials(job)
            nc = Client()
            connections.append(nc)
            await nc.connect(given["servers"], token=given["token"], inbox_prefix=given["inbox"], error_cb=refused)
            await nc.subscribe(given["subjects"]["metrics"], cb=hear)
        await asyncio.gather(*(nc.flush() for nc in connections))
        yield found
    finally:
        with contextlib.suppress(nats.errors.Error):
            await asyncio.gather(*(nc.close() for nc in connections))


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
