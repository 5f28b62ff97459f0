"""Measures the queue: 1,000 queued jobs of 50 tenants and as many free workers, on a real server synced to disk.

    python -m loadtest.queue [--jobs 1000] [--tenants 50] [--json FILE]

Starts Valkey (`appendfsync always`) and NATS, stores the jobs, lets one scheduler look until all of them have started,
and prints decisions carried out per second and how long a look took. Every start is one script: state, event, epoch and
two leases. Workers only beat.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import structlog

from loadtest.support.machine import Meter, keep, met
from opentinker.services.scheduler.placement.reconciler import Reconciler
from opentinker.shared.state.store import Store
from opentinker.shared.types.core import JobState, Pool
from opentinker.shared.types.workers import WorkerInfo
from tests.conftest import Server, start_nats, start_valkey
from tests.support.factories import make_spec
from tests.support.scheduling import context

TARGET = 50.0
BEAT_S = 3600.0


async def run(nats: Server, valkey: Server, directory: Path, jobs: int, tenants: int, json: Path | None) -> bool:
    spec = make_spec().model_dump(mode="json")
    async with context(nats, valkey, "scheduler-0", directory) as ctx:
        await ctx.store.redis.config_set("appendfsync", "always")
        for number in range(jobs):
            await ctx.store.create_job(id=f"j-{number:010d}", spec=spec, tenant=f"t{number % tenants}")
        reconciler = Reconciler(ctx)
        began = time.perf_counter()
        await reconciler.reconcile()
        print(
            f"{jobs} jobs of {tenants} tenants wait; a look without workers takes {time.perf_counter() - began:.2f} s"
        )
        await _workers(ctx.store, jobs)
        meter = Meter({"valkey": valkey.process.pid})
        looks, decisions = [], 0
        while await _queued(ctx.store):
            began = time.perf_counter()
            decisions += await reconciler.reconcile()
            looks.append(time.perf_counter() - began)
        meter.stop()
        leases = await ctx.store.leases()
        assert len({lease.worker for lease in leases}) == len(leases) == 2 * jobs, "every worker is given once"
        rate = decisions / sum(looks)
        print(
            f"{decisions} decisions in {sum(looks):.1f} s, {len(looks)} looks, median {statistics.median(looks):.2f} s"
        )
        keep(json, {"decisions_per_s": rate})
        return met("decisions/s", rate, TARGET, meter.foreign)


async def _workers(store: Store, jobs: int) -> None:
    for number in range(jobs):
        for pool in (Pool.TRAINER, Pool.ROLLOUT):
            id = f"{pool}-{number:05d}"
            await store.beat(WorkerInfo(id=id, incarnation="1", pool=pool, host="here", pid=1), BEAT_S)
    await store.beat(WorkerInfo(id="env-0", incarnation="1", pool=Pool.ENV, host="here", pid=1), BEAT_S)


async def _queued(store: Store) -> bool:
    return any(job.state == JobState.QUEUED for job in await store.active_jobs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "valkey").mkdir()
        (directory / "nats").mkdir()
        valkey, nats = start_valkey(directory / "valkey"), start_nats(directory / "nats")
        try:
            good = asyncio.run(run(nats, valkey, directory, options.jobs, options.tenants, options.json))
        finally:
            valkey.kill()
            nats.kill()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
