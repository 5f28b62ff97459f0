"""How many trivial environment steps per second go through the scheduler to a process that serves its environment.

    python -m loadtest.served_plane [--sessions 64] [--seconds 5] [--turns 200] [--warm-up 1]

Starts nats-server and a Redis-compatible server on free ports, one scheduler, one `opentinker env serve` connected to
it by a WebSocket on loopback, and plays `sessions` episodes at once from this process as `loadtest.env_plane` does.
Prints steps/s, latency of a step, and CPU time per step of each process; exit status 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import uvloop

from loadtest._machine import Meter, met
from loadtest.env_plane import ENVIRONMENT, Client
from opentinker.embedded import EmbeddedServers
from opentinker.processes import free_port
from opentinker.shared.bus import Bus
from opentinker.shared.spec import parse_spec
from opentinker.shared.store import Store

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1_000
JOB = "j-loadtest00"
SPEC = {
    "name": "load",
    "model": {"base": "no/model"},
    "environment": {"name": "served:load"},
    "train": {"steps": 1},
}


async def measure(arguments: argparse.Namespace, servers: EmbeddedServers, pids: dict[str, int]) -> bool:
    async with Store.connect(servers.redis_url, "load") as store:
        await store.create_job(id=JOB, spec=parse_spec(SPEC).model_dump(mode="json"), tenant="default")
    async with Bus.connect(servers.nats_url, "load") as bus:
        client = Client(bus, arguments.turns, "served:load", JOB)
        probe = await client.sessions.open(  # waits until both processes are there
            job=JOB, session="probe", environment="served:load", config={}, row=0, seed=0, deadline_s=60.0
        )
        assert probe.failure is None, probe.error
        await client.sessions.close(worker=probe.worker, session="probe")
        players = [asyncio.create_task(client.play(number)) for number in range(arguments.sessions)]
        await asyncio.sleep(arguments.warm_up)
        meter, client.counting = Meter(pids), True
        await asyncio.sleep(arguments.seconds)
        meter.stop()
        client.counting = False
        client.stop = True
        await asyncio.gather(*players)
    steps = len(client.latencies)
    p50, p99 = np.percentile(client.latencies, [50, 99]) * 1e3
    per_step = ", ".join(f"{name} {value / steps * 1e6:.0f}" for name, value in meter.used.items())
    rate = steps / meter.seconds
    print(f"{rate:,.0f} steps/s at {arguments.sessions} sessions; a step takes p50 {p50:.2f} p99 {p99:.2f} ms")
    print(f"CPU-us per step: {per_step}, together {sum(meter.used.values()) / steps * 1e6:.0f}")
    print(f"cores used by others meanwhile: {meter.foreign:.2f}")
    return met("steps/s", rate, TARGET, meter.foreign)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--warm-up", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, EmbeddedServers(Path(directory), default_ports=False) as servers:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OPENTINKER_NATS_URL": servers.nats_url,
            "OPENTINKER_REDIS_URL": servers.redis_url,
            "OPENTINKER_DATA_DIR": directory,
            "OPENTINKER_HTTP_PORT": str(port),
            "OPENTINKER_LOG_LEVEL": "warning",
        }
        serve = ["env", "serve", ENVIRONMENT, "--name", "load", "--concurrency", str(arguments.sessions), "--url", url]
        started = {
            "scheduler": subprocess.Popen([sys.executable, "-m", "opentinker.services.scheduler"], env=environ),
            "served": subprocess.Popen([sys.executable, "-m", "opentinker.cli", *serve], env=environ),
        }
        try:
            nats = servers.children["nats"].pid
            assert nats is not None
            pids = {name: process.pid for name, process in started.items()} | {"client": os.getpid(), "nats": nats}
            good = uvloop.run(measure(arguments, servers, pids))
        finally:
            for process in reversed(started.values()):
                process.terminate()
                process.wait()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
