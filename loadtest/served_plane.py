"""Measures how many trivial environment steps per second go through the scheduler to a process that serves its
environment.

    python -m loadtest.served_plane [--sessions 64] [--seconds 5] [--turns 200] [--warm-up 1]

Starts nats-server and a Redis-compatible server on free ports, one scheduler, one `opentinker env serve` connected to
it by a WebSocket on loopback, and plays `sessions` episodes at once from this process as `loadtest.env_plane` does.
Prints steps/s, latency of a step, and CPU time per step of each process; exit status 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys

import uvloop

from loadtest.env_plane import ENVIRONMENT, arguments_of, measure
from loadtest.support.processes import nats_pid, own_scheduler, own_servers, started
from opentinker.local.embedded import EmbeddedServers
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.spec import parse_spec
from opentinker.shared.state.store import Store

TARGET = 1_000
JOB = "j-loadtest00"
SPEC = {"name": "load", "model": {"base": "no/model"}, "environment": {"name": "served:load"}, "train": {"steps": 1}}


async def run(arguments: argparse.Namespace, servers: EmbeddedServers, pids: dict[str, int]) -> bool:
    async with Store.connect(servers.operator_url("valkey"), "load") as store:
        await store.create_job(id=JOB, spec=parse_spec(SPEC).model_dump(mode="json"), tenant="default")
    async with Bus.connect(servers.operator_url("nats"), "load", "rollout-worker") as bus:
        return await measure(bus, arguments, pids, TARGET, environment="served:load", job=JOB)


def main() -> None:
    arguments = arguments_of(__doc__)
    serve = ["env", "serve", ENVIRONMENT, "--name", "load", "--concurrency", str(arguments.sessions), "--url"]
    with (
        own_servers() as (servers, directory),
        own_scheduler(servers, directory) as (scheduler, key, port),
        started(servers, "scheduler", *serve, f"http://127.0.0.1:{port}", api_key=key) as served,
    ):
        pids = {"scheduler": scheduler, "served": served, "client": os.getpid(), "nats": nats_pid(servers)}
        good = uvloop.run(run(arguments, servers, pids))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
